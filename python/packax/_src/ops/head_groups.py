"""forward_p and backward_p for some of the query heads, so that groups of heads need no slices of
query and output, and no concatenation of the groups' outputs.

forward_heads_p, backward_heads_p: operands and results of forward_p and backward_p.
query, out, dout and dq have all query heads; everything else has only those in `heads`. In out and
dq, the other heads keep their values from the operand `init`, whose memory the kernels write;
without that operand they may hold anything.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from packax._src.core.mask import Pass
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import ffi, lowering
from packax._src.ops.partitioning import require_device_info
from packax._src.ops.primitives import backward_results, forward_results, new_primitive

_STATIC = ("spec", "names", "heads")


def run(direction: Pass, own: range, spec: AttentionSpec, x: Operands) -> list[jax.Array]:
    """`lowering.run`, restricted to these query heads unless they are all."""
    if len(own) == x.query.shape[2]:
        return lowering.run(direction, spec, x._replace(query=require_device_info(x.query)))
    heads = ffi.HeadGroup(own.start, len(own))
    primitive = forward_heads_p if direction == "forward" else backward_heads_p
    return primitive.bind(*x.leaves, spec=spec, names=x.names, heads=heads)


# --- The definition: slice those heads, compute, and write the result back.


def _apart(direction, *operands, spec, names, heads):
    x = Operands.of(names, operands)
    sliced = {
        name: jax.lax.slice_in_dim(y, heads.first, heads.first + heads.heads, axis=2)
        for name in ("query", "out", "dout")
        if (y := getattr(x, name)) is not None
    }
    part, *others = lowering.run(direction, spec, x._replace(**sliced, init=None))
    return [_placed(part, x.init, heads, x.query.shape[2]), *others]


def _placed(part: jax.Array, init: jax.Array | None, own: ffi.HeadGroup, heads: int) -> jax.Array:
    if init is not None:
        return jax.lax.dynamic_update_slice_in_dim(init, part, own.first, 2)
    behind = heads - own.first - own.heads
    return jnp.pad(part, ((0, 0), (0, 0), (own.first, behind), (0, 0)))


def _primitive(direction: Pass, results: Any, call: Any) -> Primitive:
    """The primitive of a pass; vmap, derivatives, and the lowering without kernels are those of the
    definition.

    On CUDA, `call` is the FFI call for all heads, with the index at which those heads begin.
    """
    primitive = new_primitive(f"packax_{direction}_heads", _STATIC)
    apart = functools.partial(_apart, direction)

    @primitive.def_abstract_eval
    def shapes(*avals, spec, names, heads):
        return results(spec, Operands.of(names, avals), heads.heads)

    def batch(operands, dims, **params):
        made = jax.vmap(functools.partial(apart, **params), in_axes=tuple(dims))(*operands)
        return made, [0] * len(made)

    def jvp(primals, tangents, **params):
        indices = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*floats):
            merged = list(primals)
            for place, x in zip(indices, floats, strict=True):
                merged[place] = x
            return apart(*merged, **params)

        moved = [ad.instantiate_zeros(tangents[i]) for i in indices]
        return jax.jvp(of_floats, [primals[i] for i in indices], moved)

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    lower_apart = lowering.lower_xla(apart, _STATIC)

    def lower_cuda(ctx, *operands, spec, names, heads):
        avals = Operands.of(names, ctx.avals_in)
        fallback = ffi.takes_fallback(direction, avals, spec, ffi.for_export(ctx))
        no_dq = direction == "backward" and "query" not in spec.needs_grad
        if spec.implementation == "xla" or fallback or no_dq:
            return lower_apart(ctx, *operands, spec=spec, names=names, heads=heads)
        ffi.require_kernels(direction, avals, spec)
        return call(ctx, Operands.of(names, operands), spec, heads)

    mlir.register_lowering(primitive, lower_apart)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")
    return primitive


forward_heads_p = _primitive("forward", forward_results, ffi.forward)
backward_heads_p = _primitive("backward", backward_results, ffi.backward)
