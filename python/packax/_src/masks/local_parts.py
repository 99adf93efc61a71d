"""The masks of a plan that keeps documents local: of each rank's own keys, and of shared ones.

The keys of each are a part of the sequence, in its order. A limit that is an index of the sequence
becomes the number of the part's keys before it, so an interval stays an interval, and holds the
part's keys of the interval it was, no others. Ids say the rest: a row has no id in the mask that is
not about its document, and so attends nothing there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.load_balance import ContextPlan
from packax._src.core.integers import plus
from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import AttentionMask, of_own_keys
from packax._src.core.shapes import PADDING_SEGMENT_ID
from packax._src.masks.rank_rows import RankRows
from packax._src.masks.row_ranges import Document, Rows, row_ranges_and_bounds
from packax._src.ops.primitives import BLOCK_ARRAYS
from packax._src.ops.xla_mask import HASH_MULTIPLIER, table_size

_MOST = jnp.iinfo(jnp.int32).max


def keeps_local(ranks: RankRows, document: Document) -> bool:
    """Whether gathering the shared keys alone is known to be enough.

    Not without documents, with other ids of keys, nor where every rank has all keys.
    """
    plan, layout = ranks.plan, ranks.layout
    if plan is None or plan.shared is None or layout is None:
        return False
    if document.q_ids is None or document.kv_ids is not None:
        return False
    gathered = layout.size(layout.kv_context) > 1
    return gathered and plan.shared < plan.length // plan.ranks


def local_parts(
    ranks: RankRows,
    document: Document,
    low: Any,
    high: Any,
    ranges: tuple[tuple[Any, Any], ...],
    *,
    level: int,
    implementation: Any,
    sharding: Any,
    fits: bool | None,
) -> dict[str, Any]:
    """`shared_part`, `private_part` and `fallback` of a mask; arguments are of whole sequences.

    fits: as `fits_documents` found.
    """
    plan, layout = ranks.plan, ranks.layout
    assert plan is not None and layout is not None and plan.shared is not None
    pieces, shared = plan.ranks, plan.shared
    own = plan.length // pieces

    def of_rank(document: Document, low: Any, high: Any, ranges: Any, order: Any) -> list[Any]:
        of_part = functools.partial(
            _of_part, document, low, high, ranges, level=level, implementation=implementation
        )
        parts = order.reshape(order.shape[0], pieces, own)
        mine, rank = vary_together(parts, jax.lax.axis_index(layout.context))
        mine = jax.lax.dynamic_index_in_dim(mine, rank, 1, keepdims=False)
        assert document.q_ids is not None
        ids = _take(document.q_ids, mine)
        if shared == 0:
            return [of_part(ids, mine, mine, in_order=True)]
        first, private = ids[:, :shared], ids[:, shared:]
        kept = _among(first, private)
        own_ids = jnp.concatenate([jnp.where(kept, first, PADDING_SEGMENT_ID), private], axis=1)
        others = jnp.where(kept, PADDING_SEGMENT_ID, first)
        keys = parts[:, :, :shared].reshape(order.shape[0], pieces * shared)
        return [of_part(own_ids, mine, mine), of_part(others, mine[:, :shared], keys)]

    def specs() -> Any:
        axes = ranks.mask_batch

        def of(own_keys: bool) -> dict[str, Any]:
            names = ["q_lo", "q_hi", *BLOCK_ARRAYS, "q_ids", "kv_ids", "kv_plan"]
            names += ["q_pos", "kv_pos"] if level > 1 else []
            if shared == 0:
                names.remove("kv_plan")
            like = of_own_keys if own_keys else str
            over = {"kv_plan": ranks.plan_batch}
            return {x: ranks.spec(like(x), level, over.get(x, axes)) for x in names}

        whole, orders = layout.spec(axes), layout.spec(ranks.plan_batch)
        made = [of(True), of(False)] if shared > 0 else [of(True)]
        return (whole, whole, whole, whole, orders), made

    ranges = tuple((ranks.keys(lo), ranks.keys(hi)) for lo, hi in ranges)
    made = ranks.on_each(of_rank, specs)(document, low, high, ranges, plan.order)
    build: Any = functools.partial(
        AttentionMask, segment_check=level, sharding=sharding, shards=pieces, permuted=True
    )
    unset = dict.fromkeys(("q_pos", "kv_pos"))
    found = {"private_part": build(**unset | made[0], q_len=plan.length, kv_len=own, own_keys=True)}
    if shared > 0:
        number = pieces * shared
        found["shared_part"] = build(**unset | made[1], q_len=number, kv_len=number)
    if not fits:
        found["fallback"] = _fallback(ranks, document)
    elif plan.fallback is not None:
        found["fallback"] = jnp.asarray(plan.fallback, jnp.int32).reshape(1)
    return found


def fits_documents(plan: ContextPlan | None, ids: Any) -> bool | None:
    """Whether each document of a private row lies whole on its rank, where numpy arrays say it.

    None: the program has to find out. ids: (B or 1, length) of the mask, which the plan need not
    have been made of.
    """
    if plan is None or plan.shared is None:
        return None
    if not isinstance(plan.inverse, np.ndarray) or not isinstance(ids, np.ndarray):
        return None
    own = plan.length // plan.ranks
    if plan.shared == own:
        return True
    ids, places = (np.atleast_2d(x) for x in (ids, plan.inverse))
    batch = max(len(ids), len(places))
    ids, places = (np.broadcast_to(x, (batch, plan.length)) for x in (ids, places))
    rows = zip(ids, places, strict=True)
    return not any(_some_apart_on_host(*row, own, plan.shared) for row in rows)


def _some_apart_on_host(ids: np.ndarray, place: np.ndarray, own: int, shared: int) -> bool:
    """`_some_apart`, exactly: of runs of an id first, which are few."""
    rank, private = place // own, place % own >= shared
    begins = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    of_runs = ids[begins]
    by_id = np.argsort(of_runs, kind="stable")
    of_runs = of_runs[by_id]
    first = np.flatnonzero(np.concatenate([[True], of_runs[1:] != of_runs[:-1]]))

    def of_ids(reduce: Any, x: np.ndarray) -> np.ndarray:
        return reduce.reduceat(reduce.reduceat(x, begins)[by_id], first)

    apart = of_ids(np.minimum, rank) != of_ids(np.maximum, rank)
    apart &= of_ids(np.logical_or, private) & (of_runs[first] != PADDING_SEGMENT_ID)
    return bool(apart.any())


def _of_part(
    document: Document,
    low: Any,
    high: Any,
    ranges: Any,
    ids: jax.Array,
    rows: jax.Array,
    keys: jax.Array,
    *,
    level: int,
    implementation: Any,
    in_order: bool = False,
) -> dict[str, Any]:
    """Of the rows with these ids at the indices `rows`, and the keys at the indices `keys`."""
    assert document.q_ids is not None
    length = document.q_ids.shape[1]
    before = _number_before(keys, length)
    made: dict[str, Any] = {}
    if not in_order:
        made["kv_plan"] = _orders(_take(before, keys))
        keys = _take(keys, made["kv_plan"][:, 1])

    def number(x: Any) -> Any:
        return _take(before, jnp.clip(x, 0, length))

    low, high = (None if x is None else _take(x, rows) for x in (low, high))
    if level < 2:  # positions are indices
        low = None if low is None else number(low)
        high = None if high is None else number(plus(high, 1)) - 1
    held = Rows(
        ids=ids,
        low=low,
        high=high,
        ranges=tuple((number(_take(x, rows)), number(_take(y, rows))) for x, y in ranges),
    )
    made |= {"q_ids": ids, "kv_ids": _take(document.q_ids, keys)}
    if level > 1:
        assert document.q_pos is not None
        made["kv_pos"] = _take(document.q_pos, keys)
    return made | row_ranges_and_bounds(
        held,
        made["kv_ids"],
        made.get("kv_pos"),
        level=level,
        batch=ids.shape[0],
        q_len=ids.shape[1],
        kv_len=keys.shape[1],
        implementation=implementation,
    )


def _fallback(ranks: RankRows, document: Document) -> jax.Array:
    """(1,): whether the plan fell back, or was made of other documents than these."""
    plan, layout = ranks.plan, ranks.layout
    assert plan is not None and layout is not None and plan.shared is not None
    own, shared = plan.length // plan.ranks, plan.shared

    def specs() -> Any:
        batch = layout.spec(ranks.mask_batch)
        return (batch, layout.spec(ranks.plan_batch)), batch

    def split(ids: jax.Array, place: jax.Array) -> jax.Array:
        place = jnp.broadcast_to(place, ids.shape)
        return jax.vmap(_some_apart)(*vary_together(ids, place // own, place % own >= shared))

    found = ranks.on_each(split, specs)(document.q_ids, plan.inverse)
    said = False if plan.fallback is None else plan.fallback
    fallback, found = vary_together(jnp.asarray(said, bool), found.any())
    return (fallback | found).astype(jnp.int32).reshape(1)


def _some_apart(ids: jax.Array, rank: jax.Array, private: jax.Array) -> jax.Array:
    """Whether an id has a private row, and rows of another rank: of one row of the batch.

    Surely False where none has. By two tables of ids, as in ops/xla_mask.py: an id is taken for
    apart where both say so, for itself or for others of their slot.
    """
    slots = table_size(ids.shape[0])
    unsigned = ids.astype(jnp.uint32)
    low = unsigned & jnp.uint32(slots - 1)
    high = (unsigned * jnp.uint32(HASH_MULTIPLIER)) >> jnp.uint32(33 - slots.bit_length())
    found = token = ids != PADDING_SEGMENT_ID
    for slot in (low, high):
        at = jnp.where(token, slot.astype(jnp.int32), slots)  # padding has a slot of its own
        table, at, rank, private = vary_together(jnp.zeros(slots + 1, jnp.int32), at, rank, private)
        least = (table + _MOST).at[at].min(rank)
        most = table.at[at].max(rank)
        some = table.at[at].max(private.astype(jnp.int32))
        found &= ((least != most) & (some > 0))[at]
    return found.any()


def _among(x: jax.Array, others: jax.Array) -> jax.Array:
    """Whether each of x[b] is one of others[b]."""
    size = others.shape[1]
    ordered = jnp.sort(others, axis=1)
    ordered, x, less = vary_together(ordered, x, jnp.zeros_like(x))
    for bit in reversed(range(size.bit_length())):  # how many are less
        more = less + (1 << bit)
        below = _take(ordered, jnp.minimum(more, size) - 1) < x
        less = jnp.where((more <= size) & below, more, less)
    return (less < size) & (_take(ordered, jnp.minimum(less, size - 1)) == x)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b]], each of batch 1 or B."""
    batch = max(x.shape[0], index.shape[0])
    x, index = vary_together(x, index)
    x, index = (jnp.broadcast_to(y, (batch, y.shape[1])) for y in (x, index))
    return jax.vmap(lambda x, index: x.at[index].get(mode="promise_in_bounds"))(x, index)


def _number_before(index: jax.Array, length: int) -> jax.Array:
    """(B, length + 1): how many of the indices, all of them different, are less than each."""
    zeros, index = vary_together(jnp.zeros((index.shape[0], length + 1), jnp.int32), index)
    there = jax.vmap(lambda x, index: x.at[index + 1].set(1, unique_indices=True))(zeros, index)
    return jnp.cumsum(there, axis=1, dtype=jnp.int32)


def _orders(order: jax.Array) -> jax.Array:
    """(B, 2, n): a permutation, and its inverse."""
    number = jnp.broadcast_to(jnp.arange(order.shape[1], dtype=jnp.int32), order.shape)
    zeros, number, order = vary_together(jnp.zeros_like(order), number, order)
    place = jax.vmap(lambda x, at, y: x.at[at].set(y, unique_indices=True))(zeros, order, number)
    return jnp.stack([order, place], axis=1)
