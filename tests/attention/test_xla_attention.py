"""The blockwise XLA path: values and gradients against float64, which blocks it visits, what it
allocates.

Guards against an error that a tolerance hides: every bound is twice the error of plain attention in
the same dtype, and what must not matter at all (padding, other documents) is compared bit by bit.
"""

import dataclasses
import functools
import re

import dense
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from calls import Call
from decode_calls import parse
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import xla_attention, xla_tiles
from tiers import some


def test_blocks_that_no_row_attends_are_not_read():
    """NaN in such a block would reach results through 0 * NaN: only blocks of a row's documents are
    read."""
    length, tile = 8 * xla_tiles.KEYS, xla_tiles.KEYS
    call = parse(f"selector=ranges,heads=2/2,dims=16x16,batch=1,lengths={length}x{length}")
    a, step = call.arrays(), jax.jit(call.step)
    a["lo"][:], a["hi"][:] = 2 * tile, 3 * tile
    clean = step(a)
    outside = np.ones(length, bool)
    outside[2 * tile : 3 * tile] = False
    for name in ("key", "value"):
        a[name][:, outside] = np.nan
    for name, x in step(a).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)
        assert np.isfinite(np.asarray(x)).all()


def test_memory_is_linear():
    """Four times the tokens take about four times the memory; the scores of 16k tokens would take 2
    GiB."""

    def temporary(length):
        def step(query, key, value, ids):
            mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
            out = packax.flash_attention(query, key, value, mask, implementation="xla")
            return out.astype(jnp.float32).sum()

        tensor = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        lowered = jax.jit(jax.grad(step, (0, 1, 2))).lower(tensor, tensor, tensor, ids)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(1 << 12), temporary(1 << 14)
    assert large < 4.5 * small
    assert large < 32 * (1 << 20)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "biases", "together"),
    [
        *((8, 197, 12, None, 1), (8, 64, 8, None, 8), (12, 64, 16, None, 6), (7, 64, 32, None, 1)),
        *((8, 64, 8, 1, 8), (8, 64, 8, 8, 8), (8, 64, 8, 2, 1), (8, 300, 1, None, 1)),
    ],
)
def test_short_rows_are_computed_together(monkeypatch, batch, length, heads, biases, together):
    monkeypatch.setattr(xla_tiles, "SHORT", 256)  # calls.py changes it
    query = jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.float32)
    bias = biases and jax.ShapeDtypeStruct((biases, 1, 1, length), jnp.float32)
    tiles = xla_tiles.tiles_of(Operands(*[query] * 3, bias=bias), on_gpu=False)
    assert tiles.together == together
    assert tiles.rows == tiles.keys == (length if length <= 256 else 128)


@pytest.mark.parametrize(
    "features",
    [
        {"interval": "causal", "selector": "positions", "bias": "alibi"},
        {"bias": "pairs", "dropout": "dropout", "scale": "array", "heads": "4/4"},
        {"bias": "shared", "selector": "kv ids", "sinks": "sinks"},
    ],
    ids=str,
)
def test_several_steps_of_several_rows(features, monkeypatch):
    call = Call(batch=4, **features)
    monkeypatch.setattr(xla_tiles, "SCORES", 2 * 4 * 33**2)  # the other tests have one step
    a = call.arrays(1)
    assert not call.wrong(jax.jit(call.step)(a), a)


def test_rows_without_keys_are_zero_beside_nan():
    """Also where their tile is one step with rows that attend: a NaN in a key or value does not
    reach the output or dQ of a row of padding, nor another row of the batch."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 40, 2, 8)).astype(np.float32)
    ids = np.zeros((4, 40), np.int32)
    ids[1], ids[2, 30:] = -1, -1
    dirty = x.copy()
    dirty[ids == -1] = np.nan

    @jax.jit
    def run(query, key):
        def function(query):
            return packax.flash_attention(query, key, key, packax.documents(ids))

        out, back = jax.vjp(function, query)
        return out, *back(jnp.ones_like(out))

    idle = ids == -1
    for got in run(x, dirty):
        assert (np.asarray(got)[idle] == 0).all() and not np.isnan(np.asarray(got)[[0, 3]]).any()


def test_tiles_for_gpus():
    """As large as the scores of all heads may be, and the same results, also of the tangents."""

    def side(heads, length=4096, lists=None):
        query = jax.ShapeDtypeStruct((2, length, heads, 64), jnp.bfloat16)
        tiles = xla_tiles.tiles_of(Operands(*[query] * 3, q_block_lists=lists), on_gpu=True)
        assert tiles.rows == tiles.keys
        return tiles.rows

    assert [side(n) for n in (1, 32, 64, 512, 4096)] == [2048, 1024, 1024, 256, 128]
    assert side(1, length=300) == 300 and side(1, lists=0) == 128
    rng = np.random.default_rng(0)
    x = tuple(jnp.asarray(rng.standard_normal((1, 2100, 1, 8)), jnp.float32) for _ in range(3))
    mask = packax.create_attention_mask(packax.causal(), q_len=2100, kv_len=2100)
    spec = AttentionSpec(scale=0.3, mask_mode=mask.mask_mode)

    @functools.partial(jax.jit, static_argnames="on_gpu")
    def tangent(x, on_gpu):
        def of(*x):
            operands = Operands(*x)._replace(**mask.operands("forward"))
            return xla_attention.forward(spec, operands, on_gpu)

        return jax.jvp(of, x, x)

    for a, b in zip(*(jax.tree.leaves(tangent(x, y)) for y in (True, False)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def backward_operands(dtype, options):
    """Operands of the backward, with consistent out and lse, and random tangents of all."""
    rng = np.random.default_rng(1)
    length, heads, dim = 300, 4, 16

    def draw(*shape, like=dtype):
        return jnp.asarray(rng.standard_normal(shape), like)

    ids = packax.documents(np.repeat(np.arange(3), 100)[None])
    mask = packax.create_attention_mask(packax.causal() & ids, q_len=length, kv_len=length)
    spec = AttentionSpec(
        scale=0.3,
        mask_mode=mask.mask_mode,
        needs_grad=("query", "key", "value", *(x for x in options if x != "soft_cap")),
        soft_cap=2.0 if "soft_cap" in options else 0.0,
    )
    scores = {
        "scales": jnp.full(1, 0.3),
        "slopes": draw(1, heads, like=jnp.float32),
        "bias": draw(1, heads, 1, length, like=jnp.float32),
    }
    scores = {x: scores[x] for x in ("scales", "slopes", "bias") if x in options}
    tensors = (draw(1, length, h, dim) for h in (heads, 2, 2))
    x = Operands(*tensors)._replace(**scores, **mask.operands("forward"))
    out, lse = xla_attention.forward(dataclasses.replace(spec, needs_grad=()), x)
    dlse = draw(1, heads, length, like=jnp.float32)
    x = x._replace(out=out, lse=lse, dout=draw(*out.shape), dlse=dlse, q_order_192=None)
    moving = ("query", "key", "value", "out", "lse", "dout", "dlse", *scores)
    along = {n: draw(*getattr(x, n).shape, like=getattr(x, n).dtype) for n in moving}
    return spec, x, along


@pytest.mark.parametrize(
    "options,some_of",
    [((), None), ((), ("query", "out", "lse")), (("soft_cap", "scales", "slopes"), None),
     (("bias",), None)],
)  # fmt: skip
@pytest.mark.parametrize("on_gpu", [False, True])
def test_tangents_of_the_backward_are_those_of_its_loops(options, some_of, on_gpu):
    spec, x, along = backward_operands(jnp.float32, options)
    along = {n: along[n] for n in some_of or along}

    @jax.jit
    def both(x, along):
        def of(some):
            return tuple(xla_attention.backward(spec, x._replace(**some), on_gpu))

        point = {n: getattr(x, n) for n in along}
        return xla_attention.backward(spec, x, on_gpu, along), jax.jvp(of, (point,), (along,))[1]

    for a, b in zip(*both(x, along), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(np.abs(b).max()))


def test_products_of_a_second_derivative():
    """Five products per block, of which three are gradients: nothing computes these if only their
    tangents are needed, and the tangents of scores are one product."""
    spec, x, along = backward_operands(jnp.float32, ())
    some = ("query", "key", "value", "out", "lse")
    along = {n: along[n] for n in some}

    def tangents(x, along):
        return xla_attention.backward(spec, x, False, along)

    text = jax.jit(tangents).lower(x, along).compile().as_text()
    scores, gradients = ("s", "ts", "dp", "tdp"), ("dq", "dq", "dk", "dk", "dv")
    assert len(re.findall(r" dot\(", text)) == len(scores) + len(gradients)


@pytest.mark.parametrize(
    "call,rows,keys",
    some(
        [
            ("interval=causal,selector=documents,lengths=165x165", 16, 16),
            ("interval=window,selector=positions,lengths=165x165", 48, 32),
            ("selector=kv ids,lengths=22x34,bias=pairs", 512, 64),
        ],
        1,
    ),
)
def test_any_tile_size(call, rows, keys, monkeypatch):
    monkeypatch.setattr(xla_tiles, "ROWS", rows)
    monkeypatch.setattr(xla_tiles, "KEYS", keys)
    jax.clear_caches()  # drop traces with other tile sizes
    call = parse(call)
    a = call.arrays(1)
    wrong = call.wrong(jax.jit(call.step)(a), a)
    jax.clear_caches()
    assert not wrong


@pytest.mark.parametrize("selector", ["packed", "documents"])
def test_16_bit_factors_on_gpus(selector):
    """The results are as exact as those of plain attention in bfloat16."""
    text = "interval=causal,lengths=409x409,dims=16x24,heads=2/1,batch=1,dtype=bfloat16"
    call = parse(f"{text},selector={selector}")
    a = call.arrays(1)
    mask = call.built(a)

    @jax.jit
    def passes(a):
        spec = AttentionSpec(scale=call.number, mask_mode=mask.mask_mode)
        x = Operands(a["query"], a["key"], a["value"])._replace(**mask.operands("forward"))
        out, lse = xla_attention.forward(spec, x, True)
        spec = dataclasses.replace(spec, needs_grad=("query", "key", "value"))
        x = x._replace(out=out, lse=lse, dout=a["dout"], dlse=a["dlse"], q_order_192=None)
        names = ("out", "lse", "dquery", "dkey", "dvalue")
        found = out, lse, *xla_attention.backward(spec, x, True)
        return dict(zip(names, found, strict=True))

    got = {name: np.asarray(x) for name, x in passes(a).items()}
    assert not (wrong := dense.close(got, *call.references(a))), wrong
