"""`flash_attention` with kvax's arguments: checks them against the mask, then calls packax.

The file has the same name as kvax's; it does not use Triton.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import packax
from packax.extend import ContextMask, Layout, as_arrays
from packax.kvax.ops.mask_creator import Tokens, block_sizes, checked_tokens, row_masks_of
from packax.kvax.utils.common import FlashAttentionParamsConfig
from packax.kvax.utils.permutation import head_tail_plan
from packax.kvax.utils.sharding import attention_layout, gathered
from packax.kvax.utils.typing import AttentionMask, DeviceArray, RowMasks

CHECKPOINT_NAME = "attention_outputs"
"""Another name of output and log-sum-exp in `jax.checkpoint` policies, in addition to packax's."""


def flash_attention_triton(
    query: DeviceArray,
    key: DeviceArray,
    value: DeviceArray,
    query_positions: DeviceArray,
    query_segment_ids: DeviceArray,
    kv_positions: DeviceArray,
    kv_segment_ids: DeviceArray,
    mask: tuple[AttentionMask, ...],
    scale: float = 1.0,
    bias: DeviceArray | None = None,
    fwd_params: FlashAttentionParamsConfig | None = None,
    bwd_params: FlashAttentionParamsConfig | None = None,
    assume_sequential_positions: bool = False,
    memory_optimized_gqa_backward: bool = False,
    permute_tokens_for_load_balance: bool = True,
    debug: bool = False,
    mesh: Any = None,
) -> DeviceArray:
    """Causal attention inside each segment: query i attends to key j if their segment ids are equal
    and not -1, and the query's position is at least the key's.

    Call it inside `attention_specs`. The mask determines which pairs are attended. Only the shapes
    of ids and positions are checked; their values are used only if the mask has nothing but bounds
    (`AttentionMask.unflatten`).

    Args:
        query: (B, Sq, H, D).
        key: (B, Skv, Hkv, D), H a multiple of Hkv.
        value: (B, Skv, Hkv, Dv).
        query_positions, query_segment_ids: (B, Sq), in the order of the queries.
        kv_positions, kv_segment_ids: (B, Skv), always in the order of the sequence.
        mask: the result of `create_attention_mask`, one mask or three; gradients need only the
            first.
        scale: a number; the default, 1, is kvax's and not 1 / sqrt(D).
        bias: must be None.
        fwd_params, bwd_params: None, or settings with the block sizes that the mask was made with.
        assume_sequential_positions: compare indices in the sequence instead of positions.
        memory_optimized_gqa_backward: no effect: gradients of keys are never stored per query head.
        permute_tokens_for_load_balance: whether query, key, value and the query's positions and ids
            were permuted by `permute_tokens_context_parallelism` (with the plan of the mask, if
            any). The result is then permuted, too. False: all are in the order of the sequence. It
            has no effect without a context axis in the specs.
        debug: no effect: kernels are compiled when the wheel is built.
        mesh: the device mesh; None: the one set by `with mesh:` or jax.set_mesh.

    Returns:
        (B, Sq, H, Dv) in query's dtype; 0 for a query that attends to nothing. Under
        `jax.checkpoint` it is named "attention_outputs", together with the log-sum-exp that the
        backward pass reads.

    Raises:
        ValueError: wrong shapes, dtypes, mask, scale or block sizes, or sizes that do not
            match; no attention specs; no mesh for their axes.
        NotImplementedError: a bias; no kernel for the dtype or head dim.

    Examples:
        >>> scale = q.shape[-1] ** -0.5
        >>> out = flash_attention(q, k, v, positions, ids, positions, ids, mask, scale=scale)
    """
    if bias is not None:
        raise NotImplementedError(
            "bias must be None, as in kvax: packax.flash_attention supports biases"
        )
    if scale is None:
        raise ValueError("scale must be a number, but is None: leave it out for 1")
    query, key, value = as_arrays(query=query, key=key, value=value)
    tokens = checked_tokens(query_positions, query_segment_ids, kv_positions, kv_segment_ids)
    for name, x, ids in (("query", query, tokens[1]), ("key", key, tokens[3])):
        if x.shape[:2] != ids.shape:
            raise ValueError(
                f"{name} has shape {x.shape}, but its positions and segment ids have {ids.shape}: "
                "they must have the same batch size and length"
            )
    first = _checked_mask(mask, fwd_params, bwd_params)
    layout = attention_layout(mesh)
    sharding = layout.sharding

    row_masks = first.row_masks
    if row_masks is None:
        row_masks = row_masks_of(tokens, layout)
    shards = layout.size(layout.context)
    permuted = bool(permute_tokens_for_load_balance) and shards > 1
    rows = _rows(row_masks, tokens, bool(assume_sequential_positions), permuted)
    by_plan = isinstance(rows, ContextMask) and rows.permuted
    if by_plan:
        if not permute_tokens_for_load_balance:
            raise ValueError(
                "permute_tokens_for_load_balance must be True if the mask was made with a plan: "
                "its queries are permuted"
            )
        sharding = rows.sharding
    elif permuted:
        rows = ContextMask.of(rows, kv_plan=_order_of_keys(key.shape[1], shards, layout))
    own = key.shape[1] == query.shape[1] and not layout.explicit
    if own and shards > 1 and not by_plan:
        # In self-attention, keys are computed on the rank that has the rows of their tokens.
        sharding = gathered(layout)
    rows = ContextMask.of(rows, sharding=sharding)
    return packax.flash_attention(
        query, key, value, rows, scale=scale, checkpoint_name=CHECKPOINT_NAME
    )


def _checked_mask(
    mask: Any,
    fwd_params: FlashAttentionParamsConfig | None,
    bwd_params: FlashAttentionParamsConfig | None,
) -> AttentionMask:
    """Validates the mask tuple and returns the mask of the forward pass."""
    if not isinstance(mask, (tuple, list)) or not all(isinstance(x, AttentionMask) for x in mask):
        raise ValueError(
            "mask must be the tuple that packax.kvax.ops.create_attention_mask returned, but is "
            f"{type(mask).__name__}"
            + (
                f" of {', '.join(type(x).__name__ for x in mask)}"
                if isinstance(mask, (tuple, list))
                else ""
            )
        )
    if len(mask) not in (1, 3):
        raise ValueError(
            "mask must hold one AttentionMask (forward) or three (forward, dQ, dK/dV), but holds "
            f"{len(mask)}"
        )
    unset = FlashAttentionParamsConfig()
    wanted = block_sizes(fwd_params or unset, bwd_params or unset)
    given = (fwd_params is not None, bwd_params is not None, bwd_params is not None)
    names = ("fwd_params", "bwd_params", "bwd_params")
    for name, part, asked, sizes in zip(names, mask, given, wanted, strict=False):
        if asked and part.block_sizes not in (None, sizes):
            raise ValueError(
                f"{name} has blocks of {sizes[0]} queries and {sizes[1]} keys, but the mask was "
                f"made with {part.block_sizes[0]} and {part.block_sizes[1]}: pass the same to both "
                "calls"
            )
    return mask[0]


def _rows(
    row_masks: RowMasks, tokens: Tokens, by_index: bool, permuted: bool
) -> packax.AttentionMask:
    if not by_index:
        return row_masks.by_position
    if not permuted:
        return row_masks.by_index
    if row_masks.by_permuted_index is None:
        raise ValueError(
            f"permute_tokens_for_load_balance needs a mask whose queries can be permuted, but "
            f"{tokens.query_segment_ids.shape[1]} queries are not a multiple of twice the context "
            "axis, or the mask was made without that axis"
        )
    return row_masks.by_permuted_index


def _order_of_keys(length: int, shards: int, layout: Layout) -> jax.Array:
    """(1, 2, chunks): packax's `kv_plan` for keys that are already permuted."""
    plan = head_tail_plan(2 * shards, length)
    order = jnp.stack([jnp.asarray(plan.order), jnp.asarray(plan.inverse)], axis=1)
    return layout.place(order)
