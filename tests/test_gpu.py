"""What only a GPU can show: the cubins' numbers, memory behaviour and errors. `pytest -m gpu`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from gpu_runs import (
    Results,
    Tensors,
    assert_close,
    assert_identical,
    build,
    packed,
    passes,
    run,
    same_each_run,
    tensors,
)

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16")
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of query and key, and of value
WIDE = DIMS[2:]
# Each wide pair in one dtype: the other differs by the type of a load, and test_wide_cases has both.
KINDS = [(dtype, dims) for dims in DIMS[:2] for dtype in DTYPES] + list(
    zip(DTYPES, WIDE, strict=True)
)


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(params=(False, True), ids=("", "deterministic"))
def deterministic(request):
    return request.param


def name_of(kind):
    dtype, (qk_dim, v_dim) = kind
    return f"{dtype}-d{qk_dim}" + (f"x{v_dim}" if v_dim != qk_dim else "")


@pytest.fixture(params=KINDS, ids=name_of)
def kind(request):
    """dtype, head dims"""
    return request.param


def causal_documents(*ids, **positions):
    return packax.causal() & packax.documents(*ids, **positions)


# --- Numbers.


def check_case(case, dtype, dims):
    x = Tensors(*case.tensors(dtype, *dims))
    assert_close(x, run(x, case.expression()), case.allowed())


@pytest.mark.parametrize("dims", DIMS[:2], ids=lambda dims: f"d{dims[0]}")
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_cases(case, dtype, dims):
    check_case(case, dtype, dims)


WIDE_KINDS = itertools.cycle((dtype, dims) for dims in WIDE for dtype in DTYPES)


@pytest.mark.parametrize(
    "case,kind",
    [
        pytest.param(case, kind, id=f"{case}-{name_of(kind)}")
        for case, kind in zip(cases.CASES, WIDE_KINDS, strict=False)
    ],
)
def test_wide_cases(case, kind):
    """Every case once, with the pairs and dtypes in turns."""
    check_case(case, *kind)


THREE_ROWS = np.stack(
    [packed(300, 1, -40, 129, -30), packed(500), packed(-7, 64, 64, 200, -100, 65)]
)


@pytest.mark.parametrize("kv_heads", (8, 2, 1), ids=("gqa1", "gqa4", "gqa8"))
def test_three_rows_of_different_documents(kv_heads, kind):
    dtype, dims = kind
    x = tensors(3, 500, 500, 8, kv_heads, dims, dtype)
    expression = causal_documents(THREE_ROWS)
    assert_close(x, run(x, expression), expression.as_array(500, 500))


@pytest.mark.parametrize("q_len,kv_len", ((1, 700), (700, 1), (130, 515), (515, 130)))
@pytest.mark.parametrize("kind", ("full", "causal", "documents", "ranges"))
def test_query_and_key_lengths_differ(q_len, kv_len, kind, dtype):
    rng = np.random.default_rng(1)
    lo = rng.integers(-5, kv_len + 5, (2, q_len)).astype(np.int32)
    expression = {
        "full": packax.full(),
        "causal": packax.causal(),
        "documents": packax.documents(
            rng.integers(-1, 3, (2, q_len)), rng.integers(-1, 3, (2, kv_len))
        ),
        "ranges": packax.ranges(lo, lo + rng.integers(0, 200, (2, q_len), np.int32)),
    }[kind]
    x = tensors(2, q_len, kv_len, 4, 2, 64, dtype)
    assert_close(x, run(x, expression), expression.as_array(q_len, kv_len))


@pytest.mark.parametrize("first", range(1, 301, 25))
def test_every_length_to_300(first):
    for length in range(first, first + 25):
        dims = DIMS[next((i for i, n in ((3, 13), (2, 11), (1, 7)) if length % n == 0), 0)]
        x = tensors(1, length, length, 2, 1, dims, "bfloat16", seed=length)
        cut = (length * 5) // 11
        ids = packed(*(n for n in (cut, length - cut) if n))
        expression = causal_documents(ids)
        try:
            allowed = expression.as_array(length, length)
            assert_close(x, run(x, expression), allowed, pad=325)
        except AssertionError as error:
            raise AssertionError(f"length {length}: {error}") from error


@pytest.mark.parametrize("scale", (0.0, -0.3, 2.5))
def test_scale(scale, dtype):
    x = tensors(1, 200, 200, 2, 2, 64, dtype)
    expression = causal_documents(packed(90, 110))
    assert_close(x, run(x, expression, scale), expression.as_array(200, 200), scale)


def test_ids_and_positions_of_any_shape(kind):
    dtype, dims = kind
    rng = np.random.default_rng(2)
    ids = rng.choice(np.array([-(2**31), -2, -1, 0, 5, 2**31 - 1], np.int32), (2, 333))
    positions = rng.integers(-50, 50, (2, 333)).astype(np.int32)
    x = tensors(2, 333, 333, 4, 2, dims, dtype)
    expression = causal_documents(ids, positions=positions)
    assert_close(x, run(x, expression), expression.as_array(333, 333))


@pytest.mark.parametrize("ordered", (False, True), ids=("tested", "ordered"))
def test_two_limits_of_positions(kind, ordered, deterministic):
    """Windows of positions in several tiles: the element test with a lower limit, and without one."""
    dtype, dims = kind
    rng = np.random.default_rng(7)
    ids = np.stack([packed(300, 1, -40, 359), packed(-7, 64, 200, 429)])
    positions = rng.integers(0, 500, ids.shape).astype(np.int32)
    if ordered:
        positions = np.sort(positions, axis=1)
    x = tensors(2, 700, 700, 4, 2, dims, dtype)
    expression = packax.sliding_window(60, 25) & packax.documents(ids, positions=positions)
    got = run(x, expression, deterministic=deterministic)
    assert_close(x, got, expression.as_array(700, 700))


def test_xla_and_cubin_agree_on_the_gpu():
    x = tensors(3, 500, 500, 8, 2, 128, "bfloat16")
    mask = build(causal_documents(THREE_ROWS), x)
    for got, expected in zip(run(x, mask), passes(x, mask, None, "xla"), strict=True):
        got, expected = (np.asarray(y, np.float32) for y in (got, expected))
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        difference = np.linalg.norm(got[finite] - expected[finite])
        assert difference <= 1e-2 * np.linalg.norm(expected[finite])


# --- What must not matter, bit for bit.


@pytest.mark.parametrize("garbage", (6e4, -6e4, "max"))
def test_garbage_in_padding_changes_nothing(garbage, kind, deterministic):
    dtype, dims = kind
    padding = (THREE_ROWS == packax.PADDING_SEGMENT_ID)[..., None, None]
    if garbage == "max":
        garbage = float(jnp.finfo(dtype).max)
    clean = tensors(3, 500, 500, 8, 2, dims, dtype)
    four = [jnp.where(padding, jnp.asarray(garbage, dtype), y) for y in clean[:4]]
    dlse = jnp.where(padding[:, None, :, 0, 0], 1e30, clean.dlse)
    dirty = type(clean)(*four, dlse)
    expression = causal_documents(THREE_ROWS)
    expected, got = (run(y, expression, None, deterministic) for y in (clean, dirty))
    assert_identical(
        same_each_run(got, deterministic),
        same_each_run(expected, deterministic),
        f"padding of {garbage}: ",
    )
    assert np.isfinite(np.asarray(got.dq, np.float32)).all()
    for y in (got.out, got.dq, got.dk, got.dv):
        assert not np.any(np.asarray(y, np.float32)[padding[..., 0, 0]])
    assert np.isneginf(
        np.asarray(got.lse)[np.broadcast_to(padding[:, None, :, 0, 0], got.lse.shape)]
    ).all()


def test_other_documents_change_nothing(kind):
    dtype, dims = kind
    ids = packed(130, 257, 90)
    inside = (ids == 2)[None, :, None, None]
    x = tensors(1, 477, 477, 8, 2, dims, dtype)
    y = tensors(1, 477, 477, 8, 2, dims, dtype, seed=1)
    mixed = type(x)(
        *(jnp.where(inside, a, 100 * b) for a, b in zip(x[:4], y[:4], strict=True)),
        jnp.where(inside[:, :, :, 0].swapaxes(1, 2), x.dlse, y.dlse),
    )
    expression = causal_documents(ids)
    before, after = (run(y, expression, None, True) for y in (x, mixed))
    rows = np.flatnonzero(ids == 2)
    for name in Results._fields:
        axis = 2 if name == "lse" else 1
        a, b = (np.take(np.asarray(getattr(r, name)), rows, axis) for r in (before, after))
        assert_identical(b, a, name)
        a, b = (np.asarray(getattr(r, name), np.float32) for r in (before, after))
        assert not np.array_equal(a, b), f"{name} of the other documents should have changed"


def test_nan_stays_where_numerics_md_says(kind):
    dtype, dims = kind
    ids = packed(384, 300, -84, 116)
    at = np.arange(884)
    x = tensors(1, 884, 884, 4, 2, dims, dtype)
    expression = causal_documents(ids)
    expected = run(x, expression, None, True)

    broken = jnp.asarray(at >= 384)
    wide, sums = broken[None, :, None, None], broken[None, None]
    got = run(
        Tensors(*(jnp.where(wide, jnp.nan, y) for y in x[:4]), jnp.where(sums, jnp.nan, x.dlse)),
        expression,
        None,
        True,
    )
    for name in Results._fields:
        axis = 2 if name == "lse" else 1
        a, b = (np.take(np.asarray(getattr(r, name)), at[:384], axis) for r in (got, expected))
        assert_identical(a, b, f"{name} of a document that shares no tile with the NaNs: ")
        assert np.isnan(np.asarray(getattr(got, name), np.float32)).any()


def test_the_same_bits_every_time(kind, deterministic):
    dtype, dims = kind
    x = tensors(3, 500, 500, 8, 2, dims, dtype)
    expression = causal_documents(THREE_ROWS)
    first = same_each_run(run(x, expression, None, deterministic), deterministic)
    for _ in range(10):
        again = same_each_run(run(x, expression, None, deterministic), deterministic)
        assert_identical(again, first, "second run: ")


# --- Masks: the CUDA kernels against their XLA twins, integer for integer.


def id_patterns(length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    lengths = rng.integers(1, max(2, length // 5), length)
    runs = np.repeat(np.arange(length), lengths)[:length].astype(np.int32)
    return {
        "packed": runs,
        "hashed": (runs.astype(np.uint32) * np.uint32(2654435761)).view(np.int32),
        "colliding": runs * np.int32(4096),
        "reappearing": runs % np.int32(3),
        "random": rng.integers(-2, 4, length).astype(np.int32),
        "padding": np.full(length, -1, np.int32),
        "one": np.zeros(length, np.int32),
    }


@pytest.mark.parametrize("length", (1, 2, 63, 64, 65, 127, 129, 1000, 1024, 1025, 5000, 131072))
def test_mask_arrays_equal_the_xla_twins(length):
    rng = np.random.default_rng(length)
    cpu = jax.devices("cpu")[0]
    patterns = id_patterns(length, rng)
    rows = np.stack(list(patterns.values()))
    ramps = np.stack(
        [rng.permutation(length) if i % 2 else np.arange(length) for i in range(len(rows))]
    )
    ramps = ramps.astype(np.int32)
    other = np.roll(rows, 1, axis=0)[:, : max(1, length // 2)]
    lower = ramps[:, : other.shape[1]]
    makers = {
        "ids": lambda ids, other, pos, kv_pos: packax.documents(ids),
        "causal": lambda ids, other, pos, kv_pos: causal_documents(ids),
        "positions": lambda ids, other, pos, kv_pos: causal_documents(ids, positions=pos),
        "restarting": lambda ids, other, pos, kv_pos: causal_documents(ids, positions=pos % 50),
        "cross": lambda ids, other, pos, kv_pos: packax.documents(ids, other),
        "cross positions": lambda ids, other, pos, kv_pos: causal_documents(
            ids, other, positions=pos, kv_positions=kv_pos
        ),
        "cut": lambda ids, other, pos, kv_pos: (
            causal_documents(ids) & packax.ranges(pos // 2, pos * 2)
        ),
    }
    for name, make in makers.items():
        function = jax.jit(lambda *arrays, make=make: packax.create_attention_mask(make(*arrays)))
        arrays = (rows, other, ramps, lower)
        got, expected = (
            function(*jax.device_put(arrays, device)) for device in (jax.devices()[0], cpu)
        )
        assert next(iter(got.q_lo.devices())).platform == "gpu"
        assert next(iter(expected.q_lo.devices())).platform == "cpu"
        assert_identical(got, expected, f"{name} (rows are {list(patterns)}): ")


# --- Transformations.


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


def test_two_threads():
    work = []
    for seed, length in enumerate((300, 450)):
        x = tensors(2, length, length, 4, 2, DIMS[seed], DTYPES[seed], seed)
        mask = build(causal_documents(THREE_ROWS[:2, :length]), x)
        work.append((x, mask, jax.block_until_ready(passes(x, mask, None, "cubin", True))))
    failures: list[BaseException] = []

    def loop(x, mask, expected):
        try:
            for _ in range(40):
                assert_identical(passes(x, mask, None, "cubin", True), expected, "thread: ")
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
        there = jax.device_put((x, mask), device)
        assert_identical(passes(*there, None, "cubin", True), expected, f"{device}: ")


COMMAND_BUFFERS = """
import jax, numpy as np
from gpu_runs import assert_identical, build, packed, passes, same_each_run, tensors
import packax
x = tensors(2, 333, 333, 4, 2, 128, "bfloat16")
ids = packed(100, 33, 200)

def step(query, _):
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
    y = passes(x._replace(query=query), mask, None, "cubin", DETERMINISTIC)
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
        cwd=os.path.dirname(__file__),
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


# --- Size.


def test_offsets_past_two_to_the_31():
    """2 x 132,096 x 64 x 128 elements: the last document, last heads, against the same alone."""
    free = jax.devices()[0].memory_stats()["bytes_limit"]
    if free < 60e9:
        pytest.skip(f"needs 60 GB of GPU memory, there are {free / 1e9:.0f}")
    length, document, heads = 132096, 1024, 64
    x = tensors(2, length, length, heads, heads, 128, "bfloat16")
    assert x.query.size > 2**31
    ids = np.repeat(np.arange(length // document), document).astype(np.int32)
    mask = build(causal_documents(ids), x)
    got = passes(x, mask, None, "cubin")
    alone = jnp.tri(document, dtype=bool)[None]
    for batch, start in ((0, 0), (1, length - document)):
        rows = slice(start, start + document)

        def part(y, batch=batch, rows=rows):
            return y[batch : batch + 1, rows, -2:]

        def sums(y, batch=batch, rows=rows):
            return y[batch : batch + 1, -2:, rows]

        few = type(x)(*map(part, x[:4]), sums(x.dlse))
        few_got = Results(part(got.out), sums(got.lse), *map(part, got[2:]))
        assert_close(few, few_got, alone)
    del got, x
