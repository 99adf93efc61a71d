"""decode_attention on the CPU: numbers, transformations, what it says when it cannot.

Guards against a row that attends a key too many or too few at an end (lengths, starts, windows,
pages), against reading what lies behind a length, and against a copy of the cache where vmap need
not make one.
"""

from __future__ import annotations

import doctest
import functools
import importlib.util
import json
import re
import sys

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packax
import pytest
from decoding import CASES, Case, Extension
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import calls, text_of
from packax._src.ops import ffi as kernel_table
from packax._src.ops import lowering_decode as decode_lowering
from paths import BENCHMARKS

SCALE = 0.4


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
    case = CASES[name]
    x = decoding.tensors(case, jnp.float32)
    true = decoding.exact(case, x, SCALE)
    oracle.check(decoding.run(case, x, SCALE), true, decoding.plain(case, x, SCALE))


@pytest.mark.parametrize(
    "name,dtype", [("soft cap and sinks", jnp.bfloat16), ("pages longer than a block", jnp.float16)]
)
def test_small_dtypes(name, dtype):
    case = CASES[name]
    x = decoding.cast(decoding.tensors(case), dtype)
    true = decoding.exact(case, x, SCALE)
    got = decoding.run(case, x, SCALE)
    assert got.out.dtype == dtype and got.lse.dtype == jnp.float32
    oracle.check(got, true, decoding.plain(case, x, SCALE))


def test_what_cannot_be_is_nan_in_its_row_alone():
    """A length over the capacity, an entry of the table that is no page; every other row as
    before."""
    case = Case((32, 20, 9), q_len=2, capacity=32, page_size=8)
    x = decoding.tensors(case)
    good = decoding.run(case, x, SCALE)
    # The last row of sequence 0 is at position 32, which is none; its first is at 31.
    one_more = x._replace(lengths=x.lengths + np.array([1, 0, 0], np.int32))
    shifted = decoding.run(case._replace(lengths=(33, 20, 9)), one_more, SCALE)
    assert np.isnan(shifted.out[0, 1]).all() and np.isnan(shifted.lse[0, :, 1]).all()
    assert np.isfinite(shifted.out[0, 0]).all()
    np.testing.assert_array_equal(shifted.out[1:], good.out[1:])
    for entry in (-1, x.key_cache.shape[0], 2**31 - 1, -(2**31)):
        table = x.block_table.copy()
        table[1, 2] = entry  # keys 16 to 23; rows are at 18 and 19
        broken = decoding.run(case, x._replace(block_table=table), SCALE)
        assert np.isnan(broken.out[1]).all() and np.isnan(broken.lse[1]).all()
        for b in (0, 2):
            np.testing.assert_array_equal(broken.out[b], good.out[b])


@pytest.mark.parametrize("entry", [-1, 3])
def test_a_missing_page_reads_no_other(entry):
    """NaN and infinity in the first page, and in the last, leave rows that do not attend the
    missing page."""
    key_cache = jnp.asarray([jnp.nan, 1.0, jnp.inf])[:, None, None, None] * jnp.ones((1, 1, 8))
    out, lse = packax.decode_attention(
        jnp.ones((1, 2, 1, 8)), key_cache, key_cache, jnp.array([2]),
        block_table=jnp.array([[1, entry]]), return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0], 1, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0, 0], np.sqrt(8), rtol=1e-6)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1])


def test_lengths_of_other_integer_types():
    case = Case((300, 7))
    x = decoding.tensors(case)
    want = decoding.run(case, x, SCALE).out
    small = x._replace(lengths=x.lengths.astype(np.uint16))
    np.testing.assert_array_equal(decoding.run(case, small, SCALE).out, want)
    far = x._replace(lengths=np.array([2**32 - 1, 7], np.uint32))  # not -1
    got = decoding.run(case, far, SCALE)
    assert np.isnan(got.out[0]).all()
    np.testing.assert_array_equal(got.out[1], want[1])
    none = decoding.run(case, x._replace(lengths=np.array([-(2**31), -1], np.int32)), SCALE)
    assert not none.out.any() and np.isneginf(none.lse).all()


def test_scales_of_any_sign():
    case = Case((70,))
    x = decoding.tensors(case)
    true = decoding.exact(case, x, -0.3)
    oracle.check(decoding.run(case, x, -0.3), true, decoding.plain(case, x, -0.3))
    zero = decoding.run(case, x, 0)
    np.testing.assert_allclose(zero.lse, np.log(70), rtol=1e-6)


def test_a_loop_over_a_paged_cache():
    """The docstring's step under scan, against flash_attention of the whole sequences."""
    rng = np.random.default_rng()
    batch, steps, heads, kv_heads, dim, page_size = 2, 11, 4, 2, 8, 4
    q, k, v = (
        jnp.asarray(rng.standard_normal((batch, steps, h, dim)), jnp.float32)
        for h in (heads, kv_heads, kv_heads)
    )
    table = jnp.asarray(rng.permutation(9)[:6].reshape(2, 3), jnp.int32)
    pool = jnp.full((9, page_size, kv_heads, dim), jnp.nan)

    def step(state, token):
        key_cache, value_cache, lengths = state
        query, key, value = (x[:, None] for x in token)
        page = jnp.take_along_axis(table, lengths[:, None] // page_size, axis=1)
        at = page, lengths[:, None] % page_size
        key_cache = key_cache.at[at].set(key, mode="drop")
        value_cache = value_cache.at[at].set(value, mode="drop")
        out = packax.decode_attention(query, key_cache, value_cache, lengths + 1, block_table=table)
        return (key_cache, value_cache, lengths + 1), out[:, 0]

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state, tokens):
        return jax.lax.scan(step, state, tokens)

    tokens = [x.swapaxes(0, 1) for x in (q, k, v)]
    _, got = loop((pool, pool + 0, jnp.zeros(batch, jnp.int32)), tokens)
    got = got.swapaxes(0, 1)
    want = packax.flash_attention(q, k, v, packax.causal())
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-6)


VMAPPED = {
    "all": {"query": 1, "key": 0, "value": 0, "kv_lengths": 0},
    "lengths": {"kv_lengths": 0},
    "one cache": {"query": 0, "key": 2},
    "sinks": {"sinks": 0},
}
VMAPS = [(name, False) for name in VMAPPED] + [("all", True), ("one cache", True)]


@pytest.mark.parametrize("name,paged", VMAPS)
def test_vmap(name, paged):
    case = Case((20, 9), q_len=2, capacity=24, page_size=8 * paged, sinks=True)
    xs = [decoding.tensors(case, seed=s) for s in (1, 2, 3)]
    operands, first = xs[0].arguments()
    first |= zip(("query", "key", "value", "kv_lengths"), operands, strict=True)
    axes = dict(VMAPPED[name])
    if paged and name == "all":
        axes["block_table"] = 0
    one_by_one = jax.jit(packax.decode_attention)
    held = [x.arguments() for x in xs]
    each = {n: [x[1][n] for x in held] for n in ("block_table", "sinks") if n in held[0][1]}
    each |= {n: [x[0][k] for x in held] for k, n in enumerate(("query", "key", "value"))}
    each["kv_lengths"] = [x.lengths - i for i, x in enumerate(xs)]
    axes_of_all = {n: axes.get(n) for n in first}
    mapped = {n: jnp.stack(each[n], axes[n]) if n in axes else first[n] for n in first}
    got = jax.jit(jax.vmap(lambda x: packax.decode_attention(**x), (axes_of_all,)))(mapped)
    for i in range(3):
        one = {n: each[n][i] if n in axes else first[n] for n in first}
        np.testing.assert_allclose(got[i], one_by_one(**one), atol=1e-6, rtol=1e-6, err_msg=str(i))


def test_vmap_twice():
    case = Case((20, 9), capacity=24)
    x = decoding.tensors(case)
    lengths = jnp.arange(6).reshape(2, 3)[..., None] + jnp.array([5, 9])
    f = jax.jit(lambda n: packax.decode_attention(x.query, x.key_cache, x.value_cache, n))
    got = jax.jit(jax.vmap(jax.vmap(f)))(lengths)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(got[i, j], f(lengths[i, j]), atol=1e-6, rtol=1e-6)


def test_inside_the_users_shard_map():
    """Batch and heads: everything is local."""
    case = Case((290, 60, 7, 300), heads=4, kv_heads=2, sinks=True)
    x = decoding.tensors(case)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows, row = P("data", None, "model", None), P("data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, row, P("model")),
        out_specs=(rows, P("data", "model")),
    )  # fmt: skip
    def sharded(query, key, value, lengths, sinks):
        return packax.decode_attention(
            query, key, value, lengths, sinks=sinks, scale=SCALE, return_lse=True
        )

    got = sharded(x.query, x.key_cache, x.value_cache, x.lengths, x.sinks)
    for a, b in zip(got, decoding.run(case, x, SCALE), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("transform", (jax.grad, jax.jacfwd))
def test_no_gradient(transform):
    x = decoding.tensors(Case((7,)))
    loss = lambda q: packax.decode_attention(q, *x[1:4]).sum()  # noqa: E731
    with pytest.raises(NotImplementedError,
        match="decode_attention has no gradient: differentiate flash_attention"):  # fmt: skip
        transform(loss)(x.query)
    stopped = jax.grad(lambda q: loss(jax.lax.stop_gradient(q)) + q.sum())(x.query)
    np.testing.assert_array_equal(stopped, 1)


# --- What CUDA gets.


def shapes(batch=2, q_len=1, heads=8, kv_heads=2, dims=(64, 64), keys=(2, 4096),
    dtype=jnp.bfloat16):  # fmt: skip
    return (
        jax.ShapeDtypeStruct((batch, q_len, heads, dims[0]), dtype),
        jax.ShapeDtypeStruct((*keys, kv_heads, dims[0]), dtype),
        jax.ShapeDtypeStruct((*keys, kv_heads, dims[1]), dtype),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def test_lowering(monkeypatch):
    monkeypatch.setattr(kernel_table, "ext", Extension)
    ((target, attributes, operands, results),) = calls(text_of(packax.decode_attention, *shapes()))
    assert target == "packax_decode_v1"
    assert {n: a.split(" ")[0] for n, a in attributes.items()} == {
        "scale": "1.250000e-01", "soft_cap": "0.000000e+00", "paged": "0", "has_sinks": "0",
        "exact": "0"
    }  # fmt: skip
    cache = "2x4096x2x64xbf16"
    assert operands == ["2x1x8x64xbf16", cache, cache, "2x1xi32", "2x1xi32", "2x1xi32", "2x1xi32"]
    assert results == ["2x1x8x64xbf16", "2x8x1xf32", "32x2x1x8x64xf32", "32x2x1x8xf32"]

    table = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    sinks = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    call = functools.partial(packax.decode_attention, soft_cap=50, scale=-2)
    paged = lambda *x: call(*x[:4], block_table=x[4], sinks=x[5])  # noqa: E731
    text = text_of(paged, *shapes(dims=(168, 24), keys=(99, 16)), table, sinks)
    ((_, attributes, operands, results),) = calls(text)
    assert {n: a.split(" ")[0] for n, a in attributes.items()} == {
        "scale": "-2.000000e+00", "soft_cap": "5.000000e+01", "paged": "1", "has_sinks": "1",
        "exact": "0"
    }  # fmt: skip
    assert operands[1:3] == ["99x16x2x168xbf16", "99x16x2x24xbf16"]
    assert operands[5:] == ["2x7xi32", "1x8xf32"]
    assert results[2:] == ["1x2x1x8x24xf32", "1x2x1x8xf32"]  # 112 keys


def test_export_for_cuda(monkeypatch):
    """Batch, cache and pages symbolic: room for the most shares that any size takes."""
    monkeypatch.setattr(kernel_table, "ext", Extension)
    batch, length, pages = jax.export.symbolic_shape("b, s, p")
    for keys, table, splits in (
        ((batch, length), None, 128),
        ((batch, 4096), None, 32),
        ((pages, 16), jax.ShapeDtypeStruct((batch, length), jnp.int32), 128),
    ):
        call = lambda *x: packax.decode_attention(*x[:4], block_table=x[4])  # noqa: E731
        exported = jax.export.export(
            jax.jit(call), platforms=["cuda", "cpu"], disabled_checks=packax.export_checks()
        )(*shapes(batch, keys=keys), table)
        text = exported.mlir_module()
        assert "@packax_decode_v1" in text and f"tensor<{splits}x?x1x8xf32>" in text
        assert str(exported.out_avals[0].shape) == "(b, 1, 8, 64)"


@pytest.mark.parametrize(
    "precision,exact", [(None, 0), ("tensorfloat32", 0), ("highest", 1), ("float32", 1)]
)
def test_precision_of_float32(monkeypatch, precision, exact):
    """As asked for, or as jax is set where it is called; of the kernels and of every product in
    XLA."""
    monkeypatch.setattr(kernel_table, "ext", Extension)
    operands = shapes(dtype=jnp.float32)
    asked = functools.partial(packax.decode_attention, precision=precision)
    ((target, attributes, types, results),) = calls(text_of(asked, *operands))
    assert target == "packax_decode_v1" and attributes["exact"] == f"{exact} : i32"
    cache = "2x4096x2x64xf32"
    assert types[:3] == ["2x1x8x64xf32", cache, cache]
    assert results == ["2x1x8x64xf32", "2x8x1xf32", "32x2x1x8x64xf32", "32x2x1x8xf32"]
    with jax.default_matmul_precision(precision):
        ((_, attributes, *_),) = calls(text_of(packax.decode_attention, *operands))
    assert attributes["exact"] == f"{exact} : i32"
    xla = text_of(functools.partial(asked, implementation="xla"), *operands)
    wanted = {None: "DEFAULT", "tensorfloat32": "HIGH"}.get(precision, "HIGHEST")
    assert xla.count("stablehlo.dot_general") == xla.count(f"[{wanted}, {wanted}]") == 2


def test_a_build_may_have_one_precision_of_float32(monkeypatch):
    rows = [row for row in Extension.variants() if row["dtype"] != "f32"]
    monkeypatch.setattr(kernel_table, "ext", Extension)
    monkeypatch.setattr(Extension, "variants", staticmethod(lambda: rows))
    operands = shapes(dtype=jnp.float32)
    text_of(packax.decode_attention, *operands)
    with pytest.raises(NotImplementedError, match="no decode kernel for float32"):
        text_of(functools.partial(packax.decode_attention, precision="highest"), *operands)


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ((1, 1, 32, 8, 131072), 128),
        ((8, 1, 32, 8, 32768), 25),
        ((64, 1, 32, 8, 8192), 6),
        ((1, 16, 32, 8, 131072), 128),
        ((64, 16, 32, 8, 8192), 2),
        ((1, 1, 32, 8, 130), 2),
        ((0, 1, 32, 8, 130), 2),
        ((4096, 1, 1, 1, 128), 1),
    ],
)
def test_room_of_the_workspace(sizes, splits):
    assert decode_lowering.splits(*sizes) == splits


def test_vmap_keeps_one_cache(monkeypatch):
    """Of a query and lengths alone: rows of the one cache by a table, and no broadcast of it."""
    monkeypatch.setattr(kernel_table, "ext", Extension)
    query, key, value, lengths = shapes()
    mapped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (query, lengths)]
    function = jax.vmap(packax.decode_attention, (0, None, None, 0))
    ((_, attributes, operands, _),) = calls(text_of(function, mapped[0], key, value, mapped[1]))
    assert attributes["paged"].split(" ")[0] == "1"
    assert operands == ["6x1x8x64xbf16", *["2x4096x2x64xbf16"] * 2, *["6x1xi32"] * 4]


def test_kernels_that_are_not_there(monkeypatch):
    monkeypatch.setattr(kernel_table, "ext", Extension)
    dtypes = ("bfloat16", "float16", "float32")
    listed = ", ".join(f"{dtype} {dims}" for dims in ("64/64", "192/128") for dtype in dtypes)
    for dims, dtype in (
        ((200, 64), jnp.bfloat16),
        ((64, 136), jnp.bfloat16),
        ((60, 64), jnp.bfloat16),
        ((200, 64), jnp.float32),
    ):
        with pytest.raises(NotImplementedError) as error:
            text_of(packax.decode_attention, *shapes(dims=dims, dtype=dtype))
        assert str(error.value) == (
            f"no decode kernel for {jnp.dtype(dtype)} with head dims {dims[0]}/{dims[1]} (query "
            f"and key / value); there are, for multiples of 8 up to these: {listed}. "
            'implementation="xla" takes any head dim, and float64'
        )
        xla = functools.partial(packax.decode_attention, implementation="xla")
        assert calls(text_of(xla, *shapes(dims=dims, dtype=dtype))) == []
    cuda = functools.partial(packax.decode_attention, implementation="cuda")
    with pytest.raises(NotImplementedError, match='implementation="cuda" needs a CUDA device'):
        text_of(cuda, *shapes(), platforms=("cpu",))
    monkeypatch.setattr(kernel_table, "ext", None)
    monkeypatch.setattr(kernel_table, "ext_error", "why", raising=False)
    with pytest.raises(NotImplementedError, match=r"did not load \(why\)"):
        text_of(packax.decode_attention, *shapes(batch=3, keys=(3, 64)))


# --- What it refuses.

Q, K, V, N = shapes(dtype=jnp.float32)


def as_type(x, **changes):
    return jax.ShapeDtypeStruct(changes.get("shape", x.shape), changes.get("dtype", x.dtype))


REFUSED = {
    "query must have shape (batch, rows, heads, dim), not (2, 8, 64)": {
        "query": as_type(Q, shape=(2, 8, 64))},
    "key must have shape (batch, length, heads, dim), not (2, 64)": {
        "key": as_type(K, shape=(2, 64))},
    "value must have shape (pages, page size, heads, dim), not (2,)": {
        "value": as_type(V, shape=(2,)), "block_table": as_type(N, shape=(2, 3))},
    "query must not be empty, but has shape (2, 1, 0, 64)": {
        "query": as_type(Q, shape=(2, 1, 0, 64))},
    "key must not be empty, but has shape (2, 0, 2, 64)": {
        "key": as_type(K, shape=(2, 0, 2, 64))},
    "value must be one of bfloat16, float16, float32, float64, but is int32": {
        "value": as_type(V, dtype=jnp.int32)},
    "query, key and value must have one dtype, but have float32, float16 and float32": {
        "key": as_type(K, dtype=jnp.float16)},
    "query must have 1 to 16 rows of a sequence, but has 17: for more, flash_attention with "
    "ranges(lo, hi). query has shape (2, 17, 8, 64), whose axes are (batch, rows, heads, dim)": {
        "query": as_type(Q, shape=(2, 17, 8, 64))},
    "value must have the shape of key, (2, 4096, 2) and a head dim, but has "
    "(2, 4095, 2, 64)": {
        "value": as_type(V, shape=(2, 4095, 2, 64))},
    "the heads of query must be a multiple of those of the caches, but there are 7 and 2: query "
    "has shape (2, 1, 7, 64), whose axes are (batch, rows, heads, dim), and key "
    "(2, 4096, 2, 64), whose axes are (batch, length, heads, dim)": {
        "query": as_type(Q, shape=(2, 1, 7, 64))},
    "key must have the head dim of query, 72, but has 64": {
        "query": as_type(Q, shape=(2, 1, 8, 72))},
    "kv_lengths must have shape (2,), as query, but has (3,)": {"kv_lengths": as_type(N,
        shape=(3,))},
    "kv_lengths must be an array of integers, but is float32": {
        "kv_lengths": as_type(N, dtype=jnp.float32)},
    "key has batch size 2, but query has 3; pages need a block_table": {
        "query": as_type(Q, shape=(3, 1, 8, 64)), "kv_lengths": as_type(N, shape=(3,))},
    "block_table must have shape (2, blocks), as query, but has (3, 2)": {
        "block_table": as_type(N, shape=(3, 2))},
    "block_table must have shape (2, blocks), as query, but has (2, 0)": {
        "block_table": as_type(N, shape=(2, 0))},
    "block_table must be an array of integers, but is bool": {
        "block_table": as_type(N, shape=(2, 2), dtype=jnp.bool_)},
    "a sequence may have room for 536870912 keys at most, but has it for 536875008": {
        "block_table": as_type(N, shape=(2, 131073))},
    "kv_starts must have shape (2,), one for a sequence, or (2, 1), one for a row, but has "
    "(1, 2)": {
        "kv_starts": as_type(N, shape=(1, 2))},
    "kv_starts must be an array of integers, but is float32": {
        "kv_starts": as_type(N, dtype=jnp.float32)},
    **{
        "window must be None or (left, right), integers from 0 on, known when tracing, or None for "
        f"no limit, but is {window!r}": {"window": window}
        for window in (5, (-1, 0), (0, 1.5), (True, 0), (1, 2, 3), "ab")
    },
    "causal must be True or False, but is 1": {"causal": 1},
    "return_lse must be True or False, but is None": {"return_lse": None},
    "scale must be a Python or numpy number or an array of shape (), but is a str": {"scale": "1"},
    "scale must be a Python or numpy number, known when tracing, but is an array": {
        "scale": np.ones(())},
    "scale must be finite in float32, but is inf": {"scale": 10**400},
    "soft_cap must be a Python or numpy number, known when tracing, but is a bool": {
        "soft_cap": True},
    "soft_cap must be from 1e-30 to 1e+30, but is nan": {"soft_cap": float("nan")},
    "soft_cap must be from 1e-30 to 1e+30, but is 0.0: for no cap, pass None": {"soft_cap": 0},
    "soft_cap must be from 1e-30 to 1e+30, but is -1.0": {"soft_cap": -1},
    "sinks must have shape (8,), one logit per head of query, but has (2,)": {
        "sinks": as_type(Q, shape=(2,))},
    "sinks must be an array of floats, but is int32": {"sinks": as_type(N, shape=(8,))},
    'implementation must be None, "cuda" or "xla", but is \'gpu\'': {"implementation": "gpu"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    call = {"query": Q, "key": K, "value": V, "kv_lengths": N, **REFUSED[message]}
    arrays = {n: x for n, x in call.items() if isinstance(x, jax.ShapeDtypeStruct)}
    others = {n: x for n, x in call.items() if n not in arrays}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}(\n|$)"):
        jax.eval_shape(lambda x: packax.decode_attention(**x, **others), arrays)


# --- The benchmark, with XLA in the kernels' place.


def test_benchmark(tmp_path, monkeypatch, capsys):
    """Every column; a wrong result is not timed and fails the run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("decode_benchmark", BENCHMARKS / "decode.py")
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "COPIED", 1 << 12)
    monkeypatch.setattr(benchmark, "machine", dict)
    small = benchmark.Case("small", (64,), heads=2, kv_heads=1, dim=8, page_size=16)
    arguments = ["--out", str(tmp_path), "--implementation", "xla", "--rounds", "1"]
    assert benchmark.main(arguments, (small,)) == 0
    (row,) = json.loads((tmp_path / "decode.json").read_text())["cases"]
    assert row["bytes"] == 2 * 2 * 64 * 8 and set(row["times"]) == {"packax", "copy"}
    assert row["left_out"] == {"cudnn": "no pages"}
    assert benchmark.main([*arguments, "--dtype", "float32"], (small,)) == 0
    (row,) = json.loads((tmp_path / "decode.json").read_text())["cases"]
    assert row["bytes"] == 2 * 4 * 64 * 8 and row["errors"]["packax"] == 0
    dense = small.__class__("dense", (64,), heads=2, kv_heads=1, dim=8)
    monkeypatch.setattr(benchmark, "LIMIT", {"bfloat16": -1.0})
    assert benchmark.main(arguments, (dense,)) == 1
    (row,) = json.loads((tmp_path / "decode.json").read_text())["cases"]
    assert row["left_out"]["packax"].startswith("wrong") and "packax" not in row["times"]
    assert "| dense | wrong" in capsys.readouterr().out


def test_the_documented_loop_writes_to_no_page_that_is_not_there():
    """A negative entry of the table is no page; as an index it would be one from the end."""
    examples = doctest.DocTestParser().get_examples(packax.decode_attention.__doc__)
    (loop,) = (x.source for x in examples if "def step" in x.source)
    names = {"functools": functools, "jax": jax, "jnp": jnp, "packax": packax}
    exec(loop, names)
    new, cache = jnp.full((2, 1, 1, 8), -1.0), jnp.ones((4, 2, 1, 8))
    table, lengths = jnp.array([[0, -1], [2, 1]]), jnp.array([2, 2])
    out, *caches, _ = names["step"](new, new, new, cache, cache + 0, table, lengths)
    for x in caches:
        np.testing.assert_array_equal(x[:, :, 0, 0], [[1, 1], [-1, 1], [1, 1], [1, 1]])
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("mapped", ("query", "caches"))
def test_vmap_beside_a_batch_that_is_sharded_in_its_type(page_size, mapped):
    """The mapped axis goes behind the batch there."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2],
        axis_types=(AxisType.Explicit,))  # fmt: skip
    rng = np.random.default_rng(3)
    query, key, value = (jnp.asarray(rng.normal(size=(4, n, h, 8)), jnp.float32) for n,
        h in ((1, 4), (48, 2), (48, 2)))  # fmt: skip
    lengths, table = jnp.array([48, 1, 30, 17]), None
    if page_size:
        key, value = (x.reshape(12, 16, 2, 8) for x in (key, value))
        table = jnp.asarray(rng.permutation(12).reshape(4, 3), jnp.int32)

    def attend(scale, query, key, value):
        scaled = (
            (query * scale, key, value)
            if mapped == "query"
            else (query, key * scale, value * scale)
        )
        return packax.decode_attention(*scaled, lengths, block_table=table)

    scales = jnp.arange(1.0, 4)
    expected = jnp.stack([attend(s, query, key, value) for s in scales])
    with jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh):
        sharded = jax.sharding.reshard(query, P("data"))
        if not page_size:
            key, value = (jax.sharding.reshard(x, P("data")) for x in (key, value))
            lengths = jax.sharding.reshard(lengths, P("data"))
        got = jax.vmap(attend, (0, None, None, None))(scales, sharded, key, value)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
