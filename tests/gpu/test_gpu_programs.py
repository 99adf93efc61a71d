"""Programs around the kernels on a GPU: jax's transformations, threads, several GPUs, CUDA graphs,
fresh processes. `pytest -m gpu`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import packax
import pytest
from gpu_kinds import DIMS, DTYPES, THREE_ROWS, causal_documents
from gpu_runs import assert_identical, build, passes, run, tensors
from paths import SUPPORT

pytestmark = pytest.mark.gpu


def test_jit_grad_vmap_scan_remat():
    x = tensors(3, 300, 300, 4, 2, 64, "bfloat16")
    ids = THREE_ROWS[:, :300]
    mask = jax.jit(lambda ids: packax.create_attention_mask(causal_documents(ids)))(ids)

    def loss(query, key, value, mask):
        out = packax.flash_attention(query, key, value, mask)
        return jnp.sum(out.astype(jnp.float32) * x.dout.astype(jnp.float32)[: len(out)])

    gradient = jax.grad(loss, (0, 1, 2))
    expected = gradient(x.query, x.key, x.value, mask)
    assert_identical(jax.jit(gradient)(x.query, x.key, x.value, mask), expected, "jit: ")
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
    for policy in (None, keep):
        remat = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2)))
        assert_identical(remat(x.query, x.key, x.value, mask), expected, "remat: ")

    def one(query, key, value, ids, dout):
        def out(*operands):
            return packax.flash_attention(*operands, causal_documents(ids))

        return jax.vjp(out, query[None], key[None], value[None])[1](dout[None])

    mapped = jax.jit(jax.vmap(one))(x.query, x.key, x.value, ids, x.dout)
    assert_identical([y[:, 0] for y in mapped], expected, "vmap: ")

    def layers(query):
        def layer(query, _):
            return packax.flash_attention(query, x.key, x.value, mask), None

        return jax.lax.scan(layer, query, None, length=4)[0]

    unrolled = x.query
    for _ in range(4):
        unrolled = packax.flash_attention(unrolled, x.key, x.value, mask)
    assert_identical(jax.jit(layers)(x.query), unrolled, "scan: ")


def test_results_that_a_scan_keeps_are_made_once():
    """XLA may fuse the forward kernel with the copy that saves its results, but must not repeat
    it."""
    x = tensors(1, 512, 512, 4, 2, 128, "bfloat16")
    mask = packax.create_attention_mask(packax.causal(), q_len=512, kv_len=512)
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)

    def loss(query, policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(query, _):
            return query + packax.flash_attention(query, x.key, x.value, mask), None

        return jnp.sum(jax.lax.scan(layer, query, None, length=3)[0].astype(jnp.float32))

    def calls(policy):
        step = jax.jit(jax.grad(lambda query: loss(query, policy))).lower(x.query).compile()
        lines = step.as_text().splitlines()
        return sum("custom-call(" in line and "packax_forward" in line for line in lines)

    assert calls(keep) == 1
    assert calls(None) >= 2  # without the names it runs again, so the count is meaningful


def test_two_threads():
    work = []
    for seed, length in enumerate((300, 450)):
        x = tensors(2, length, length, 4, 2, DIMS[seed], DTYPES[seed], seed)
        mask = build(causal_documents(THREE_ROWS[:2, :length]), x)
        work.append((x, mask, jax.block_until_ready(passes(x, mask, None, "cuda", True))))
    failures: list[BaseException] = []

    def loop(x, mask, expected):
        try:
            for _ in range(40):
                assert_identical(passes(x, mask, None, "cuda", True), expected, "thread: ")
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
    x = tensors(2, 300, 300, 4, 2, 64, "bfloat16")
    mask = build(causal_documents(THREE_ROWS[:2, :300]), x)
    expected = run(x, mask, None, True)
    for device in jax.devices()[1:]:
        operands = jax.device_put((x, mask), device)
        assert_identical(passes(*operands, None, "cuda", True), expected, f"{device}: ")


COMMAND_BUFFERS = """
import jax, numpy as np
from gpu_runs import assert_identical, build, packed, passes, same_each_run, tensors
import packax
x = tensors(2, 333, 333, 4, 2, 128, "bfloat16")
ids = packed(100, 33, 200)

def step(query, _):
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
    y = passes(x._replace(query=query), mask, None, "cuda", DETERMINISTIC)
    y = same_each_run(y, DETERMINISTIC)
    return (query + 0.01 * (y.dq if DETERMINISTIC else y.out)).astype(query.dtype), y

expected, query = [], x.query
single = jax.jit(step)
for _ in range(20):
    query, y = single(query, None)
    expected.append(y)
many = jax.jit(lambda query: jax.lax.scan(step, query, None, length=20))
for turn in range(3):
    last, ys = many(x.query)
    assert_identical(last, query, f"turn {turn}: ")
    for i, y in enumerate(expected):
        assert_identical(jax.tree.map(lambda a: a[i], ys), y, f"turn {turn}, step {i}: ")
print("same bits")
"""


def python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=SUPPORT,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("kinds", ("", "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,WHILE,CONDITIONAL"))
@pytest.mark.parametrize("exact", (True, False))
def test_command_buffers(kinds, exact):
    flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    code = COMMAND_BUFFERS.replace("DETERMINISTIC", str(exact))
    assert "same bits" in python(code, XLA_FLAGS=flags)


FRESH_PROCESS = """
import sys
from gpu_runs import packed, run, tensors
import packax
x = tensors(1, 100, 100, 2, 1, 64, "bfloat16")
run(x, packax.causal() & packax.documents(packed(60, 40)))
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
