"""forward_p and backward_p for some of the query heads, so that groups of heads need no slices of
query and output, and no concatenation of the groups' outputs.

forward_heads_p, backward_heads_p: operands and results of forward_p and backward_p.
query, out, dout and dq have all query heads; everything else has only those in `heads`. In out and
dq, the other heads keep their values from the operand `init`, whose memory the kernels write;
without that operand they may hold anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import ffi, lowering, primitives
from packax._src.ops.partitioning import require_device_info
from packax._src.ops.primitives import backward_results, forward_results, new_primitive

_STATIC = ("spec", "names", "heads")
forward_heads_p = new_primitive("packax_forward_heads", _STATIC)
backward_heads_p = new_primitive("packax_backward_heads", _STATIC)


@forward_heads_p.def_abstract_eval
def _forward_shapes(*avals, spec, names, heads):
    return forward_results(spec, Operands.of(names, avals), heads.heads)


@backward_heads_p.def_abstract_eval
def _backward_shapes(*avals, spec, names, heads):
    return backward_results(spec, Operands.of(names, avals), heads.heads)


def forward(own: range, spec: AttentionSpec, x: Operands) -> list[jax.Array]:
    """primitives.forward, restricted to these query heads unless they are all."""
    if len(own) == x.query.shape[2]:
        return primitives.forward(spec, x._replace(query=require_device_info(x.query)))
    heads = ffi.HeadGroup(own.start, len(own))
    return forward_heads_p.bind(*x.leaves, spec=spec, names=x.names, heads=heads)


def backward(own: range, spec: AttentionSpec, x: Operands) -> list[jax.Array]:
    """primitives.backward, restricted to these query heads unless they are all."""
    if len(own) == x.query.shape[2]:
        return primitives.backward(spec, x._replace(query=require_device_info(x.query)))
    heads = ffi.HeadGroup(own.start, len(own))
    return backward_heads_p.bind(*x.leaves, spec=spec, names=x.names, heads=heads)


# --- The definition: slice those heads, compute, and write the result back.


def _forward_apart(*operands, spec, names, heads):
    x = Operands.of(names, operands)
    part = x._replace(query=_slice(x.query, heads), init=None)
    out, *rows = primitives.forward(spec, part)
    return [_placed(out, x.init, heads, x.query.shape[2]), *rows]


def _backward_apart(*operands, spec, names, heads):
    x = Operands.of(names, operands)
    query, out, dout = (_slice(y, heads) for y in (x.query, x.out, x.dout))
    part = x._replace(query=query, out=out, dout=dout, init=None)
    dq, *others = primitives.backward(spec, part)
    return [_placed(dq, x.init, heads, x.query.shape[2]), *others]


def _slice(x: jax.Array, own: ffi.HeadGroup) -> jax.Array:
    return jax.lax.slice_in_dim(x, own.first, own.first + own.heads, axis=2)


def _placed(part: jax.Array, init: jax.Array | None, own: ffi.HeadGroup, heads: int) -> jax.Array:
    if init is not None:
        return jax.lax.dynamic_update_slice_in_dim(init, part, own.first, 2)
    behind = heads - own.first - own.heads
    return jnp.pad(part, ((0, 0), (0, 0), (own.first, behind), (0, 0)))


def _register(primitive: Primitive, apart: Callable[..., Any]) -> Any:
    """Registers vmap, derivatives, and the lowering without kernels, all from the definition."""

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
    rule = lowering.lower_xla(apart, _STATIC)
    mlir.register_lowering(primitive, rule)
    return rule


_forward_rule = _register(forward_heads_p, _forward_apart)
_backward_rule = _register(backward_heads_p, _backward_apart)


# --- CUDA: the call for all heads, with the index at which those heads begin.


def _forward_cuda(ctx, *operands, spec, names, heads):
    avals = Operands.of(names, ctx.avals_in)
    fallback = ffi.takes_fallback("forward", avals, spec, ffi.for_export(ctx))
    if spec.implementation == "xla" or fallback:
        return _forward_rule(ctx, *operands, spec=spec, names=names, heads=heads)
    ffi.require_kernels("forward", avals, spec)
    return ffi.forward(ctx, Operands.of(names, operands), spec, heads)


def _backward_cuda(ctx, *operands, spec, names, heads):
    avals = Operands.of(names, ctx.avals_in)
    fallback = ffi.takes_fallback("backward", avals, spec, ffi.for_export(ctx))
    if spec.implementation == "xla" or fallback or "query" not in spec.needs_grad:
        return _backward_rule(ctx, *operands, spec=spec, names=names, heads=heads)
    ffi.require_kernels("backward", avals, spec)
    return ffi.backward(ctx, Operands.of(names, operands), spec, heads)


mlir.register_lowering(forward_heads_p, _forward_cuda, platform="cuda")
mlir.register_lowering(backward_heads_p, _backward_cuda, platform="cuda")
