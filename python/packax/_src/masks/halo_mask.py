"""The masks of a rank that fetches halos: one for rows that need only local keys, one for the rest.

All keys of a row are in one stretch of the rank's keys, so its range is that of the whole sequence,
shifted. If windows compare the positions of documents, this holds only if positions neither
decrease nor repeat inside a document; otherwise all keys are needed. The program checks this at run
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.fetch_halos import index
from packax._src.context.halo import Halo, Stretch
from packax._src.context.load_balance import ContextPlan, take_each
from packax._src.core.context_mask import ContextMask
from packax._src.core.sharding import Layout, vary_together
from packax._src.core.spec import MaskMode
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.rank_rows import RankRows
from packax._src.masks.row_ranges import bounds_of
from packax._src.ops.primitives import BLOCK_ARRAYS


class Halos(NamedTuple):
    """The halos of a mask."""

    halo: Halo
    known: bool  # whether the halos certainly contain all attended keys, else checked at run time


def halos_of(
    expression: MaskExpression, plan: ContextPlan | None, layout: Layout,
    q_len: Any, kv_len: Any, permuted_keys: Any,
) -> Halos | None:  # fmt: skip
    """The halos for a mask with these arguments; None: ranks gather all keys."""
    if layout.size(layout.kv_context) == 1 or q_len != kv_len:
        return None
    if not isinstance(q_len, int) or (plan is not None and not permuted_keys):
        return None
    ranks = layout.size(layout.context)
    for known, of in ((True, expression), (False, expression.without_positions())):
        if plan is not None:
            halo = plan.halo(of)
        else:
            halo = Halo.of(of, "in order", ranks, q_len, q_len // ranks)
        if halo is not None:
            return Halos(halo, known)
    return None


def halo_parts(
    halos: Halos, ranks: RankRows, numbers: jax.Array, ids: Any, kv_ids: Any
) -> Callable[..., dict[str, Any]]:
    """A function from the ranges of a rank's rows to the arrays of its parts.

    numbers: the indices in the sequence of the rank's chunks, (1 or B, chunks).
    """
    halo = halos.halo

    def of(stretch: Stretch, lo: Any, hi: Any, checked: Any) -> tuple[dict[str, Any], Any]:
        numbers_, lo, hi, checked = vary_together(numbers, lo, hi, checked)
        first = (numbers_ * halo.chunk - stretch.before)[:, :, None]
        slot = (jnp.arange(halo.chunks, dtype=jnp.int32) * stretch.keys)[None, :, None]

        def rows(x: Any) -> Any:
            return x.reshape(len(x), halo.chunks, halo.chunk)[:, :, : stretch.rows]

        lo, hi, checked = rows(lo) - first, rows(hi) - first, rows(checked)
        attends = (lo < hi) & (jnp.arange(stretch.rows)[None, None] >= stretch.first)
        outside = attends & ((lo < 0) | (hi > stretch.keys) | (checked != 0))
        lo, hi = (jnp.clip(x, 0, stretch.keys) for x in (lo, hi))
        moved = (jnp.where(attends & (lo < hi), x, 0) for x in (lo + slot, hi + slot, checked))
        lo, hi, checked = (x.reshape(len(x), -1) for x in moved)
        arrays = {"kv_start": lo, "kv_end": hi}
        if halos.known and ids is not None:
            arrays["q_ids"] = rows(ids).reshape(len(ids), -1)
            arrays["kv_ids"] = take_each(kv_ids, index(halo, stretch, numbers))
        kv_len, implementation = halo.chunks * stretch.keys, ranks.static.implementation
        arrays |= bounds_of(lo, hi, checked, kv_len, implementation)
        return arrays, outside.any()

    def parts(*ranges: Any) -> dict[str, Any]:
        arrays, outside = zip(*(of(stretch, *ranges) for _, stretch in halo.parts), strict=True)
        computed: dict[str, Any] = {"parts": list(arrays)}
        if not halos.known:
            suffice = 1 - functools.reduce(jnp.logical_or, outside).astype(jnp.int32)
            # All devices must take the same branch, even those to which the caller's shard_map
            # gives other batch rows: a collective waits for all of them.
            layout = ranks.layout
            axes = (*ranks.mask_batch, *layout.context, *sorted(layout.manual))
            axes = tuple(dict.fromkeys(axes))
            suffice, _ = vary_together(suffice, jax.lax.axis_index(axes))
            computed["halos_suffice"] = jax.lax.pmin(suffice, axes)[None]
        return computed

    return parts


def specs_of(halos: Halos, ranks: RankRows, mode: MaskMode) -> dict[str, Any]:
    """The PartitionSpecs of the arrays that `halo_parts` computes."""
    names = ["kv_start", "kv_end", *BLOCK_ARRAYS]
    if halos.known and mode >= MaskMode.IDS:
        names += ["q_ids", "kv_ids"]
    of = {x: ranks.spec(x, mode, gathers=()) for x in names}
    found: dict[str, Any] = {"parts": [of for _ in halos.halo.parts]}
    return found if halos.known else found | {"halos_suffice": ranks.layout.spec()}


def masks_of(
    halos: Halos, ranks: RankRows, mode: MaskMode, made: list[dict[str, Any]]
) -> dict[str, Any]:
    """The fields `private_part`, `shared_parts` and `halo` of a mask."""
    halo = halos.halo
    private, *shared = (
        ContextMask(
            **{"q_ids": None, "kv_ids": None} | arrays,
            q_pos=None,
            kv_pos=None,
            q_len=ranks.static.q_len // halo.chunk * stretch.rows,
            kv_len=halo.chunks * stretch.keys,
            mask_mode=mode if halos.known else MaskMode.NO_CHECK,
            row_keys=ranks.static.row_keys,
            sharding=ranks.static.sharding,
            shards=ranks.pieces,
            permuted=ranks.plan is not None,
            gathers=(),
        )
        for arrays, (_, stretch) in zip(made, halo.parts, strict=True)
    )
    return {"private_part": private, "shared_parts": tuple(shared), "halo": tuple(halo)}
