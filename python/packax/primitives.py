"""The four primitives: shapes of their results and how vmap folds into the batch. No policy.

documents_p: q_ids, kv_ids, q_pos, kv_pos -> lo, hi, tested
blocks_p: q_lo, q_hi, tested -> q_blocks, kv_blocks, q_order, q_order_192, kv_order
forward_p: query, key, value, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order,
    q_order_192 -> out, lse
backward_p: query, key, value, out, lse, dout, dlse, q_lo to q_order as in forward_p, kv_blocks,
    kv_order -> dq, dk, dv
docs/design.md gives every shape; lowering.py gives them a meaning per platform.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from packax.xla_masks import BLOCK, TILE, TILE_192

P = jax.sharding.PartitionSpec


def varying_axes(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value varies inside shard_map (jax renamed where they are kept)."""
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def vary_together(*trees: Any) -> tuple[Any, ...]:
    """The arrays, each marked as varying over the axes that any of them varies over.

    The transpose of the mark is the psum that the gradient of a replicated operand needs.
    """
    union = frozenset[str]().union(*(varying_axes(jax.typeof(x)) for x in jax.tree.leaves(trees)))

    def mark(x):
        missing = tuple(sorted(union - varying_axes(jax.typeof(x))))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # jax 0.7

    return jax.tree.map(mark, trees)


def plain(aval: Any) -> Any:
    """The aval without mesh axes or sharding: what a lowering sees, which is local."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def _like(aval: Any, shape: tuple[int, ...], dtype: Any, dims: Sequence[int | None]) -> Any:
    """An aval that varies as `aval` does, its dimension k sharded as dimension dims[k] there."""
    spec = [*aval.sharding.spec, *[None] * aval.ndim]
    sharding = jax.sharding.NamedSharding(
        aval.sharding.mesh, P(*(None if d is None else spec[d] for d in dims))
    )
    return aval.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def _primitive(name: str, static: tuple[str, ...]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    # Outside jit, a call compiles by itself.
    def call(*operands, **params):
        return primitive.bind(*operands, **params)

    primitive.def_impl(jax.jit(call, static_argnames=static))
    return primitive


documents_p = _primitive("packax_documents", ("compare_positions",))
blocks_p = _primitive("packax_blocks", ("kv_len",))
forward_p = _primitive("packax_forward", ("scale", "element_test", "implementation"))
backward_p = _primitive(
    "packax_backward", ("scale", "element_test", "has_dlse", "deterministic", "implementation")
)


@documents_p.def_abstract_eval
def _documents_shapes(q_ids, kv_ids, q_pos, kv_pos, *, compare_positions):
    return [_like(q_ids, q_ids.shape, jnp.int32, (0, None))] * 3


@blocks_p.def_abstract_eval
def _blocks_shapes(q_lo, q_hi, tested, *, kv_len):
    batch, q_len = q_lo.shape

    def array(*shape):
        return _like(q_lo, (batch, *shape), jnp.int32, (0, *[None] * len(shape)))

    return [
        array(5, math.ceil(q_len / BLOCK)),
        array(4, math.ceil(kv_len / BLOCK)),
        array(math.ceil(q_len / TILE)),
        array(math.ceil(q_len / TILE_192)),
        array(math.ceil(kv_len / TILE)),
    ]


@forward_p.def_abstract_eval
def _forward_shapes(query, key, value, *mask, scale, element_test, implementation):
    batch, q_len, heads, _ = query.shape
    lse_dtype = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    return [
        _like(query, (batch, q_len, heads, value.shape[3]), query.dtype, (0, 1, 2, None)),
        _like(query, (batch, heads, q_len), lse_dtype, (0, 2, 1)),
    ]


@backward_p.def_abstract_eval
def _backward_shapes(query, key, value, *operands, **static):
    return [_like(x, x.shape, x.dtype, range(4)) for x in (query, key, value)]


def _to_front(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    if dim is None:
        return jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.moveaxis(x, dim, 0)


def _fold(x: jax.Array, dim: int | None, size: int) -> jax.Array:
    """The mapped axis merged into the batch, which is every operand's first axis."""
    x = _to_front(x, dim, size)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _unfold(results: Sequence[jax.Array], size: int) -> tuple[list[jax.Array], list[int]]:
    return [x.reshape(size, -1, *x.shape[1:]) for x in results], [0] * len(results)


def _mapped_size(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> int:
    return next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)


def _batch_mask(primitive: Primitive, operands, dims, **params):
    size = _mapped_size(operands, dims)
    folded = [_fold(x, d, size) for x, d in zip(operands, dims, strict=True)]
    return _unfold(primitive.bind(*folded, **params), size)


def _batch_attention(primitive: Primitive, tensors: int, operands, dims, **params):
    """The first `tensors` operands have the batch; the mask operands after them have it, or 1."""
    size = _mapped_size(operands, dims)
    folded = [_fold(x, d, size) for x, d in zip(operands[:tensors], dims[:tensors], strict=True)]
    mask, mask_dims = operands[tensors:], dims[tensors:]
    batch = folded[0].shape[0] // size
    mapped = any(d is not None for d in mask_dims)
    mask_batch = mask[0].shape[0 if mask_dims[0] != 0 else 1]
    if mapped or mask_batch > 1:  # else one mask for all, still
        for x, d in zip(mask, mask_dims, strict=True):
            x = _to_front(x, d, size)
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
            folded.append(x.reshape(size * batch, *x.shape[2:]))
    else:
        folded.extend(mask)
    return _unfold(primitive.bind(*folded, **params), size)


def _register_batching(primitive: Primitive, rule: Callable) -> None:
    batching.primitive_batchers[primitive] = functools.partial(rule, primitive)


_register_batching(documents_p, _batch_mask)
_register_batching(blocks_p, _batch_mask)


def _batch_forward(primitive, operands, dims, **params):
    return _batch_attention(primitive, 3, operands, dims, **params)


def _batch_backward(primitive, operands, dims, **params):
    return _batch_attention(primitive, 7, operands, dims, **params)


_register_batching(forward_p, _batch_forward)
_register_batching(backward_p, _batch_backward)
