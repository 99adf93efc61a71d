"""Packed rows in the decoding kernels, in the interpreter, with the list of work of the lowering.

Guards against rows of another sequence in a tile, an item that both kernels or neither computes,
shares of a tile that are merged wrongly, and a list of work that is too short.
"""

from __future__ import annotations

import dataclasses

import decode_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter as interpreter
from gluon_language import launch
from gluon_threads import TensorMap
from packax._src.core.spec import Operands
from packax._src.ops import packed_rows
from packax._src.ops.primitives import decode_p
from tiers import some

SEEDS = 1
SMALL = {"decode": (16, 16)}
BOTH = {"decode_tall": (32, 16)} | SMALL
FP8 = {"decode_tall_fp8_pages": (32, 32), "decode_fp8_pages": (16, 32)}
CASES = [
    ("ragged", BOTH, 1024),
    ("ragged,heads=4/1,mix=chunk,window=left", BOTH, 1024),
    ("ragged,mix=chunk,starts=of rows,sinks=sinks", SMALL, 1),
    ("ragged,mix=decoding,cap=soft cap", SMALL, 1024),
    ("ragged,heads=4/1,mix=more sequences,dims=16x8", BOTH, 1024),
    ("ragged,heads=4/1,window=both,scale=negative", BOTH, 8),
    ("ragged,dtype=bfloat16,numbers=float8 scales of rows,dims=16x16", FP8, 1024),
    ("ragged,heads=4/1,mix=chunk,dtype=float16,numbers=float8,dims=16x16", FP8, 8),
]
# With chunks in the Hopper kernel, on pages of 4, and keys of more than two steps.
CHUNKS = [
    "ragged,heads=4/1,mix=chunk,dtype=bfloat16,dims=16x8",
    "ragged,dtype=bfloat16,starts=of rows,window=left,sinks=sinks",
    "ragged,cache=dense,heads=4/1,dtype=bfloat16,window=both",
    "ragged,mix=chunk,dtype=float16,starts=of rows,heads=4/4",
]


def operands_of(call, a):
    """The operands of the primitive, and its spec."""
    jaxpr = jax.make_jaxpr(call.attend)(a)
    (found,) = (e for e in jaxpr.jaxpr.eqns if e.primitive is decode_p)
    only_inputs = jaxpr.jaxpr.replace(outvars=found.invars)
    values = jax.core.eval_jaxpr(only_inputs, jaxpr.consts, *jax.tree.leaves(a))
    return Operands.of(found.params["names"], values), found.params["spec"]


@pytest.mark.parametrize("text,kernels,programs", some(CASES, 2, 6))
def test_equals_the_reference(text, kernels, programs, monkeypatch):
    """With few programs, tiles have one share; with many, long ones have several."""
    monkeypatch.setattr(packed_rows, "PROGRAMS", programs)
    monkeypatch.setattr(packed_rows, "LEAST_KEYS", 8)
    monkeypatch.setattr(packed_rows, "TILE_ROWS", 32)
    call = decode_calls.parse(text)
    shares = set()
    for seed in range(SEEDS):
        a = call.arrays(seed)
        x, spec = operands_of(call, a)
        work = np.asarray(packed_rows.work_list(x))
        _, rows, heads, _ = x.query.shape
        room = packed_rows.room(rows, call.batch, heads, x.key.shape[2])
        listed = work[2 * rows :][: 8 * room.items].reshape(-1, 8)
        shares |= {*listed[listed[:, 2] > 0, 4].tolist()}
        tensors = [np.ascontiguousarray(y) for y in (x.query, x.key, x.value)]
        scales = None
        if x.key_scale is not None:
            scales = tuple(np.ascontiguousarray(y) for y in (x.key_scale, x.value_scale))
        else:
            tensors = [y.astype(np.float32) for y in tensors]
        others = [None if y is None else np.ascontiguousarray(y) for y in
            (x.kv_start, x.kv_end, x.block_table, x.sinks)]  # fmt: skip
        out, lse = interpreter.ragged(
            *tensors, *others, work, room.items, spec.scale, spec.soft_cap, room.tile_rows,
            kernels=kernels, room=(16, 16), scales=scales,
        )  # fmt: skip
        dtype = jnp.dtype(call.dtype)
        wrong = call.wrong({"out": out[0].astype(dtype), "lse": lse[0]}, a)
        assert not wrong, (seed, wrong)
    if programs == 1 or call.mix in ("mixed", "chunk"):
        assert (shares == {1}) == (programs == 1)


def on_hopper(x, spec, work, room, out, lse, seed):
    """Computes the rows of chunks into out and lse, by two programs."""

    def rows_of(y):
        return TensorMap(np.asarray(y).transpose(0, 2, 1, 3))

    _, rows, heads, _ = x.query.shape
    pages, page_size, kv_heads, v_dim = x.value.shape
    launch("sm90.ragged", "ragged_sm90", 2, {
        "query": rows_of(x.query), "key": rows_of(x.key), "value": rows_of(x.value), "out": out,
        "lse": lse, "sinks": lse if x.sinks is None else np.array(x.sinks),
        **{name: np.array(getattr(x, name)) for name in ("kv_start", "kv_end", "block_table")},
        "workspace": work, "counter": np.zeros(1, np.int32), "scale": float(spec.scale),
        "has_sinks": int(x.sinks is not None), "q_len": rows, "pages": pages,
        "page_size": page_size, "table_width": x.block_table.shape[1], "heads": heads,
        "kv_heads": kv_heads, "v_eighths": v_dim // 8, "room": room.items,
        "QK_DIM": 16, "V_DIM": 16, "QK_CHUNK": 16, "V_CHUNK": 8, "WARP_GROUPS": 2, "BLOCK_N": 16,
        "STAGES": 2, "PAGE_ROWS": 4, "CONSUMER_REGISTERS": 0, "PRODUCER_REGISTERS": 0,
        "REMATERIALIZE": 1,
    }, seed)  # fmt: skip


def lengthen(monkeypatch, least=30):
    """Chunks of hundreds of tokens."""
    for name, size in {"mixed": (200, 2), "chunk": (290, 1)}.items():
        monkeypatch.setitem(decode_calls.MIXES, name, size)
    monkeypatch.setattr(packed_rows, "CHUNK", least)
    monkeypatch.setattr(packed_rows, "CHUNK_PROGRAMS", 1)
    monkeypatch.setattr(packed_rows, "LEAST_KEYS", 8)


@pytest.mark.parametrize("text", some(CHUNKS, 1))
def test_chunks_on_hopper(text, monkeypatch):
    """Both kernels write every row once, and the portable ones alone compute the same from the same
    list. What no table names, and what is beyond a length, is NaN."""
    lengthen(monkeypatch)
    call = dataclasses.replace(decode_calls.parse(text), blocks=45)
    chunks = []
    for seed in range(SEEDS):
        a = call.arrays(seed)
        x, spec = operands_of(call, a)
        work = np.array(packed_rows.work_list(x))
        _, rows, heads, _ = x.query.shape
        room = packed_rows.room(rows, call.batch, heads, x.key.shape[2])
        assert work.shape == (3 * rows + 8 * (room.items + 1 + room.chunk_tiles),)
        others = [None if y is None else np.ascontiguousarray(y) for y in
            (x.kv_start, x.kv_end, x.block_table, x.sinks)]  # fmt: skip
        tensors = [np.ascontiguousarray(y).astype(np.float32) for y in (x.query, x.key, x.value)]
        listed = work[2 * rows + 8 * room.items :][:rows]
        of_chunks = ~np.isin(np.arange(rows), listed)
        chunks.append(of_chunks.sum())
        for elsewhere in (1,):
            out, lse = interpreter.ragged(
                *tensors, *others, work, room.items, spec.scale, spec.soft_cap, room.tile_rows,
                elsewhere, kernels=BOTH, room=(16, 16),
            )  # fmt: skip
            out, lse = out.astype(call.dtype), lse.copy()
            if elsewhere:
                lost = np.isnan(out.astype(np.float32)).all((0, 2, 3))
                np.testing.assert_array_equal(lost, of_chunks)
                on_hopper(x, spec, work, room, out, lse, seed)
            wrong = call.wrong({"out": out[0], "lse": lse[0]}, a)
            assert not wrong, (seed, elsewhere, wrong)
    assert max(chunks) > 128
