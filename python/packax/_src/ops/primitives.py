"""The five primitives, the shapes of their results, and both passes of one device.

documents_p: q_ids, kv_ids, q_pos, kv_pos -> lo, hi, segment_checked
blocks_p: kv_start, kv_end, segment_checked -> q_blocks, kv_blocks, q_order, q_order_192, kv_order
forward_p: leaves of `Operands` (core/spec.py) -> out, lse; with spec.max_logits also the largest
    logit of every row
backward_p: leaves of `Operands` -> dq, dk, dv (those not in spec.needs_grad may hold anything);
    with spec.score_grads also every row's part of the gradients of scale and slope, (B, H, 2, Sq);
    with spec.row_delta also sum(dout * out) - dlse, (B, H, Sq), 0 in rows with an empty range; with
    spec.bias_grad also the gradient of bias
decode_p: leaves of `Operands` -> out, lse. With `row_bounds`, the rows of several sequences are
    packed, in a batch of 1. With `work`, only as the call of kernels.
"FFI targets" in the documentation lists all shapes. lowering.py implements the primitives per
platform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from packax._src.core.jax_compat import check_for_nans, run_compiled
from packax._src.core.mask import AttentionMask, Pass
from packax._src.core.schema import ROWS
from packax._src.core.sharding import over_auto_axes, typed_axes, vary_together
from packax._src.core.spec import (
    BLOCK,
    TILE,
    TILE_192,
    AttentionSpec,
    Operands,
    accumulator,
    ceil_div,
    common_batch,
)
from packax._src.ops import packed_rows
from packax._src.ops.batching_rules import (
    batch_attention,
    batch_axis,
    batch_mask,
    batching_rule,
    register_batching,
)
from packax._src.ops.partitioning import require_device_info
from packax._src.ops.row_sums import zero_unattended
from packax._src.ops.score_mods import (
    NonDiffOperands,
    ScoreParams,
    sinks_gradient,
    summed,
)

P = jax.sharding.PartitionSpec
Implementation = Literal["cuda", "xla"]


def check_implementation(
    implementation: Any, names: tuple[str, ...] = ("cuda", "xla"), note: str = ""
) -> Any:
    known = isinstance(implementation, str) and implementation in names
    if implementation is not None and not known:
        *most, last = (f'"{name}"' for name in names)
        raise ValueError(
            f"implementation must be None, {', '.join(most)} or {last}{note}, but is "
            f"{implementation!r}"
        )
    return implementation


def _like(aval: Any, shape: tuple[int, ...], dtype: Any, dims: Sequence[int | None]) -> Any:
    """An aval that varies like `aval`, its dimension k sharded like dimension dims[k] of `aval`."""
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
        return primitive.bind(require_device_info(first), *operands, **params)

    primitive.def_impl(functools.partial(run_compiled, call))  # one program per call
    return primitive


BLOCK_ARRAYS = ("q_blocks", "kv_blocks", "q_order", "q_order_192", "kv_order")
"""The arrays of a mask that blocks_p computes."""

documents_p = new_primitive("packax_documents", ("compare_positions", "implementation"))
blocks_p = new_primitive("packax_blocks", ("kv_len", "implementation"))
forward_p = new_primitive("packax_forward", ("spec", "names"))
backward_p = new_primitive("packax_backward", ("spec", "names"))


def forward(spec: AttentionSpec, operands: Operands) -> list[jax.Array]:
    return forward_p.bind(*operands.leaves, spec=spec, names=operands.names)


def backward(spec: AttentionSpec, operands: Operands) -> list[jax.Array]:
    return backward_p.bind(*operands.leaves, spec=spec, names=operands.names)


@documents_p.def_abstract_eval
def _documents_shapes(q_ids, kv_ids, q_pos, kv_pos, *, compare_positions, implementation):
    return [_like(q_ids, q_ids.shape, jnp.int32, (0, None))] * 3


@blocks_p.def_abstract_eval
def _blocks_shapes(kv_start, kv_end, segment_checked, *, kv_len, implementation):
    batch, q_len = kv_start.shape

    def array(*shape):
        return _like(kv_start, (batch, *shape), jnp.int32, (0, *[None] * len(shape)))

    return [
        array(5, ceil_div(q_len, BLOCK)),
        array(4, ceil_div(kv_len, BLOCK)),
        array(ceil_div(q_len, TILE)),
        array(ceil_div(q_len, TILE_192)),
        array(ceil_div(kv_len, TILE)),
    ]


def forward_results(spec: AttentionSpec, of: Operands, heads: int) -> list[Any]:
    """The avals of forward_p's results, for `heads` query heads."""
    query = of.query
    batch, q_len, _, _ = query.shape
    rows = _like(query, (batch, heads, q_len), accumulator(query.dtype), (0, 2, 1))
    out = _like(query, (*query.shape[:3], of.value.shape[3]), query.dtype, (0, 1, 2, None))
    lse = rows
    if of.lse_in_two:
        lse = _like(query, (batch, heads, q_len, 2), accumulator(query.dtype), (0, 2, 1, None))
    return [out, lse, rows] if spec.max_logits else [out, lse]


def backward_results(spec: AttentionSpec, of: Operands, heads: int) -> list[Any]:
    """The avals of backward_p's results, for `heads` query heads."""
    query = of.query
    gradients = [_like(x, x.shape, x.dtype, range(4)) for x in (query, of.key, of.value)]
    batch, q_len, _, _ = query.shape
    real = accumulator(query.dtype)
    if spec.score_grads:
        gradients.append(_like(query, (batch, heads, 2, q_len), real, (0, 2, None, 1)))
    if spec.row_delta:
        gradients.append(_like(query, (batch, heads, q_len), real, (0, 2, 1)))
    if spec.bias_grad:
        gradients.append(_like(of.bias, of.bias.shape, of.bias.dtype, range(4)))
    return gradients


@forward_p.def_abstract_eval
def _forward_shapes(query, *avals, spec, names):
    return forward_results(spec, Operands.of(names, (query, *avals)), query.shape[2])


@backward_p.def_abstract_eval
def _backward_shapes(query, *avals, spec, names):
    return backward_results(spec, Operands.of(names, (query, *avals)), query.shape[2])


register_batching(documents_p, batch_mask)
register_batching(blocks_p, batch_mask)
register_batching(forward_p, batch_attention)
register_batching(backward_p, batch_attention)


# --- The passes of one device: the primitives, and the gradients of score parameters.
# context/shard.py runs `backward_pass` on every rank, with `kernels` that gather keys.


class Inputs(NamedTuple):
    """The arrays of a pass."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    scores: ScoreParams
    mask: AttentionMask
    fixed: NonDiffOperands
    # For the backward pass: the forward's results and their cotangents, of which dlse may be None.
    out: Any = None
    lse: Any = None
    dout: Any = None
    dlse: Any = None


def forward_pass(spec: AttentionSpec, x: Inputs) -> list[jax.Array]:
    """out (B, Sq, H, Dv), lse (ops/row_sums.py), and with max_logits each row's largest logit,
    (B, H, Sq)."""
    return forward(spec.of_primitive(x.mask), operands_of("forward", spec, x))


def backward_pass(
    spec: AttentionSpec, x: Inputs, kernels: Callable[..., Any] | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, ScoreParams]:
    """The gradients of query, key, value and scores, sharded like these.

    Gradients that are not named in spec.needs_grad may hold anything.
    """
    x = Inputs(*vary_together(*x))
    if spec.layout.several(spec.layout.kv_context):
        # Without a barrier XLA reuses the forward's gathers and keeps their results in memory.
        key, value, dout = jax.lax.optimization_barrier((x.key, x.value, x.dout))
        x = x._replace(key=key, value=value, dout=dout)
    if x.scores.bias is not None:  # a bias of -inf may mask all keys of a row
        dout, dlse = zero_unattended(x.lse, x.dout, x.dlse)
        x = x._replace(dout=dout, dlse=dlse)
    dq, dk, dv, of_rows, row_delta, dbias = (kernels or _backward)(spec, x)
    gradients = jax.tree.map(jnp.zeros_like, x.scores)  # 0 if not needed
    if row_delta is not None:
        gradients = gradients._replace(sinks=sinks_gradient(x.scores.sinks, x.lse, row_delta))
    if of_rows is not None:  # (H, 2), the part of this rank's rows
        if x.scores.scales is not None:
            gradients = gradients._replace(scales=of_rows[:, 0].sum()[None])
        if x.scores.slopes is not None:
            gradients = gradients._replace(slopes=of_rows[:, 1][None])
    if dbias is not None:
        gradients = gradients._replace(bias=dbias)
    return dq, dk, dv, summed(spec.layout, gradients, spec.bias_dims)


def operands_of(direction: Pass, spec: AttentionSpec, x: Inputs) -> Operands:
    tensors = (x.key, x.value, x.out, x.lse, x.dout, x.dlse)
    return Operands(require_device_info(x.query), *tensors)._replace(
        **x.mask.operands(direction), **score_operands(direction, spec, x.scores, x.fixed)
    )


def _backward(spec: AttentionSpec, x: Inputs) -> tuple[Any, ...]:
    dq, dk, dv, *others = backward(spec.of_primitive(x.mask), operands_of("backward", spec, x))
    of_rows, row_delta, dbias = spec.score_params(others)
    of_rows = None if of_rows is None else of_rows.sum(axis=(0, 3))
    return dq, dk, dv, of_rows, row_delta, dbias


def score_operands(
    direction: Pass, spec: AttentionSpec, scores: ScoreParams, fixed: NonDiffOperands
) -> dict[str, jax.Array]:
    """The operands that change scores and probabilities, by their names in `Operands`."""
    arrays = {**scores._asdict(), **fixed._asdict()}
    if direction == "backward":
        arrays["sinks"] = None  # out and lse include them
    operands = {name: x for name, x in arrays.items() if x is not None}
    if scores.slopes is not None and scores.scales is None:
        operands["scales"] = jnp.full((1,), spec.scale, scores.slopes.dtype)
    for name, x in operands.items():  # of equal batch, if they are folded together
        fold = ROWS[name].fold
        batch = common_batch(y.shape[0] for n, y in operands.items() if fold == ROWS[n].fold != "")
        if x.shape[0] == 1 != batch:
            operands[name] = jnp.broadcast_to(x, (batch, *x.shape[1:]))
    return operands


# --- Decoding: caches are contiguous for each batch row, or consist of pages that a table lists.

decode_p = new_primitive("packax_decode", ("spec", "names"))


@decode_p.def_abstract_eval
def _decode_shapes(query, key, value, *operands, spec, names):
    batch, q_len, heads, _ = query.shape
    return [
        _like(query, (batch, q_len, heads, value.shape[3]), query.dtype, (0, 1, 2, None)),
        _like(query, (batch, heads, q_len), accumulator(query.dtype), (0, 2, 1)),
    ]


def _decode_gradient(primals, tangents, **params):
    raise NotImplementedError(
        "decode_attention and ragged_paged_attention have no gradient: differentiate "
        "flash_attention, or put jax.lax.stop_gradient around query, key, value and sinks if no "
        "gradient is wanted"
    )


def _batch_decode(primitive, sharded, operands, dims, *, spec, names):
    """Folds the mapped axis. Unmapped caches are not repeated, but read through a block table."""
    if "row_bounds" in names:  # the tiles of all mapped calls are decoded together

        def in_tiles(*leaves):
            x = Operands.of(names, leaves)
            return packed_rows.in_tiles(functools.partial(decode, spec), x)

        def mapped_tiles(*leaves):
            return tuple(jax.vmap(in_tiles, dims)(*leaves))

        axes = typed_axes(operands[0])
        mapped_axes = () if dims[0] is None else axes[dims[0]]
        head_axes = axes[2 if dims[0] is None or dims[0] > 2 else 3]
        of_out, of_lse = (mapped_axes, (), (), head_axes), (mapped_axes, (), head_axes)
        return over_auto_axes(mapped_tiles, operands, of_out, of_lse), [0, 0]
    folding = batching_rule(operands, dims)
    size = folding.size
    mapped = dict(zip(names, zip(operands, dims, strict=True), strict=True))
    in_cache = {"key", "value", "key_scale", "value_scale"}
    caches = {x: mapped[x] for x in names if x in in_cache}
    shared = all(dim is None for _, dim in caches.values())
    key, dim = mapped["key"]
    rows = key.shape[batch_axis(dim)]
    folded = {name: folding.fold(*mapped[name]) for name in ("query", "kv_start", "kv_end")}
    table = mapped.get("block_table")
    if shared and table is None:
        table = (jnp.arange(rows, dtype=jnp.int32)[:, None], None)
    if table is not None:
        folded_table = folding.fold(*table)
        if not shared:  # renumber pages in the order of `fold`
            batch = folded_table.shape[0] // size
            element = folding.merged(
                folding.place(jnp.arange(size, dtype=jnp.int32)[:, None], 0), batch
            )
            valid = (folded_table >= 0) & (folded_table < rows)
            page = folded_table * size if folding.after_batch else folded_table
            offset = element if folding.after_batch else element * rows
            folded_table = jnp.where(valid, page + offset[:, None], -1)
        folded["block_table"] = folded_table
    if shared:
        folded |= {name: x for name, (x, _) in caches.items()}
    else:
        folded |= {name: folding.fold(*caches.pop(name)) for name in ("key", "value")}
        if caches:  # key_scale and value_scale
            arrays, axes = zip(*caches.values(), strict=True)
            folded |= zip(caches, folding.fold_shared(arrays, axes, rows), strict=True)
    if "sinks" in mapped:
        sinks, dim = mapped["sinks"]
        batch = folded["query"].shape[0] // size
        (folded["sinks"],) = folding.fold_shared([sinks], [dim], batch)
    call = Operands(**folded)
    return folding.unfold(primitive.bind(*call.leaves, spec=spec, names=call.names))


def decode(spec: AttentionSpec, x: Operands) -> list[jax.Array]:
    return decode_p.bind(*x.leaves, spec=spec, names=x.names)


register_batching(decode_p, _batch_decode)
ad.primitive_jvps[decode_p] = _decode_gradient
check_for_nans(decode_p)
