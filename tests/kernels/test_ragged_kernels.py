"""Packed rows in the decoding kernels, in the interpreter, with the list of work of the lowering.

Guards against rows of another sequence in a tile, an item that both kernels or neither computes,
shares of a tile that are merged wrongly, and a list of work that is too short.
"""

from __future__ import annotations

import decode_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter as interpreter
from packax._src.core.spec import Operands
from packax._src.ops import packed_rows
from packax._src.ops.primitives import decode_p
from tiers import some

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


def operands_of(call, a):
    """The operands of the primitive, and its spec."""
    jaxpr = jax.make_jaxpr(call.attend)(a)
    (found,) = (e for e in jaxpr.jaxpr.eqns if e.primitive is decode_p)
    only_inputs = jaxpr.jaxpr.replace(outvars=found.invars)
    values = jax.core.eval_jaxpr(only_inputs, jaxpr.consts, *jax.tree.leaves(a))
    return Operands.of(found.params["names"], values), found.params["spec"]


@pytest.mark.parametrize("text,kernels,programs", some(CASES, 0, 1, 2, 4, 6))
def test_equals_the_reference(text, kernels, programs, monkeypatch):
    """With few programs, tiles have one share; with many, long ones have several."""
    monkeypatch.setattr(packed_rows, "PROGRAMS", programs)
    monkeypatch.setattr(packed_rows, "LEAST_KEYS", 8)
    monkeypatch.setattr(packed_rows, "TILE_ROWS", 32)
    call = decode_calls.parse(text)
    shares = set()
    for seed in range(2):
        a = call.arrays(seed)
        x, spec = operands_of(call, a)
        of_rows, work = map(np.asarray, packed_rows.work_list(x))
        shares |= {*work[work[:, 2] > 0, 4].tolist()}
        _, rows, heads, _ = x.query.shape
        size, *_ = packed_rows.room(rows, call.batch, heads, x.key.shape[2])
        tensors = [np.ascontiguousarray(y) for y in (x.query, x.key, x.value)]
        scales = None
        if x.key_scale is not None:
            scales = tuple(np.ascontiguousarray(y) for y in (x.key_scale, x.value_scale))
        else:
            tensors = [y.astype(np.float32) for y in tensors]
        others = [None if y is None else np.ascontiguousarray(y) for y in
            (x.kv_start, x.kv_end, x.block_table, x.sinks)]  # fmt: skip
        out, lse = interpreter.ragged(
            *tensors, *others, of_rows, work, spec.scale, spec.soft_cap, size, kernels=kernels,
            room=(16, 16), scales=scales,
        )  # fmt: skip
        dtype = jnp.dtype(call.dtype)
        wrong = call.wrong({"out": out[0].astype(dtype), "lse": lse[0]}, a)
        assert not wrong, (seed, wrong)
    if programs == 1 or call.mix in ("mixed", "chunk"):
        assert (shares == {1}) == (programs == 1)
