"""The masks of a rank that fetches halos: of rows that attend to its own keys, and of the others.

Row ranges are those of whole sequences, moved: a row's keys are all of one stretch of the rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.context.fetch_halos import index, take_each
from packax._src.context.halo import Halo, Stretch
from packax._src.context.load_balance import ContextPlan
from packax._src.core.mask import AttentionMask, dims_of
from packax._src.core.sharding import Layout, vary_together
from packax._src.core.spec import MaskMode
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.rank_rows import RankRows
from packax._src.masks.row_ranges import bounds_of
from packax._src.ops.primitives import BLOCK_ARRAYS


def halo_of(
    expression: MaskExpression, plan: ContextPlan | None, layout: Layout | None,
    q_len: Any, kv_len: Any, permuted_keys: Any,
) -> Halo | None:  # fmt: skip
    """The keys that ranks fetch for such a mask; None: all."""
    if layout is None or layout.size(layout.kv_context) == 1 or q_len != kv_len:
        return None
    if not isinstance(q_len, int) or (plan is not None and not permuted_keys):
        return None
    if plan is not None:
        return plan.halo(expression)
    ranks = layout.size(layout.context)
    return Halo.of(expression, "in order", ranks, q_len, q_len // ranks)


def halo_parts(
    halo: Halo, numbers: jax.Array, ids: Any, kv_ids: Any, implementation: Any
) -> Callable[..., dict[str, Any]]:
    """What makes the arrays of a rank's parts, from the ranges of its rows. numbers: of its
    chunks, (1 or B, chunks)."""

    def of(stretch: Stretch, lo: Any, hi: Any, checked: Any) -> dict[str, Any]:
        numbers_, lo, hi, checked = vary_together(numbers, lo, hi, checked)
        first = (numbers_ * halo.chunk - stretch.before)[:, :, None]
        slot = (jnp.arange(halo.chunks, dtype=jnp.int32) * stretch.keys)[None, :, None]

        def rows(x: Any) -> Any:
            return x.reshape(len(x), halo.chunks, halo.chunk)[:, :, : stretch.rows]

        lo, hi = (jnp.clip(rows(x) - first, 0, stretch.keys) for x in (lo, hi))
        there = (lo < hi) & (jnp.arange(stretch.rows)[None, None] >= stretch.first)
        moved = (jnp.where(there, x, 0) for x in (lo + slot, hi + slot, rows(checked)))
        lo, hi, checked = (x.reshape(len(x), -1) for x in moved)
        made = {"kv_start": lo, "kv_end": hi}
        if ids is not None:
            made["q_ids"] = rows(ids).reshape(len(ids), -1)
            made["kv_ids"] = take_each(kv_ids, index(halo, stretch, numbers))
        kv_len = halo.chunks * stretch.keys
        return made | bounds_of(lo, hi, checked, kv_len, implementation)

    def parts(*ranges: Any) -> dict[str, Any]:
        return {"parts": [of(stretch, *ranges) for _, stretch in halo.parts]}

    return parts


def specs_of(halo: Halo, ranks: RankRows, mode: MaskMode) -> list[dict[str, Any]]:
    """Of those arrays."""
    assert ranks.layout is not None
    names = [
        "kv_start",
        "kv_end",
        *BLOCK_ARRAYS,
        *(["q_ids", "kv_ids"] if mode >= MaskMode.IDS else []),
    ]
    axes, layout = ranks.mask_batch, ranks.layout
    of = {x: layout.spec(*dims_of(x, (), mode, axes, layout.context)) for x in names}
    return [of for _ in halo.parts]


def masks_of(
    halo: Halo,
    made: list[dict[str, Any]],
    mode: MaskMode,
    q_len: int,
    sharding: Any,
    ranks: RankRows,
) -> dict[str, Any]:
    """`private_part`, `shared_parts` and `halo` of a mask."""
    private, *shared = (
        AttentionMask(
            **{"q_ids": None, "kv_ids": None} | arrays,
            q_pos=None,
            kv_pos=None,
            q_len=q_len // halo.chunk * stretch.rows,
            kv_len=halo.chunks * stretch.keys,
            mask_mode=mode,
            sharding=sharding,
            shards=ranks.pieces,
            permuted=ranks.plan is not None,
            gathers=(),
        )
        for arrays, (_, stretch) in zip(made, halo.parts, strict=True)
    )
    return {"private_part": private, "shared_parts": tuple(shared), "halo": tuple(halo)}
