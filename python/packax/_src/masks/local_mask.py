"""The masks of a "local" plan: one for each rank's private keys, and one for each shared part.

A row belongs to one part: the one shared by the ranks that have rows of its document, or the
private part. A limit that is an index into the sequence becomes the number of the part's keys
before that index, so an interval stays an interval, restricted to the part's keys. In the mask of a
part, rows and keys outside the part have the padding id. The keys of a shared part are in the order
of the sequence, and each document ends at the end of a tile, as its rows do, so that a tile of rows
reads as few tiles of keys as possible. Private keys have the order of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.all_gather_kv import as_gathered, piece
from packax._src.context.load_balance import ContextPlan, checksum, take_each
from packax._src.core.arguments import plus
from packax._src.core.context_mask import ContextMask
from packax._src.core.sharding import Layout, vary_together
from packax._src.core.spec import PADDING_SEGMENT_ID, TILE, MaskMode
from packax._src.masks.rank_rows import RankRows
from packax._src.masks.row_ranges import Document, Rows, row_ranges_and_bounds
from packax._src.ops.primitives import BLOCK_ARRAYS


class _Keys(NamedTuple):
    """The keys of a part."""

    index: Any  # (B, n): indices into the sequence
    ids: Any  # segment ids; -1: not in the part
    number: Callable[[Any], Any]  # from an index into the sequence to the number of keys before it
    orders: Any = None  # (B, 2, n): the permutation of the gathered keys, and its inverse


def keeps_local(ranks: RankRows, document: Document) -> bool:
    """Whether ranks gather only the shared keys. Needs a "local" plan, keys that are sharded, and
    documents without separate ids for keys."""
    plan, layout = ranks.plan, ranks.layout
    if plan is None or plan.split is None or plan.checksum is None:
        return False
    documents = document.q_ids is not None and document.kv_ids is None
    return documents and layout.size(layout.kv_context) > 1


def local_parts(ranks: RankRows, sequences: Rows, positions: Any, mode: MaskMode) -> dict[str, Any]:
    """The fields `shared_parts` and `private_part` of a mask, and `plan_mismatch` unless the plan
    is known to match the ids.

    sequences, positions: of all tokens.
    """
    plan, layout = ranks.plan, ranks.layout
    assert plan is not None
    pieces, own = plan.ranks, plan.length // plan.ranks
    context = layout.context
    # For each part: its index, the number of groups in which its keys are gathered, its rows per
    # rank, and the first context axis of each of its gathers.
    parts = [
        (n, groups, rows, gathers_of(layout, plan, groups))
        for n, (groups, rows) in enumerate(plan.parts)
        if rows > 0
    ]

    def of_rank(sequences: Rows, positions: Any, order: Any, split: Any) -> Any:
        ids = sequences.ids
        assert ids is not None
        implementation = ranks.static.implementation
        of_part = functools.partial(_of_part, sequences, positions, mode, implementation)
        batch = order.shape[0]
        order, split = order.reshape(batch, pieces, own), split.reshape(batch, pieces, -1)
        begin = jnp.concatenate([jnp.zeros_like(split[..., :1]), split], axis=2)
        place = jnp.arange(own, dtype=jnp.int32)
        masks = []
        mine, first = (piece(x, context, layout) for x in (order, begin))
        mine, first = mine[:, 0], first[:, 0]
        my_ids = take_each(ids, mine)
        for n, _, rows, starts in parts:
            of_group, ends = (
                piece(x, context[: starts[0]] if starts else context, layout)
                for x in (order[..., :rows], begin)
            )
            inside = (ends[..., n, None] <= place[:rows]) & (place[:rows] < ends[..., n + 1, None])
            of_group, inside = (as_gathered(x, layout, starts) for x in (of_group, inside))
            keys = _in_order(ids, of_group, inside)
            in_part = (first[:, n, None] <= place[:rows]) & (place[:rows] < first[:, n + 1, None])
            row_ids = jnp.where(in_part, my_ids[:, :rows], PADDING_SEGMENT_ID)
            masks.append(of_part(row_ids, mine[:, :rows], keys))
        private = jnp.broadcast_to(place >= first[:, -1:], my_ids.shape)
        my_ids = jnp.where(private, my_ids, PADDING_SEGMENT_ID)
        before = _number_before(mine, private, ids.shape[1]) + first[:, -1:]
        number = functools.partial(_number, before)
        masks.append(of_part(my_ids, mine, _Keys(mine, my_ids, number)))
        return masks

    def specs_of(starts: tuple[int, ...]) -> dict[str, Any]:
        names = ["kv_start", "kv_end", *BLOCK_ARRAYS, "q_ids", "kv_ids"]
        names += ["q_pos", "kv_pos"] if mode >= MaskMode.UPPER_LIMIT else []
        return {x: ranks.spec(x, mode, gathers=starts) for x in names}

    def of_shared(starts: tuple[int, ...]) -> dict[str, Any]:
        kv_plan = ranks.spec("kv_plan", mode, gathers=starts, batch=ranks.plan_batch)
        return specs_of(starts) | {"kv_plan": kv_plan}

    whole, orders = layout.spec(ranks.mask_batch), layout.spec(ranks.plan_batch)
    specs = [of_shared(starts) for *_, starts in parts] + [specs_of(())]
    run = layout.shard_map(of_rank, (whole, whole, orders, orders), specs)
    operands = jax.tree.map(ranks.keys, (sequences, positions))
    *made, private = run(*operands, plan.order, plan.split)
    build: Any = functools.partial(
        ContextMask, mask_mode=mode, sharding=ranks.static.sharding, shards=pieces, permuted=True
    )
    unset = dict.fromkeys(("q_pos", "kv_pos"))
    found: dict[str, Any] = {
        "private_part": build(**unset | private, q_len=plan.length, kv_len=own, gathers=()),
        "shared_parts": tuple(
            build(
                **unset | arrays,
                q_len=pieces * rows,
                kv_len=pieces // groups * rows,
                gathers=starts,
            )
            for arrays, (_, groups, rows, starts) in zip(made, parts, strict=True)
        ),
    }
    if not ranks.static.of_plan:
        of_mask, of_plan = vary_together(checksum(sequences.ids), plan.checksum)
        found["plan_mismatch"] = (of_mask != of_plan).astype(jnp.int32)
    return found


def gathers_of(layout: Layout, plan: ContextPlan, groups: int) -> tuple[int, ...]:
    """The index of the first context axis of each gather of a part, the outermost first."""
    axes = layout.context
    before = [layout.size(axes[:n]) for n in range(len(axes))]
    outside = [plan.ranks // (step.size * step.stride) for step in plan.steps(groups)]
    if any(number not in before for number in outside):
        raise ValueError(
            f"plan was made for levels of {plan.levels} ranks, but the context axes of sharding, "
            f"{axes}, have sizes {tuple(layout.size((axis,)) for axis in axes)}"
        )
    return tuple(before.index(number) for number in outside)


def made_of(plan: ContextPlan | None, ids: Any) -> bool | None:
    """Whether the plan was made from these segment ids, (B or 1, length). None: the program must
    check it, because ids or plan are not numpy arrays."""
    if plan is None or plan.split is None:
        return None
    if not isinstance(plan.checksum, np.ndarray) or not isinstance(ids, np.ndarray):
        return None
    return bool((checksum(np.atleast_2d(ids)) == plan.checksum).all())


def _of_part(
    sequences: Rows, positions: Any, mode: MaskMode, implementation: Any,
    ids: jax.Array, index: jax.Array, keys: _Keys,
) -> dict[str, Any]:  # fmt: skip
    """The arrays of a part's mask, for the rows with these ids at these indices of sequences."""
    _, low, high, ranges = jax.tree.map(lambda x: take_each(x, index), sequences)
    if mode < MaskMode.UPPER_LIMIT:  # positions are indices
        low = None if low is None else keys.number(low)
        high = None if high is None else keys.number(plus(high, 1)) - 1
    row_values = Rows(ids, low, high, jax.tree.map(keys.number, ranges))
    computed: dict[str, Any] = {"q_ids": ids, "kv_ids": keys.ids}
    if keys.orders is not None:
        computed["kv_plan"] = keys.orders
    if mode >= MaskMode.UPPER_LIMIT:
        computed["kv_pos"] = take_each(positions, keys.index)
    return computed | row_ranges_and_bounds(
        row_values,
        computed["kv_ids"],
        computed.get("kv_pos"),
        mode=mode,
        batch=ids.shape[0],
        q_len=ids.shape[1],
        kv_len=keys.index.shape[1],
        implementation=implementation,
    )


def _in_order(ids: jax.Array, index: jax.Array, inside: jax.Array) -> _Keys:
    """Orders the gathered keys at these indices; those `inside` are the part's.

    The other keys pad documents at their start, so that each document ends at the end of a tile.
    Those that are left come last.
    """
    size = index.shape[1]
    before = _number_before(index, inside, ids.shape[1])
    number = inside.sum(axis=1, keepdims=True, dtype=jnp.int32)
    rest = jnp.cumsum(~inside, axis=1, dtype=jnp.int32) - 1
    # First the part's keys in the order of the sequence, then the others.
    sorted_ = _inverse(jnp.where(inside, take_each(before, index), number + rest))
    place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), sorted_.shape)
    in_part = place < number
    of_key = take_each(ids, take_each(index, sorted_))
    begins = in_part & jnp.concatenate(
        [jnp.ones_like(in_part[:, :1]), of_key[:, 1:] != of_key[:, :-1]], axis=1
    )
    next_begin = jnp.where(begins, place, jnp.broadcast_to(number, place.shape))
    next_begin = jnp.concatenate([next_begin[:, 1:], number], axis=1)
    end = jax.lax.cummin(next_begin, axis=1, reverse=True)
    gaps = jnp.cumsum(jnp.where(begins, (place - end) % TILE, 0), axis=1, dtype=jnp.int32)
    most = jnp.where(begins & (gaps <= size - number), gaps, 0)
    gaps = jax.lax.cummax(most, axis=1)  # at most the number of other keys
    slot = place + gaps
    taken, slot, ones = vary_together(jnp.zeros_like(place), slot, in_part.astype(jnp.int32))
    drop = jnp.where(in_part, slot, size)
    taken = jax.vmap(lambda x, at, y: x.at[at].set(y, mode="drop"))(taken, drop, ones)
    part = jnp.cumsum(taken, axis=1, dtype=jnp.int32)
    order = jnp.where(taken > 0, part - 1, number + place - part)
    order = take_each(sorted_, order)
    orders = jnp.stack([_inverse(order), order], axis=1)
    index = take_each(index, order)
    end = number + gaps[:, -1:]
    slot = jnp.concatenate([jnp.where(in_part, slot, end), end], axis=1)
    key_ids = jnp.where(taken > 0, take_each(ids, index), PADDING_SEGMENT_ID)
    return _Keys(index, key_ids, functools.partial(_number, take_each(slot, before)), orders)


def _number(before: jax.Array, x: Any) -> jax.Array:
    return take_each(before, jnp.clip(x, 0, before.shape[1] - 1))


def _number_before(index: jax.Array, inside: jax.Array, length: int) -> jax.Array:
    """(B, length + 1): for each n, how many of the distinct indices `inside` are less than n."""
    zeros, index, inside = vary_together(
        jnp.zeros((index.shape[0], length + 1), jnp.int32), index, inside.astype(jnp.int32)
    )

    def one(zeros: jax.Array, index: jax.Array, inside: jax.Array) -> jax.Array:
        return zeros.at[index + 1].set(inside, unique_indices=True)

    return jnp.cumsum(jax.vmap(one)(zeros, index, inside), axis=1, dtype=jnp.int32)


def _inverse(order: jax.Array) -> jax.Array:
    """(B, n): the inverse of each permutation."""
    number = jnp.broadcast_to(jnp.arange(order.shape[1], dtype=jnp.int32), order.shape)
    zeros, number, order = vary_together(jnp.zeros_like(order), number, order)
    return jax.vmap(lambda x, at, y: x.at[at].set(y, unique_indices=True))(zeros, order, number)
