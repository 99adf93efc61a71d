"""The calls for CUDA that decode_attention and ragged_paged_attention lower to, and what they
reject."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import packax
import pytest
from lowered import Extension, calls, text_of
from packax._src.ops import ffi

pytestmark = pytest.mark.usefixtures("extension")


def shapes(batch=2, q_len=1, heads=8, kv_heads=2, dims=(64, 64), keys=(2, 4096),
    dtype=jnp.bfloat16):  # fmt: skip
    return (
        jax.ShapeDtypeStruct((batch, q_len, heads, dims[0]), dtype),
        jax.ShapeDtypeStruct((*keys, kv_heads, dims[0]), dtype),
        jax.ShapeDtypeStruct((*keys, kv_heads, dims[1]), dtype),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def test_lowering():
    ((target, attributes, operands, results),) = calls(text_of(packax.decode_attention, *shapes()))
    assert target == "packax_decode_v1"
    assert {n: a.split(" ")[0] for n, a in attributes.items()} == {
        "scale": "1.250000e-01", "soft_cap": "0.000000e+00", "float32_products": "0"
    }  # fmt: skip
    cache = "2x4096x2x64xbf16"
    assert operands == [
        *("2x1x8x64xbf16", cache, cache, "2x1xi32", "2x1xi32", "0xf32", "0xf32", "0xf32", "0xf32")
    ]
    assert results == ["2x1x8x64xbf16", "2x8x1xf32", "32x2x1x8x64xf32", "32x2x1x8xf32"]

    table = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    sinks = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    call = functools.partial(packax.decode_attention, soft_cap=50, scale=-2)
    paged = lambda *x: call(*x[:4], block_table=x[4], sinks=x[5])  # noqa: E731
    text = text_of(paged, *shapes(dims=(168, 24), keys=(99, 16)), table, sinks)
    ((_, attributes, operands, results),) = calls(text)
    assert {n: a.split(" ")[0] for n, a in attributes.items()} == {
        "scale": "-2.000000e+00", "soft_cap": "5.000000e+01", "float32_products": "0"
    }  # fmt: skip
    assert operands[1:3] == ["99x16x2x168xbf16", "99x16x2x24xbf16"]
    assert operands[5:] == ["2x7xi32", "0xf32", "0xf32", "1x8xf32"]
    assert results[2:] == ["1x2x1x8x24xf32", "1x2x1x8xf32"]  # 112 keys


@pytest.mark.parametrize(
    "tokens,rows,items,tiles",
    [(70, 16, 4 + 5 + 512, 0), (5, 1, 5 + 512, 0), (300, 16, 18 + 5 + 512, 2 + 2)],
)
def test_packed_rows(tokens, rows, items, tiles):
    """Without a copy of the query or the cache. Tiles of at most 64 rows, and 1,024 programs; and
    if there can be chunks, tiles of at most 128 tokens."""
    sequences = [jax.ShapeDtypeStruct((5, *more), jnp.int32) for more in ((), (44,))]
    bounds = jax.ShapeDtypeStruct((6,), jnp.int32)
    query, *cache, _ = shapes(1, tokens, keys=(99, 16))
    query = jax.ShapeDtypeStruct(query.shape[1:], query.dtype)
    text = text_of(packax.ragged_paged_attention, query, *cache, *sequences, bounds)
    ((target, _, operands, results),) = calls(text)
    assert target == "packax_ragged_v1"
    pages = "99x16x2x64xbf16"
    assert operands == [
        *(f"1x{tokens}x8x64xbf16", pages, pages, f"1x{tokens}xi32", f"1x{tokens}xi32", "5x44xi32"),
        *("0xf32", "0xf32", "0xf32"),
        f"{2 * tokens + 8 * items + (tokens + 8 + 8 * tiles) * (tiles > 0)}xi32",
    ]
    assert results == [
        *(f"1x{tokens}x8x64xbf16", f"1x8x{tokens}xf32", f"{items}x{rows}x8x64xf32"),
        *(f"{items}x{rows}x8xf32", "1xi32"),
    ]
    assert not re.search("(gather|concatenate|pad).*bf16", text)


def test_drafts_in_packed_rows():
    """The kernels get the call without sinks. No cache is copied or converted."""
    integers = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((5,), (5, 44), (6,), (5,))]
    query, *cache, _ = shapes(1, 70, keys=(99, 16))
    query = jax.ShapeDtypeStruct(query.shape[1:], query.dtype)
    mask, sinks = jax.ShapeDtypeStruct((5, 4, 4), bool), jax.ShapeDtypeStruct((8,), jnp.float32)

    def step(query, key, value, lens, table, bounds, numbers, mask, sinks):
        return packax.ragged_paged_attention(
            query, key, value, lens, table, bounds, draft_mask=mask, num_drafts=numbers,
            sinks=sinks,
        )  # fmt: skip

    text = text_of(step, query, *cache, *integers, mask, sinks)
    ((target, _, operands, _),) = calls(text)
    assert target == "packax_ragged_v1" and operands[6:9] == ["0xf32"] * 3
    assert "99x16x2x64xf32" not in text and not re.search(r"-> tensor<99x16x2x64xbf16>", text)


def test_export_for_cuda():
    """With symbolic batch, cache and pages, the workspace has room for the most splits of any
    size."""
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
def test_precision_of_float32(precision, exact):
    """As requested, or by JAX's setting at the call; for the kernels and for every product in
    XLA."""
    operands = shapes(dtype=jnp.float32)
    asked = functools.partial(packax.decode_attention, precision=precision)
    ((target, attributes, types, results),) = calls(text_of(asked, *operands))
    assert target == "packax_decode_v1" and attributes["float32_products"] == f"{exact} : i32"
    cache = "2x4096x2x64xf32"
    assert types[:3] == ["2x1x8x64xf32", cache, cache]
    assert results == ["2x1x8x64xf32", "2x8x1xf32", "32x2x1x8x64xf32", "32x2x1x8xf32"]
    with jax.default_matmul_precision(precision):
        ((_, attributes, *_),) = calls(text_of(packax.decode_attention, *operands))
    assert attributes["float32_products"] == f"{exact} : i32"
    xla = text_of(functools.partial(asked, implementation="xla"), *operands)
    wanted = {None: "DEFAULT", "tensorfloat32": "HIGH"}.get(precision, "HIGHEST")
    assert xla.count("stablehlo.dot_general") == xla.count(f"[{wanted}, {wanted}]") == 2


def test_a_build_may_have_one_precision_of_float32(monkeypatch):
    f32 = {"kernel": "decode", "dtype": "f32"}
    rows = [row for row in Extension.variants() if not f32.items() <= row.items()]
    monkeypatch.setattr(Extension, "variants", staticmethod(lambda: rows))
    operands = shapes(dtype=jnp.float32)
    text_of(packax.decode_attention, *operands)
    with pytest.raises(NotImplementedError, match="no decode kernel for float32"):
        text_of(functools.partial(packax.decode_attention, precision="highest"), *operands)


def test_the_merging_kernel_is_needed(monkeypatch):
    """decode_combine, in the dtype of the query."""
    lacks = {"kernel": "decode_combine", "dtype": "f16"}
    rows = [row for row in Extension.variants() if not lacks.items() <= row.items()]
    monkeypatch.setattr(Extension, "variants", staticmethod(lambda: rows))
    for cache in (None, jnp.float8_e4m3fn):
        for dtype in (jnp.bfloat16, jnp.float16):
            query, *kv, lengths = shapes(dtype=dtype)
            kv = [jax.ShapeDtypeStruct(x.shape, cache or dtype) for x in kv]
            if dtype == jnp.bfloat16:
                text_of(packax.decode_attention, query, *kv, lengths)
            else:
                with pytest.raises(NotImplementedError, match="no decode kernel for float16"):
                    text_of(packax.decode_attention, query, *kv, lengths)


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
    names = ("batch", "q_len", "heads", "kv_heads", "kv_len")
    call = dict(zip(names, sizes, strict=True), dtype="bf16", qk_dim=64, v_dim=64)
    assert Extension.judge("decode", call, [])["splits"] == splits


def test_vmap_keeps_one_cache():
    """Mapping only the query and lengths passes the one cache through a table, without a
    broadcast."""
    query, key, value, lengths = shapes()
    mapped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (query, lengths)]
    function = jax.vmap(packax.decode_attention, (0, None, None, 0))
    ((_, _, operands, _),) = calls(text_of(function, mapped[0], key, value, mapped[1]))
    assert operands[:3] == ["6x1x8x64xbf16", *["2x4096x2x64xbf16"] * 2]
    assert operands[3:] == [*["6x1xi32"] * 3, *["0xf32"] * 3]


@pytest.mark.parametrize("scales", [(), (2,), (99, 2)], ids=str)
def test_a_cache_in_fp8(scales):
    query, key, value, lengths = shapes(keys=(99, 16))
    cache = [jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn) for x in (key, value)]
    table, scale = (jax.ShapeDtypeStruct(*x) for x in (((2, 7), jnp.int32), (scales, jnp.bfloat16)))

    def call(*x):
        return packax.decode_attention(*x[:4], block_table=x[4], value_scale=x[5])

    ((target, _, operands, results),) = calls(text_of(call, query, *cache, lengths, table, scale))
    assert target == "packax_decode_v1"
    assert operands[1:3] == ["99x16x2x64xf8E4M3FN"] * 2
    scale = "99x2xf32" if len(scales) == 2 else "1x2xf32"
    assert operands[5:] == ["2x7xi32", scale, scale, "0xf32"]
    assert results[0] == "2x1x8x64xbf16"


def test_kernels_that_are_not_there(monkeypatch):
    dims = "64/64", "192/128"
    listed = ", ".join(f"{dtype} {x}" for x in dims for dtype in ("bfloat16", "float16", "float32"))
    of_fp8 = " up to these, and queries in bfloat16 or float16: float8_e4m3fn 128/128"
    xla = functools.partial(packax.decode_attention, implementation="xla")
    for (qk_dim, v_dim), dtype, fp8 in (
        ((200, 64), "bfloat16", False), ((64, 136), "bfloat16", False),
        ((60, 64), "bfloat16", False), ((200, 64), "float32", False),
        ((136, 64), "bfloat16", True), ((64, 72), "float16", True), ((64, 64), "float32", True),
    ):  # fmt: skip
        query, *cache, lengths = shapes(dims=(qk_dim, v_dim), dtype=dtype)
        cache_dtype = "float8_e4m3fn" if fp8 else dtype
        call = query, *(jax.ShapeDtypeStruct(x.shape, cache_dtype) for x in cache), lengths
        with pytest.raises(NotImplementedError) as error:
            text_of(packax.decode_attention, *call)
        assert str(error.value) == (
            f"no decode kernel for {dtype}{' over a float8_e4m3fn cache' * fp8} with head dims "
            f"{qk_dim}/{v_dim} (query and key / value); available, for multiples of "
            f"{f'16{of_fp8}' if fp8 else f'8 up to these: {listed}'}. "
            'implementation="xla" takes any head dim, and float64'
        )
        assert calls(text_of(xla, *call)) == []
    cuda = functools.partial(packax.decode_attention, implementation="cuda")
    with pytest.raises(NotImplementedError, match='implementation="cuda" needs a CUDA device'):
        text_of(cuda, *shapes(), platforms=("cpu",))
    monkeypatch.setattr(ffi, "ext", None)
    monkeypatch.setattr(ffi, "ext_error", "why", raising=False)
    with pytest.raises(NotImplementedError, match=r"did not load \(why\)"):
        text_of(packax.decode_attention, *shapes(batch=3, keys=(3, 64)))
