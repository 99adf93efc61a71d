"""The five primitives: shapes of their results and how vmap folds into the batch. No policy.

documents_p: q_ids, kv_ids, q_pos, kv_pos -> lo, hi, segment_checked
blocks_p: q_lo, q_hi, segment_checked -> q_blocks, kv_blocks, q_order, q_order_192, kv_order
forward_p: query, key, value, q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order,
    q_order_192, *block, *extras -> out, lse, and with max_logits the largest logit of every row
backward_p: query, key, value, out, lse, dout, dlse, q_lo to q_order as in forward_p, kv_blocks,
    kv_order, *block, *extras -> dq, dk, dv (those of `needs_grad`, others may hold anything), with
    score_grads (B, H, 2, Sq), every row's part of the gradients of scale and slope, and with
    bias_grad that of bias, like it
block: none; with block_size, block_mask and q_block_lists, and in backward_p kv_block_lists.
extras, of which the parameter `extras` has the names: scales (1 or B,), which count instead of
    `scale`; scales, slopes (Bp, H), q_bias_pos (Bp, Sq) and kv_bias_pos (Bp, Skv), Bp 1 or B; or
    scales, which then are `scale`, and slopes, of positions that are indices; bias (1 or B, 1 or H,
    1 or Sq, Skv), added to the logits; with dropout_threshold above 0 dropout_streams (B, H, 4)
    uint32 and dropout_rows (1 or B, Sq) int32, the counters of xla_dropout.py.
decode_p: query, key, value, q_lo, q_hi, block_table if paged, sinks if has_sinks -> out, lse
docs/internals/ffi.md gives every shape; lowering.py gives them a meaning per platform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from packax._src.core.jax_compat import vary_together
from packax._src.core.precision import accumulator
from packax._src.core.shapes import BLOCK, TILE, TILE_192, ceil_div, is_symbolic
from packax._src.ops.operands import MOVING, TENSORS, named
from packax._src.ops.partitioning import ask_devices

P = jax.sharding.PartitionSpec
Implementation = Literal["cuda", "xla"]


def check_implementation(
    implementation: Any, names: tuple[str, ...] = ("cuda", "xla"), note: str = ""
) -> None:
    known = isinstance(implementation, str) and implementation in names
    if implementation is not None and not known:
        *most, last = (f'"{name}"' for name in names)
        raise ValueError(
            f"implementation must be None, {', '.join(most)} or {last}{note}, but is "
            f"{implementation!r}"
        )


def _like(aval: Any, shape: tuple[int, ...], dtype: Any, dims: Sequence[int | None]) -> Any:
    """An aval that varies as `aval` does, its dimension k sharded as dimension dims[k] there."""
    spec = [*aval.sharding.spec, *[None] * aval.ndim]
    sharding = jax.sharding.NamedSharding(
        aval.sharding.mesh, P(*(None if d is None else spec[d] for d in dims))
    )
    return aval.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def new_primitive(name: str, static: tuple[str, ...]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.partial(jax.jit, static_argnames=static)
    def call(first, *operands, **params):
        return primitive.bind(ask_devices(first), *operands, **params)

    # Outside jit, a call compiles by itself; also under disable_jit, where it would call itself.
    @primitive.def_impl
    def _(*operands, **params):
        with jax.disable_jit(False):
            return call(*operands, **params)

    return primitive


BLOCK_ARRAYS = ("q_blocks", "kv_blocks", "q_order", "q_order_192", "kv_order")
"""The arrays of a mask that blocks_p makes."""

documents_p = new_primitive("packax_documents", ("compare_positions", "implementation"))
blocks_p = new_primitive("packax_blocks", ("kv_len", "implementation"))
forward_p = new_primitive(
    "packax_forward",
    (
        *("scale", "soft_cap", "precision", "segment_check", "max_logits", "block_size", "extras"),
        *("dropout_threshold", "implementation"),
    ),
)
backward_p = new_primitive(
    "packax_backward",
    (
        *("scale", "soft_cap", "precision", "segment_check", "has_dlse", "deterministic"),
        *("score_grads", "bias_grad", "block_size", "extras", "dropout_threshold", "needs_grad"),
        "implementation",
    ),
)


@documents_p.def_abstract_eval
def _documents_shapes(q_ids, kv_ids, q_pos, kv_pos, *, compare_positions, implementation):
    return [_like(q_ids, q_ids.shape, jnp.int32, (0, None))] * 3


@blocks_p.def_abstract_eval
def _blocks_shapes(q_lo, q_hi, segment_checked, *, kv_len, implementation):
    batch, q_len = q_lo.shape

    def array(*shape):
        return _like(q_lo, (batch, *shape), jnp.int32, (0, *[None] * len(shape)))

    return [
        array(5, ceil_div(q_len, BLOCK)),
        array(4, ceil_div(kv_len, BLOCK)),
        array(ceil_div(q_len, TILE)),
        array(ceil_div(q_len, TILE_192)),
        array(ceil_div(kv_len, TILE)),
    ]


def forward_results(query: Any, value: Any, heads: int, max_logits: bool) -> list[Any]:
    """Of forward_p; `heads` of the query's are computed."""
    batch, q_len, _, _ = query.shape
    rows = _like(query, (batch, heads, q_len), accumulator(query.dtype), (0, 2, 1))
    out = _like(query, (*query.shape[:3], value.shape[3]), query.dtype, (0, 1, 2, None))
    return [out, rows, rows] if max_logits else [out, rows]


def backward_results(operands: Sequence[Any], heads: int, params: dict[str, Any]) -> list[Any]:
    """Likewise of backward_p."""
    of = named("backward", operands, params)
    query = of["query"]
    gradients = [_like(x, x.shape, x.dtype, range(4)) for x in (query, of["key"], of["value"])]
    if params["score_grads"]:
        batch, q_len, _, _ = query.shape
        gradients.append(
            _like(query, (batch, heads, 2, q_len), accumulator(query.dtype), (0, 2, None, 1))
        )
    if params["bias_grad"]:
        gradients.append(_like(of["bias"], of["bias"].shape, of["bias"].dtype, range(4)))
    return gradients


@forward_p.def_abstract_eval
def _forward_shapes(query, key, value, *operands, max_logits, **static):
    return forward_results(query, value, query.shape[2], max_logits)


@backward_p.def_abstract_eval
def _backward_shapes(query, *operands, **params):
    return backward_results((query, *operands), query.shape[2], params)


class _BatchingRule(NamedTuple):
    """The mapped axis merged into the batch, which is every operand's first axis.

    In front of it; behind it where the batch is sharded in the types of an explicit mesh, which
    merge no other way.
    """

    size: Any
    behind: bool

    def place(self, x: jax.Array, dim: int | None) -> jax.Array:
        """The mapped axis beside the batch, of size 1 where x has none."""
        to = int(self.behind)
        return jnp.expand_dims(x, to) if dim is None else jnp.moveaxis(x, dim, to)

    def merged(self, x: jax.Array, batch: Any) -> jax.Array:
        """Of `place`, repeated where it has one for all."""
        shape = (batch, self.size) if self.behind else (self.size, batch)
        x = jnp.broadcast_to(x, (*shape, *x.shape[2:]))
        return self._reshape(x, (shape[0] * shape[1], *x.shape[2:]))

    def fold(self, x: jax.Array, dim: int | None) -> jax.Array:
        x = self.place(x, dim)
        return self.merged(x, x.shape[0 if self.behind else 1])

    def fold_shared(self, operands, dims, batch: Any) -> list[jax.Array]:
        """Operands that all have the batch, or all 1: one for all stays so, unless it is mapped."""
        if not operands:
            return []
        if operands[0].shape[_batch_axis(dims[0])] == 1 and all(d is None for d in dims):
            return list(operands)
        placed = [self.place(x, d) for x, d in zip(operands, dims, strict=True)]
        return [self.merged(x, batch) for x in placed]

    def unfold(self, results: Sequence[jax.Array]) -> tuple[list[jax.Array], list[int]]:
        shape = (-1, self.size) if self.behind else (self.size, -1)
        apart = [self._reshape(x, (*shape, *x.shape[1:])) for x in results]
        return apart, [int(self.behind)] * len(apart)

    def _reshape(self, x: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
        """With or without the mapped axis. How that is sharded jax 0.7 does not find beside an axis
        of size 1.
        """
        if not self.behind:
            return x.reshape(shape)
        given = jax.typeof(x).sharding
        batch, *rest = (*given.spec, *[None] * x.ndim)[: x.ndim]
        rest = rest[1:] if len(shape) < x.ndim else [None, *rest]
        to = jax.sharding.NamedSharding(given.mesh, P(batch, *rest))
        return jnp.reshape(x, shape, out_sharding=to)


def _batch_axis(dim: int | None) -> int:
    return 1 if dim == 0 else 0


def _batching_rule(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> _BatchingRule:
    both = list(zip(operands, dims, strict=True))
    size = next(x.shape[d] for x, d in both if d is not None)
    shardings = [(getattr(jax.typeof(x), "sharding", None), _batch_axis(d)) for x, d in both]
    return _BatchingRule(
        size, any(s is not None and (*s.spec, None, None)[axis] for s, axis in shardings)
    )


def _batch_mask(primitive: Primitive, sharded: bool, operands, dims, **params):
    folding = _batching_rule(operands, dims)
    folded = [folding.fold(x, d) for x, d in zip(operands, dims, strict=True)]
    return folding.unfold(primitive.bind(*folded, **params))


def batch_attention(
    primitive: Primitive, tensors: int, sharded: bool, operands, dims, tangents=(),
    tangent_dims=(), *, extras, **params,
):  # fmt: skip
    """The first `tensors` operands have the batch; mask operands and extras have it, or 1.

    `tangents`: of the tensors and of the extras that move, which are folded as those are.
    """
    biases = _of_bias(operands, dims, tangents, tangent_dims, extras)
    bias_grad = params.get("bias_grad", False)
    batch = operands[0].shape[_batch_axis(dims[0])]
    one_for_batch = batch != 1 and any(x.shape[_batch_axis(d)] == 1 for x, d in biases)
    apart = bias_grad or any(d is not None for _, d in biases)
    if one_for_batch and apart and not sharded:  # folded, the bias would be repeated for the batch
        every, all_dims = (*operands, *tangents), (*dims, *tangent_dims)
        return _one_by_one(primitive, every, all_dims, extras=extras, **params)
    folding = _batching_rule((*operands, *tangents), (*dims, *tangent_dims))
    values = list(zip(operands, dims, strict=True))
    moved = list(zip(tangents, tangent_dims, strict=True))
    folded = [folding.fold(x, d) for x, d in values[:tensors]]
    new = [folding.fold(x, d) for x, d in moved[:tensors]]
    end = len(operands) - len(extras)
    of_extra = dict(zip(extras, values[end:], strict=True))
    move = iter(moved[tensors:])
    with_tangent = {name: next(move) for name in extras if name in MOVING and moved}
    expanded = bias_grad and biases[0][0].shape[_batch_axis(biases[0][1])] == 1
    for group in (None, *_TOGETHER):
        if group is None:
            own, other = values[tensors:end], []
        else:
            own = [of_extra[name] for name in group if name in of_extra]
            other = [with_tangent[name] for name in group if name in with_tangent]
        both = own + other
        if group == ("dropout_streams",) or (group == ("bias",) and expanded):
            # Of bits every batch row has its own, and of the bias every element its own gradient.
            placed = [folding.place(x, d) for x, d in both]
            made = [folding.merged(x, batch) for x in placed]
        else:
            made = folding.fold_shared([x for x, _ in both], [d for _, d in both], batch)
        folded += made[: len(own)]
        new += made[len(own) :]
    results = primitive.bind(*folded, *new, extras=extras, **params)
    apart, axes = folding.unfold(results)
    if expanded:  # of all rows of the batch
        apart[-1] = _sum_of_batch(apart[-1], 0 if folding.behind else 1)
    return apart, axes


_TOGETHER = (
    ("scales",),
    ("slopes", "q_bias_pos", "kv_bias_pos"),
    ("bias",),
    ("dropout_streams",),
    ("dropout_rows",),
)
"""Extras that have the batch together, or all 1; dropout_streams have it always."""


def _of_bias(operands, dims, tangents, tangent_dims, extras) -> list[tuple[Any, int | None]]:
    """The bias and its tangent, with their mapped axes; those that there are."""
    if "bias" not in extras:
        return []
    at = len(operands) - len(extras) + extras.index("bias")
    found = [(operands[at], dims[at])]
    if tangents:  # the last: no other extra that moves stands behind the bias
        found.append((tangents[-1], tangent_dims[-1]))
    return found


def _one_by_one(primitive: Primitive, operands, dims, **params):
    """A loop over the mapped axis, for which nothing is repeated."""
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def one(some):
        rest = iter(some)
        every = (x if d is None else next(rest) for x, d in zip(operands, dims, strict=True))
        return tuple(primitive.bind(*every, **params))

    results = jax.lax.map(one, mapped)
    return results, [0] * len(results)


def _sum_of_batch(x: jax.Array, axis: int) -> jax.Array:
    return x.sum(axis, keepdims=True, dtype=accumulator(x.dtype)).astype(x.dtype)


def register_batching(primitive: Primitive, rule: Callable) -> None:
    """rule(primitive, whether the mapped axis is divided over a mesh, operands, dims, **params)."""

    def batched(axis_data, operands, dims, **params):
        if all(d is None for d in dims):
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        if not is_symbolic(axis_data.size) and axis_data.size == 0:
            return _of_no_element(primitive, operands, dims, **params)
        names = axis_data.spmd_name, getattr(axis_data, "explicit_mesh_axis", None)
        return rule(primitive, any(x is not None for x in names), operands, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batched


def _of_no_element(primitive: Primitive, operands, dims, **params):
    """vmap over an axis of size 0: nothing is computed."""
    one = [
        jax.ShapeDtypeStruct([n for axis, n in enumerate(x.shape) if axis != d], x.dtype)
        for x, d in zip(operands, dims, strict=True)
    ]
    shapes = jax.eval_shape(lambda *x: primitive.bind(*x, **params), *one)
    results = [jnp.zeros((0, *x.shape), x.dtype) for x in shapes]
    return vary_together(*results, *operands)[: len(results)], [0] * len(results)


register_batching(documents_p, _batch_mask)
register_batching(blocks_p, _batch_mask)


def _batch_forward(primitive, sharded, operands, dims, **params):
    return batch_attention(primitive, len(TENSORS["forward"]), sharded, operands, dims, **params)


def _batch_backward(primitive, sharded, operands, dims, **params):
    return batch_attention(primitive, len(TENSORS["backward"]), sharded, operands, dims, **params)


register_batching(forward_p, _batch_forward)
register_batching(backward_p, _batch_backward)


# --- Decoding: keys and values of a batch row, or of pages that a table orders.

decode_p = new_primitive(
    "packax_decode", ("scale", "soft_cap", "precision", "paged", "has_sinks", "implementation")
)


@decode_p.def_abstract_eval
def _decode_shapes(query, key, value, *operands, **static):
    batch, q_len, heads, _ = query.shape
    return [
        _like(query, (batch, q_len, heads, value.shape[3]), query.dtype, (0, 1, 2, None)),
        _like(query, (batch, heads, q_len), accumulator(query.dtype), (0, 2, 1)),
    ]


def _decode_gradient(primals, tangents, **params):
    raise NotImplementedError(
        "decode_attention has no gradient: differentiate flash_attention, or put "
        "jax.lax.stop_gradient around query, key, value and sinks if none is needs_grad"
    )


def _batch_decode(primitive, sharded, operands, dims, *, paged, has_sinks, **params):
    """Caches that are not mapped stay one: the folded batch finds its rows of it by a table."""
    folding = _batching_rule(operands, dims)
    size = folding.size
    query, key, value, q_lo, q_hi, *rest = zip(operands, dims, strict=True)
    table = rest[0] if paged else None
    shared = key[1] is None and value[1] is None
    if shared and not paged:
        batch = key[0].shape[0]
        table = (jnp.arange(batch, dtype=jnp.int32)[:, None], None)
    if table is not None:
        folded_table = folding.fold(*table)
        if not shared:  # pages of all mapped elements, in the order of `fold`
            pages = key[0].shape[_batch_axis(key[1])]
            batch = folded_table.shape[0] // size
            own = folding.merged(
                folding.place(jnp.arange(size, dtype=jnp.int32)[:, None], 0), batch
            )
            there = (folded_table >= 0) & (folded_table < pages)
            page = folded_table * size if folding.behind else folded_table
            first = own if folding.behind else own * pages
            folded_table = jnp.where(there, page + first[:, None], -1)
    folded = [folding.fold(*query)]
    folded += [key[0], value[0]] if shared else [folding.fold(*key), folding.fold(*value)]
    folded += [folding.fold(*q_lo), folding.fold(*q_hi)]
    if table is not None:
        folded.append(folded_table)
    if has_sinks:
        sinks, dim = rest[-1]
        folded += folding.fold_shared([sinks], [dim], folded[0].shape[0] // size)
    results = primitive.bind(*folded, paged=table is not None, has_sinks=has_sinks, **params)
    return folding.unfold(results)


register_batching(decode_p, _batch_decode)
ad.primitive_jvps[decode_p] = _decode_gradient
