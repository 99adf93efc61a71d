"""Programs around the kernels on a GPU: jax's transformations, threads, several GPUs, CUDA graphs,
fresh processes. `pytest -m gpu`."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from exported import restored
from gpu_runs import of
from paths import SUPPORT, TESTS, importing
from properties.values import Program, unequal
from tiers import once_each

pytestmark = pytest.mark.gpu


def test_results_that_a_scan_keeps_are_made_once():
    """XLA may fuse the forward kernel with the copy that saves its results, but must not repeat
    it."""
    a = of("dims=128x128,dtype=bfloat16,batch=1,lengths=512x512").arrays()
    mask = packax.create_attention_mask(packax.causal(), q_len=512, kv_len=512)
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)

    def loss(query, policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(query, _):
            return query + packax.flash_attention(query, a["key"], a["value"], mask), None

        return jnp.sum(jax.lax.scan(layer, query, None, length=3)[0].astype(jnp.float32))

    def calls(policy):
        step = jax.jit(jax.grad(lambda query: loss(query, policy))).lower(a["query"]).compile()
        lines = step.as_text().splitlines()
        return sum("custom-call(" in line and "packax_forward" in line for line in lines)

    assert calls(keep) == 1
    assert calls(None) >= 2  # without the names it runs again, so the count is meaningful


STEP = "interval=causal,selector=packed,heads=4/2,order=deterministic"


def test_two_threads():
    work = []
    for length, dims, dtype in ((300, 64, "bfloat16"), (450, 128, "float16")):
        text = f"dims={dims}x{dims},dtype={dtype},lengths={length}x{length}"
        call = of(f"{STEP},{text}")
        program, a = Program(call), jax.device_put(call.arrays())
        work.append((program, a, jax.block_until_ready(program(a))))
    failures: list[BaseException] = []

    def loop(program, a, expected):
        try:
            for _ in range(40):
                assert not unequal(program(a), expected, "thread: ")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=item) for item in work * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_every_gpu():
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    call = of(f"{STEP},dims=64x64,dtype=bfloat16,lengths=300x300")
    step, a = jax.jit(call.step), call.arrays()
    expected = step(a)
    for device in jax.devices()[1:]:
        assert not unequal(step(jax.device_put(a, device)), expected, f"{device}: ")


COMMAND_BUFFERS = """
import jax
from gpu_runs import fixed, of
from properties.values import unequal
call = of("interval=causal,selector=packed,dims=128x128,dtype=bfloat16,lengths=333x333,order=ORDER")
a = call.arrays()

def step(query, _):
    y = fixed(call, call.step(a | {"query": query}))
    change = y["dquery"] if "dquery" in y else y["out"]
    return (query + 0.01 * change).astype(query.dtype), y

expected, query = [], a["query"]
single = jax.jit(step)
for _ in range(20):
    query, y = single(query, None)
    expected.append(y)
many = jax.jit(lambda query: jax.lax.scan(step, query, None, length=20))
for turn in range(3):
    last, ys = many(a["query"])
    assert not unequal({"last": last}, {"last": query}, f"turn {turn}: ")
    for i, y in enumerate(expected):
        assert not unequal({n: x[i] for n, x in ys.items()}, y, f"turn {turn}, step {i}: ")
print("same bits")
"""


def python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=importing(SUPPORT, TESTS / "table")
        | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        | environment,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


KINDS = ("FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,WHILE,CONDITIONAL", "")


@pytest.mark.parametrize("kinds,order", once_each(KINDS, ("deterministic", "any")))
def test_command_buffers(kinds, order):
    flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    assert "same bits" in python(COMMAND_BUFFERS.replace("ORDER", order), XLA_FLAGS=flags)


FRESH_PROCESS = """
import sys
from exported import restored
from gpu_runs import of
from properties.values import Program
call = of("interval=causal,selector=packed,dims=64x64,dtype=bfloat16,lengths=100x100")
Program(call)(call.arrays())
print("triton imported" if "triton" in sys.modules else "no triton")
"""


def test_no_triton_and_the_compilation_cache(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    assert "no triton" in python(FRESH_PROCESS, **cache)
    assert any(tmp_path.iterdir())
    assert "no triton" in python(FRESH_PROCESS, **cache)


def test_exported_decoding():
    """The workspace also has room for the shares of the largest size."""

    def step(query, key, value, lengths):
        return packax.decode_attention(query, key, value, lengths, return_lse=True)

    batch, length = jax.export.symbolic_shape("b, s")
    shapes = [jax.ShapeDtypeStruct((batch, 1, 8, 64), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct((batch, length, 2, 64), jnp.bfloat16)] * 2
    shapes.append(jax.ShapeDtypeStruct((batch,), jnp.int32))
    program = restored(
        jax.export.export(
            jax.jit(step), platforms=["cuda"], disabled_checks=packax.export_checks()
        )(*shapes)
    )
    keys = jax.random.split(jax.random.key(0), 3)
    for size, capacity in ((1, 1), (3, 4097)):
        x = [
            jax.random.normal(key, (size, n, heads, 64), jnp.bfloat16)
            for key, n, heads in zip(keys, (1, capacity, capacity), (8, 2, 2), strict=True)
        ]
        lengths = capacity - jnp.arange(size, dtype=jnp.int32)
        expected = jax.jit(step)(*x, lengths)
        for one, other in zip(program.call(*x, lengths), expected, strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-2)
