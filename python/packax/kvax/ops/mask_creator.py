"""`create_attention_mask`: packax's masks, together with kvax's bounds of blocks."""

from __future__ import annotations

import dataclasses
import logging
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import packax
from packax.context import ContextPlan
from packax.extend import Layout, as_int32, check_divides
from packax.kvax.ops.block_bounds import Side, block_bounds
from packax.kvax.utils.common import (
    PADDING_SEGMENT_ID,
    FlashAttentionParamsConfig,
    get_default_flash_attention_params,
)
from packax.kvax.utils.permutation import head_tail_plan
from packax.kvax.utils.sharding import attention_layout, gathered
from packax.kvax.utils.typing import AttentionMask, DeviceArray, RowMasks

logger = logging.getLogger(__name__)


class Tokens(NamedTuple):
    """Queries (B, Sq) and keys (B, Skv), int32."""

    query_positions: jax.Array
    query_segment_ids: jax.Array
    kv_positions: jax.Array
    kv_segment_ids: jax.Array


def create_attention_mask(
    query_positions: DeviceArray,
    query_segment_ids: DeviceArray,
    kv_positions: DeviceArray,
    kv_segment_ids: DeviceArray,
    fwd_params: FlashAttentionParamsConfig | None = None,
    bwd_params: FlashAttentionParamsConfig | None = None,
    calc_bwd_mask: bool = False,
    skip_pad_tokens: bool = True,
    mesh: Any = None,
    plan: ContextPlan | None = None,
) -> tuple[AttentionMask, ...]:
    """The mask that all layers of a step share: query i attends to key j if their segment ids are
    equal and the query's position is at least the key's.

    Call it inside `attention_specs`. Ids and positions may have any values; -1 is padding.

    Args:
        query_positions, query_segment_ids: (B, Sq) integers that fit int32, in the order of the
            queries: permuted if the queries are (context parallelism).
        kv_positions, kv_segment_ids: (B, Skv), always in the order of the sequence.
        fwd_params, bwd_params: the block sizes for the bounds, with no other effect; None: the
            defaults of `get_default_flash_attention_params`.
        calc_bwd_mask: also return the bounds of the dQ and of the dK/dV kernels. Gradients do not
            need them.
        skip_pad_tokens: whether padding attends to nothing. Otherwise, it attends to padding, by
            position.
        mesh: the device mesh; None: the one set by `with mesh:` or jax.set_mesh.
        plan: the plan from `packax.context_plan` that permuted the queries; kvax has no such
            argument. Queries and keys must then be the same tokens; the ids and positions of the
            keys define the mask. With a plan of kind "local" a rank fetches only the keys of
            documents that ranks share, or all keys if padding attends to padding.

    Returns:
        (forward,) or (forward, dQ, dK/dV): `AttentionMask`, pytrees.

    Raises:
        ValueError: no attention specs, no mesh for their axes, wrong shapes or dtypes, sizes that
            the mesh does not divide, or a plan for other sizes.
        NotImplementedError: a plan on a mesh with axes of Explicit type.

    Examples:
        >>> mask = create_attention_mask(positions, ids, kv_positions, kv_ids, calc_bwd_mask=True)
    """
    layout = attention_layout(mesh)
    tokens = checked_tokens(query_positions, query_segment_ids, kv_positions, kv_segment_ids)
    if plan is None:
        row_masks = row_masks_of(tokens, layout, skip_pad_tokens=bool(skip_pad_tokens))
    else:
        given = (query_positions, query_segment_ids, kv_positions, kv_segment_ids)
        row_masks = _row_masks_by_plan(given, tokens, layout, plan, bool(skip_pad_tokens))

    shards = layout.size(layout.context)
    batch, q_len = tokens.query_segment_ids.shape
    # Bounds are small, so every rank computes those of all rows.
    tokens = Tokens(*(layout.place(x, layout.batch) for x in tokens))
    pieces = (batch, shards, q_len // shards)
    query = Side(*(x.reshape(pieces) for x in tokens[:2]))
    keys = Side(*(x[:, None] for x in tokens[2:]))

    def bounds_of(sizes: tuple[int, int], outer: str, rows: RowMasks | None) -> AttentionMask:
        lower, upper, lower_full, upper_full = block_bounds(
            query,
            keys,
            query_block=sizes[0],
            kv_block=sizes[1],
            outer=outer,
            skip_pad_tokens=bool(skip_pad_tokens),
        )
        return AttentionMask(lower, upper, lower_full, upper_full, rows, sizes)

    forward, dq, dkdv = block_sizes(
        fwd_params or get_default_flash_attention_params(backward=False),
        bwd_params or get_default_flash_attention_params(backward=True),
    )
    masks = [bounds_of(forward, "query", row_masks)]
    if calc_bwd_mask:
        masks += [bounds_of(dq, "query", None), bounds_of(dkdv, "kv", None)]
    return tuple(masks)


def block_sizes(
    fwd_params: FlashAttentionParamsConfig, bwd_params: FlashAttentionParamsConfig
) -> tuple[tuple[int, int], ...]:
    """(query block, key block) of the forward, dQ and dK/dV masks. The dQ mask's are swapped."""
    sizes = []
    for name, params in (("fwd_params", fwd_params), ("bwd_params", bwd_params)):
        try:
            query, key = params.query_block_size, params.kv_block_size
            pair = (operator.index(query), operator.index(key))
        except (AttributeError, TypeError):
            pair = (0, 0)
        if min(pair) < 1:
            raise ValueError(f"{name} must have positive integers as block sizes, but is {params}")
        sizes.append(pair)
    forward, backward = sizes
    return forward, backward[::-1], backward


def checked_tokens(
    query_positions: Any, query_segment_ids: Any, kv_positions: Any, kv_segment_ids: Any
) -> Tokens:
    """The arguments as int32 arrays.

    Raises:
        ValueError: shapes or dtypes that `create_attention_mask` does not accept.
    """
    arrays = {
        "query_positions": query_positions,
        "query_segment_ids": query_segment_ids,
        "kv_positions": kv_positions,
        "kv_segment_ids": kv_segment_ids,
    }
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            x = np.asarray(x)
        arrays[name] = x
        if x.ndim != 2 or x.shape[1] == 0:
            raise ValueError(
                f"{name} must have shape (batch, length), length at least 1, but has {x.shape}"
            )
        if isinstance(x, np.ndarray):
            arrays[name] = jnp.asarray(as_int32(name, x))
        elif not (np.issubdtype(x.dtype, np.integer) and np.can_cast(x.dtype, np.int32)):
            raise ValueError(f"{name} must be integers that fit int32, but has dtype {x.dtype}")
    for side in ("query", "kv"):
        positions, ids = (arrays[f"{side}_{what}"].shape for what in ("positions", "segment_ids"))
        if positions != ids:
            raise ValueError(
                f"{side}_positions and {side}_segment_ids must have one shape, but have "
                f"{positions} and {ids}"
            )
    batch, kv_batch = (arrays[name].shape[0] for name in ("query_positions", "kv_positions"))
    if batch != kv_batch:
        raise ValueError(
            f"queries and keys must have one batch size, but there are positions for {batch} and "
            f"{kv_batch}"
        )
    return Tokens(*(x.astype(jnp.int32) for x in arrays.values()))


def row_masks_of(tokens: Tokens, layout: Layout, *, skip_pad_tokens: bool = True) -> RowMasks:
    """packax's masks, one for each way in which `flash_attention` may compare rows and keys."""
    q_pos, q_ids, kv_pos, kv_ids = tokens
    q_len = q_ids.shape[1]
    if layout.on_mesh:
        check_divides(layout, "query_segment_ids", "length", q_len, layout.context)
    if not skip_pad_tokens:
        q_ids, kv_ids = (layout.place(x, layout.batch) for x in (q_ids, kv_ids))
        q_ids, kv_ids = _padding_as_a_document(q_ids, kv_ids)
    documents = packax.documents(q_ids, kv_segment_ids=kv_ids)
    placed = packax.documents(q_ids, kv_segment_ids=kv_ids, positions=q_pos, kv_positions=kv_pos)

    def build(expression: Any) -> packax.AttentionMask:
        return packax.create_attention_mask(expression, sharding=layout.sharding)

    by_permuted_index = None
    shards = layout.size(layout.context)
    if shards > 1 and q_len % (2 * shards) == 0:  # otherwise rows cannot have been permuted
        index = head_tail_plan(2 * shards, q_len).index()[0]
        by_permuted_index = build(documents & packax.masks.ranges(np.zeros_like(index), index + 1))
    return RowMasks(
        build(packax.causal() & placed), build(packax.causal() & documents), by_permuted_index
    )


def _row_masks_by_plan(
    given: tuple[Any, ...],
    tokens: Tokens,
    layout: Layout,
    plan: ContextPlan,
    skip_pad_tokens: bool,
) -> RowMasks:
    """The masks if `plan` permuted rows and keys. given: the caller's arrays, maybe of numpy."""
    if tokens.query_segment_ids.shape != tokens.kv_segment_ids.shape:
        raise ValueError(
            "plan permutes queries and keys in the same way, but query_segment_ids have shape "
            f"{tokens.query_segment_ids.shape} and kv_segment_ids {tokens.kv_segment_ids.shape}"
        )
    if layout.explicit:
        raise NotImplementedError(
            "plan needs keys that are sharded along the context axes, which kv_specs cannot say on "
            "a mesh with axes of type Explicit: use packax.flash_attention"
        )
    # With numpy arrays, packax checks the plan before the program runs.
    ids = given[3] if isinstance(given[3], np.ndarray) else tokens.kv_segment_ids
    if not skip_pad_tokens:  # padding is a document unknown to the plan, so gather all keys
        ids, _ = _padding_as_a_document(tokens.kv_segment_ids, tokens.kv_segment_ids)
        plan = dataclasses.replace(plan, checksum=None)

    def build(**positions: jax.Array) -> packax.AttentionMask:
        expression = packax.causal() & packax.documents(ids, **positions)
        return packax.create_attention_mask(expression, sharding=gathered(layout), plan=plan)

    by_index = build()  # this checks the plan
    for name, query, key in zip(("positions", "segment_ids"), given[:2], given[2:], strict=True):
        known = all(isinstance(x, np.ndarray) for x in (query, key, plan.order))
        if known and (query != plan.permute(key)).any():
            raise ValueError(
                f"query_{name} must be kv_{name} permuted by plan, but they differ: permute them "
                "by permute_tokens_context_parallelism(..., plan=plan)"
            )
    return RowMasks(build(positions=tokens.kv_positions), by_index, by_index)


def _padding_as_a_document(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replaces the id -1 by an id that no token of the batch row has."""

    def of_row(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids = jnp.concatenate([q_ids, kv_ids])
        # Of the n + 1 ids -2, -3, ..., at least one is unused by n tokens.
        slot = jnp.where(ids < PADDING_SEGMENT_ID, -2 - ids, ids.size + 1)
        used = jnp.zeros(ids.size + 1, bool).at[slot].set(True, mode="drop")
        free = -2 - jnp.argmin(used).astype(jnp.int32)
        ids = jnp.where(ids == PADDING_SEGMENT_ID, free, ids)
        return ids[: q_ids.size], ids[q_ids.size :]

    return jax.vmap(of_row)(q_ids, kv_ids)


def calculate_mask_sparsity(
    mask: AttentionMask,
    query_block_size: int,
    kv_block_size: int,
    query_seq_len: int,
    kv_seq_len: int,
) -> float:
    """The fraction of blocks of the whole batch that the mask allows: 1 if it allows all.

    Args:
        mask: one of those that `create_attention_mask` returns.
        query_block_size, kv_block_size: the block sizes that the mask was made with.
        query_seq_len, kv_seq_len: the numbers of queries and keys.

    Returns:
        A float: the number of blocks within the bounds, divided by the number of all blocks; 0 for
        an empty batch.

    Raises:
        jax.errors.TracerArrayConversionError: inside jit, where bounds have no values.
    """
    attended = np.asarray(mask.upper_bounds) - np.asarray(mask.lower_bounds)
    blocks = -(-query_seq_len // query_block_size) * -(-kv_seq_len // kv_block_size)
    return float(attended.sum() / max(blocks * attended.shape[0], 1))


_ROWS, _COLUMNS = 32, 64  # the largest picture that fits on a screen


def print_mask(
    mask: AttentionMask,
    num_inner_blocks: int,
    print_only_first_in_batch: bool = True,
    fit_in_screen: bool = True,
) -> None:
    """Logs (level info) a picture of the blocks: full, partial, not attended.

    Args:
        mask: one of those that `create_attention_mask` returns.
        num_inner_blocks: number of blocks of the inner side, over all shards.
        print_only_first_in_batch: whether to print only the first row of the batch.
        fit_in_screen: draw several blocks as one if there are more than 32 by 64.
    """
    bounds = [np.asarray(x) for x in mask.flatten()]
    rows = 1 if print_only_first_in_batch else bounds[0].shape[0]
    pictures = (
        _picture([x[n] for x in bounds], num_inner_blocks, fit_in_screen) for n in range(rows)
    )
    logger.info("Attention masks:\n%s", "\n".join(pictures))


def _picture(bounds: list[np.ndarray], inner: int, fit: bool) -> str:
    """The picture of one batch row as text. bounds: (shards, outer blocks) each."""
    shards, outer = bounds[0].shape
    own = inner // shards
    lower, upper, lower_full, upper_full = (x.T[:, :, None] for x in bounds)
    index = np.arange(own)
    attended = (lower <= index) & (index < upper)
    full = (lower_full <= index) & (index < upper_full)
    share = (attended.astype(float) + full).reshape(outer, shards * own) / 2
    if fit:
        down, across = (
            max(1, -(-n // most)) for n, most in zip(share.shape, (_ROWS, _COLUMNS), strict=True)
        )
        share = np.pad(
            share,
            [(0, -n % step) for n, step in zip(share.shape, (down, across), strict=True)],
            "edge",
        )
        share = share.reshape(share.shape[0] // down, down, -1, across).mean(axis=(1, 3))
    line = "+" + "--" * share.shape[1] + "+"
    cells = np.where(share == 1, "██", np.where(share == 0, "  ", "░░"))
    return "\n".join([line, *("|" + "".join(row) + "|" for row in cells), line])
