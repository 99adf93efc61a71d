"""forward_p and backward_p for some of the query's heads: groups of heads without slices of query
and output, and without putting the groups' outputs together.

forward_heads_p: out_before, and the operands of forward_p -> its results
backward_heads_p: dq_before, and the operands of backward_p -> its results
`first_head` and `heads` say of which heads of the query all but query, out, dout and dq are; these
have all heads. Those that are not meant are in out and dq what they were in the operand before,
whose memory the kernels go on writing; with `begins` there is no such operand, and they may hold
anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from packax._src.ops import attention_calls, ffi, lowering
from packax._src.ops.partitioning import ask_devices
from packax._src.ops.primitives import (
    backward_p,
    backward_results,
    forward_p,
    forward_results,
    new_primitive,
)
from packax._src.ops.rules import lower_xla

_OWN = ("first_head", "heads", "begins")
_FORWARD_HEADS = (*_OWN, *lowering.FORWARD_PARAMS, "implementation")
_BACKWARD_HEADS = (*_OWN, *lowering.BACKWARD_PARAMS, "implementation")
forward_heads_p = new_primitive("packax_forward_heads", _FORWARD_HEADS)
backward_heads_p = new_primitive("packax_backward_heads", _BACKWARD_HEADS)


@forward_heads_p.def_abstract_eval
def _forward_shapes(*operands, heads, begins, max_logits, extras, **static):
    _, (query, _, value, *_) = _without_before(operands, begins)
    return forward_results(query, value, heads, max_logits, extras)


@backward_heads_p.def_abstract_eval
def _backward_shapes(*operands, heads, begins, **params):
    return backward_results(_without_before(operands, begins)[1], heads, params)


def forward(own: range, before: jax.Array | None, query: jax.Array, *operands, **params) -> Any:
    """forward_p, of these heads of the query, if they are not all."""
    if len(own) == query.shape[2]:
        return forward_p.bind(ask_devices(query), *operands, **params)
    return forward_heads_p.bind(
        *_with_before(before, query), *operands, **_of(own, before), **params
    )


def backward(own: range, before: jax.Array | None, query: jax.Array, *operands, **params) -> Any:
    """backward_p likewise."""
    if len(own) == query.shape[2]:
        return backward_p.bind(ask_devices(query), *operands, **params)
    return backward_heads_p.bind(
        *_with_before(before, query), *operands, **_of(own, before), **params
    )


def _with_before(before, query):
    return (query,) if before is None else (before, query)


def _of(own: range, before: Any) -> dict[str, Any]:
    return {"first_head": own.start, "heads": len(own), "begins": before is None}


# --- The meaning: those heads sliced, and the result put in its place.


def _forward_apart(*operands, first_head, heads, begins, **params):
    before, (query, *rest) = _without_before(operands, begins)
    out, *rows = forward_p.bind(_slice(query, first_head, heads), *rest, **params)
    return [_placed(out, before, first_head, query.shape[2]), *rows]


def _backward_apart(*operands, first_head, heads, begins, **params):
    before, (query, key, value, out, lse, dout, *rest) = _without_before(operands, begins)
    part, out, dout = (_slice(x, first_head, heads) for x in (query, out, dout))
    dq, *others = backward_p.bind(part, key, value, out, lse, dout, *rest, **params)
    return [_placed(dq, before, first_head, query.shape[2]), *others]


def _without_before(operands, begins: bool):
    return (None, operands) if begins else (operands[0], operands[1:])


def _slice(x: jax.Array, first: int, size: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, first, first + size, axis=2)


def _placed(part: jax.Array, before: jax.Array | None, first: int, heads: int) -> jax.Array:
    if before is not None:
        return jax.lax.dynamic_update_slice_in_dim(before, part, first, 2)
    behind = heads - first - part.shape[2]
    return jnp.pad(part, ((0, 0), (0, 0), (first, behind), (0, 0)))


def _register(primitive: Primitive, apart: Callable[..., Any], static: tuple[str, ...]) -> Any:
    """vmap and derivatives of what it means; its lowering where there are no kernels for it."""

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
    rule = lower_xla(apart, static)
    mlir.register_lowering(primitive, rule)
    return rule


_forward_rule = _register(forward_heads_p, _forward_apart, _FORWARD_HEADS)
_backward_rule = _register(backward_heads_p, _backward_apart, _BACKWARD_HEADS)


# --- CUDA: the call of all heads, told where those heads begin.


def _forward_cuda(ctx, *operands, **params):
    _, (query, _, value, *_) = _without_before(ctx.avals_in, params["begins"])
    if params["implementation"] == "xla" or lowering.takes_fallback(
        "forward", query, value, params
    ):
        return _forward_rule(ctx, *operands, **params)
    ffi.require_kernels("forward", query, value)
    return attention_calls.forward(*_of_a_group(ctx, operands, params))


def _backward_cuda(ctx, *operands, **params):
    _, (query, _, value, *_) = _without_before(ctx.avals_in, params["begins"])
    fallback = lowering.takes_fallback("backward", query, value, params)
    if params["implementation"] == "xla" or fallback or not params["needs_grad"][0]:
        return _backward_rule(ctx, *operands, **params)
    ffi.require_kernels("backward", query, value)
    return attention_calls.backward(*_of_a_group(ctx, operands, params))


def _of_a_group(ctx, operands, params):
    """ctx and operands without the one before, the parameters, and what a call is told of it."""
    aval, avals = _without_before(ctx.avals_in, params["begins"])
    value, operands = _without_before(operands, params["begins"])
    before = None if params["begins"] else (aval, value)
    group = attention_calls.HeadGroup(params["first_head"], params["heads"], before)
    return ctx.replace(avals_in=avals), operands, params, group


mlir.register_lowering(forward_heads_p, _forward_cuda, platform="cuda")
mlir.register_lowering(backward_heads_p, _backward_cuda, platform="cuda")
