"""Finds expressions made from arrays that a plan has already permuted.

A mask with a plan permutes the arrays of its expression, so they must be in the order of the
sequence. Arrays that `ContextPlan.permute` returned are known by identity, and permuted segment ids
by the checksum that the plan stores.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.load_balance import ContextPlan, checksum, take_chunks, whole_rows
from packax._src.context.plan_check import TWICE
from packax._src.core.debug import enabled, report_when_run
from packax._src.core.provenance import is_permuted
from packax._src.core.sharding import Layout


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
        twice = _is_permuted_by(*arrays)
        report_when_run(_raise, [twice], layout)
    elif not traced and all(getattr(x, "is_fully_addressable", True) for x in arrays):
        _raise(_is_permuted_by(*map(np.asarray, arrays)))


def _raise(twice: Any) -> None:
    rows = np.flatnonzero(np.asarray(twice))
    if rows.size:
        raise ValueError(f"in row {rows[0]} of the batch {TWICE}")


def _is_permuted_by(of_plan: Any, inverse: Any, ids: Any) -> Any:
    """(B,) bool: whether the plan was made from the ids that `inverse` makes from these."""
    traced = any(isinstance(x, jax.Array) for x in (of_plan, inverse, ids))
    return (_on_device if traced else functools.partial(_compare, np))(of_plan, inverse, ids)


def _compare(xp: Any, of_plan: Any, inverse: Any, ids: Any) -> Any:
    ids = xp.atleast_2d(ids)
    if xp is jnp:
        ids, inverse, of_plan = (whole_rows(jnp.asarray(x)) for x in (ids, inverse, of_plan))
    batch = max(len(ids), len(inverse))
    of_mask = checksum(ids)
    before = checksum(take_chunks(inverse, 1, xp.broadcast_to(ids, (batch, ids.shape[1]))))
    return (of_mask != of_plan) & (before == of_plan)


_on_device = jax.jit(functools.partial(_compare, jnp), inline=True)
