"""Finds batches, masks and expressions whose arrays a plan has permuted, or has not.

`check_plan`, enabled by `debug_checks`, compares batch and mask. The other checks always run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.load_balance import ContextPlan, checksum, take_chunks, whole_rows
from packax._src.core.arguments import described
from packax._src.core.context_mask import ContextMask
from packax._src.core.debug import enabled, report_when_run
from packax._src.core.mask import AttentionMask
from packax._src.core.provenance import is_permuted
from packax._src.core.sharding import UNSHARDED, Layout, layout_of
from packax._src.segments.ids import positions as token_positions

_PADDING = -1  # segment id of padding
TWICE = (
    "the ids in the mask's expression were already permuted by the plan, and the mask permutes "
    "them again: make the expression from ids in the order of the sequence. For masks of several "
    "kinds, pass all their expressions to one call of packax.context.shard_batch"
)


def check_plan(
    mask: AttentionMask,
    *,
    segment_ids: Any = None,
    positions: Any = None,
    plan: ContextPlan | None = None,
) -> None:
    """Under `debug_checks`: raises if the batch is not in the order of the mask's queries.

    It says what went wrong: the batch was not permuted, the mask was built without the plan, or the
    ids of the expression were already permuted. While the checks are off it does nothing, and adds
    nothing to the compiled program. Call it once per step, with the segment ids and positions of
    the tokens from which query is computed.

    Args:
        mask: from `create_attention_mask` for self-attention, with or without sharding and plan.
        segment_ids: the batch's segment ids in its current order, (B, S) integers.
        positions: each token's position, from 0 in the row or in its document, in the batch's
            current order: (B, S) integers. Without them an unpermuted batch and permuted ids look
            the same, and tokens of one document cannot be told apart.
        plan: the `ContextPlan`, if the mask was built with permuted_keys=False or without the plan,
            because then the mask does not store it.

    Raises:
        ValueError: the batch is in another order, and the checks are on. Inside jit it is raised in
            the thread that traced the function, once the program has run that far; the program
            itself continues, so that no device waits for another. If jax runs a small program in
            that same thread, it wraps the error (`jax.errors.JaxRuntimeError`). It is also raised
            for wrong shapes or types of arguments.

    Examples:
        >>> packax.context.check_plan(mask, segment_ids=segment_ids)
    """
    if not enabled():
        return
    if not isinstance(mask, AttentionMask):
        raise ValueError(f"mask must come from create_attention_mask, but is {described(mask)}")
    mask = ContextMask.of(mask).with_batch()
    if segment_ids is None and positions is None:
        raise ValueError("pass the batch's segment_ids, its positions, or both")
    if plan is not None and not isinstance(plan, ContextPlan):
        raise ValueError(f"plan must come from context_plan, but is {described(plan)}")
    if plan is not None and plan.length != mask.q_len:
        raise ValueError(f"plan was made for {plan.length} queries, but the mask has {mask.q_len}")
    if mask.permuted and mask.kv_plan is None and plan is None:
        raise ValueError("pass plan=: a mask built with permuted_keys=False does not store it")
    rows = mask.kv_start.shape[1]
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
        if x is not None and (np.ndim(x) != 2 or np.shape(x)[1] != rows):
            raise ValueError(
                f"{name} must have shape (batch, {rows}), the queries of the mask, but has "
                f"{np.shape(x)}"
            )

    def whole(x: Any) -> Any:
        """x for the whole sequence, even if the caller is in a shard_map over the context axes."""
        if x is None or layout.outside(layout.context) == 1:
            return x
        return jax.lax.all_gather(jnp.asarray(x), layout.context, axis=1, tiled=True)

    layout = UNSHARDED if mask.sharding is None else layout_of(mask.sharding)
    order = plan.order if plan is not None else None
    if mask.kv_plan is not None:
        order = mask.kv_plan[:, 0]
    held = [whole(mask.q_ids), order, whole(segment_ids), whole(positions)]
    if any(isinstance(x, jax.core.Tracer) for x in held):
        report_when_run(functools.partial(_check, mask.permuted), held, layout)
    else:
        _check(mask.permuted, *held)


def _check(permuted: bool, mask_ids: Any, order: Any, ids: Any, positions: Any) -> None:
    """Checks all rows of the batch, on the host."""
    held = [None if x is None else np.asarray(x) for x in (mask_ids, order, ids, positions)]
    batch = max(x.shape[0] for x in held if x is not None)
    for row in range(batch):
        of_row = (None if x is None else x[row if x.shape[0] > 1 else 0] for x in held)
        wrong = _wrong(permuted, *of_row)
        if wrong is not None:
            raise ValueError(f"packax.context.check_plan: in row {row} of the batch {wrong}")


def _wrong(permuted: bool, mask_ids: Any, order: Any, ids: Any, positions: Any) -> str | None:
    """What is wrong with a row of the batch, or None.

    mask_ids: the segment ids of the mask's rows, in the mask's order. order: the plan's chunks.
    """
    length = len(positions if ids is None else ids)
    unmoved = np.arange(length)
    moved = unmoved
    if order is not None:
        moved = (order[:, None] * (length // len(order)) + np.arange(length // len(order))).ravel()
    of_mask = moved if permuted else unmoved

    def is_batch(sequence: Any, rows: Any) -> bool:
        """Whether the batch is this sequence, given by its segment ids, in this row order."""
        if ids is not None and sequence is not None and not np.array_equal(ids, sequence[rows]):
            return False
        if positions is None:
            return True
        tokens = slice(None) if sequence is None else sequence[rows] != _PADDING
        counted = _positions_of(length, sequence)
        return any(np.array_equal(positions[tokens], x[rows][tokens]) for x in counted)

    sequence = mask_ids  # becomes the ids in the order of the sequence
    if mask_ids is not None:
        sequence = np.empty_like(mask_ids)
        sequence[of_mask] = mask_ids
    if is_batch(sequence, of_mask):
        return None
    if permuted:
        forgotten = is_batch(sequence, unmoved)
        before = None  # the original ids, if those of the expression were already permuted
        if sequence is not None:
            before = np.empty_like(sequence)
            before[moved] = sequence
        twice = sequence is not None and is_batch(before, moved)
        unpermuted = (
            "the batch was not permuted, but the mask was built with a plan: "
            "use plan.permute(batch)"
        )
        if forgotten and twice:
            return f"either {unpermuted}; or {TWICE}. Pass positions= to find out which"
        if forgotten or twice:
            return unpermuted if forgotten else TWICE
    elif is_batch(sequence, moved) or (order is None and _rearranged(mask_ids, ids, positions)):
        return (
            "the batch was permuted, but the mask was built without a plan: pass plan= to "
            "create_attention_mask"
        )
    place = 0
    if ids is not None and mask_ids is not None and (ids != mask_ids).any():
        place = int(np.argmax(ids != mask_ids))
        return (
            "the segment ids do not match the mask in any order that a plan could give: token "
            f"{place} has id {ids[place]}, and the mask has {mask_ids[place]} there"
        )
    return (
        "positions do not fit the order of the mask's queries: they must count the tokens from 0, "
        "in the row or in each document, and be permuted with the batch"
    )


def _rearranged(mask_ids: Any, ids: Any, positions: Any) -> bool:
    """Whether the batch has the tokens of the mask, in any order."""
    if ids is not None and mask_ids is not None and (np.sort(ids) != np.sort(mask_ids)).any():
        return False
    if positions is None:
        return True
    tokens = slice(None) if ids is None else ids != _PADDING
    counted = _positions_of(len(positions), mask_ids)
    mask_tokens = slice(None) if ids is None or mask_ids is None else mask_ids != _PADDING
    return any(np.array_equal(np.sort(positions[tokens]), np.sort(x[mask_tokens])) for x in counted)


def _positions_of(length: int, ids: Any) -> list[Any]:
    """The positions that a batch may have: each token's index in the row, in its run of equal ids,
    and among all tokens with its id."""
    index = np.arange(length)
    if ids is None:
        return [index]
    begins = np.concatenate([[True], ids[1:] != ids[:-1]])
    in_run = index - np.maximum.accumulate(np.where(begins, index, 0))
    return [index, in_run, token_positions(ids)]


# --- Expressions made from arrays that a plan has already permuted.
#
# A mask with a plan permutes the arrays of its expression, so they must be in the order of the
# sequence. Arrays that `ContextPlan.permute` returned are known by identity, and permuted segment
# ids by the checksum that the plan stores.


def check_in_order(arrays: list[tuple[str, Any, str]]) -> None:
    """Raises if a plan has permuted an array of an expression for which another plan is made."""
    for name, x, _ in arrays:
        if is_permuted(x):
            raise ValueError(
                f"{name} of the expression was already permuted by a plan, but a plan needs it in "
                "the order of the sequence: make the expression from arrays in that order. For "
                "masks of several kinds, pass all their expressions to one call of "
                "packax.context.shard_batch"
            )


def check_has_plan(document: Any) -> None:
    """Raises if a mask without a plan compares the indices of documents that a plan permuted."""
    if is_permuted(document.q_ids) and document.q_pos is None and document.kv_ids is None:
        raise ValueError(
            "segment_ids of the expression were permuted by a plan, but the mask has no plan and "
            "compares indices: make the expression from ids in the order of the sequence and pass "
            "plan= to create_attention_mask, or pass positions= to documents"
        )


def check_ids(plan: ContextPlan, ids: Any, layout: Layout) -> None:
    """Raises if the plan has permuted these segment ids, (length,) or (B, length).

    Values are compared if they are known, and otherwise under `debug_checks`, when the program
    runs.
    """
    if plan.checksum is None or not plan.moves:
        return
    arrays = (plan.checksum, plan.inverse, ids)
    traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    if traced and enabled():
        report_when_run(_raise, [_on_device(*arrays)], layout)
    elif not traced and all(getattr(x, "is_fully_addressable", True) for x in arrays):
        _raise(_is_permuted_by(np, *map(np.asarray, arrays)))


def _raise(twice: Any) -> None:
    rows = np.flatnonzero(np.asarray(twice))
    if rows.size:
        raise ValueError(f"in row {rows[0]} of the batch {TWICE}")


def _is_permuted_by(xp: Any, of_plan: Any, inverse: Any, ids: Any) -> Any:
    """(B,) bool: whether the plan was made from the ids that `inverse` makes from these."""
    ids = xp.atleast_2d(ids)
    if xp is jnp:
        ids, inverse, of_plan = (whole_rows(jnp.asarray(x)) for x in (ids, inverse, of_plan))
    batch = max(len(ids), len(inverse))
    of_mask = checksum(ids)
    before = checksum(take_chunks(inverse, 1, xp.broadcast_to(ids, (batch, ids.shape[1]))))
    return (of_mask != of_plan) & (before == of_plan)


_on_device = jax.jit(functools.partial(_is_permuted_by, jnp), inline=True)
