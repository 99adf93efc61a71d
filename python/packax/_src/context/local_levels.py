"""A row divided among groups of ranks, and what each group has among its ranks, and so on.

With one level the groups are the ranks. With several, documents are split inside a host first: the
first level divides the row among hosts as if they were ranks. Rows of documents that it splits are
then dealt evenly to the ranks of a host, in tiles, before the rest is divided among them as a row
of its own. Rows stand in the order of ranks, in a rank those split at the first level first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from packax._src.context.array_ops import HostOps
from packax._src.context.load_balance import next_round
from packax._src.context.local_rows import Assigned, Row, assign, carry_out, look
from packax._src.context.local_search import Base, Needs, Search, deal, foreseen, needs
from packax._src.context.local_settle import settled
from packax._src.core.shapes import TILE

_HUGE = 2**30
# Ways are tried until one leaves no part with more than such a part above the mean.
_ENOUGH = (256, 256, 256, 40, 40, 40, 40, 40)
_FAIR = 8  # and what is found is fair with no more than this part above it


class Group(NamedTuple):
    """The tokens of a group of ranks."""

    tokens: Any  # (N,) indices of the row
    ends: Any  # (levels before,) of those that each has split, which come first


class Found(NamedTuple):
    """The ways to divide a group's tokens among its parts."""

    row: Row
    base: Base
    held_by: Any  # (N,) rank * kinds + kind of the tokens that come first, else -1
    search: Search
    need: Needs
    area: Callable[
        [Any], Any
    ]  # (K,) of the most loaded part, foreseen, at least where (K,) is True
    mean: Any


def find(
    ops: HostOps, ids: Any, keys: Any, group: Group, parts: int, bounds: tuple[int, ...]
) -> Found:
    """ids, keys: of the whole row; bounds: the most tokens that the levels before have split."""
    length = group.tokens.shape[0]
    held = group.ends[-1] if bounds else np.int32(0)
    if length < keys.shape[0]:  # else it is the row in order
        ids, keys = ids[group.tokens], keys[group.tokens]
    row = look(ops, ids, keys, parts, held)
    base, held_by = _dealt(ops, row, group, parts, bounds)
    mean = (row.documents.areas.sum(dtype=np.int32) + base.areas.sum(dtype=np.int32)) // parts
    search = deal(ops, row.documents, base, length, mean + mean // 34)
    need = needs(ops, row.documents, base, search, length)
    known: Any = np.full(need.rows.shape, -1, np.int32)

    def area(where: Any) -> Any:
        if ops.xp is not np:
            return foreseen(ops, row.documents, search.owner, need, mean, length // parts)
        new = np.flatnonzero(where & (known < 0))
        if len(new):
            of_new = Needs(*(x[new] for x in need))
            owner = search.owner[new]
            known[new] = foreseen(ops, row.documents, owner, of_new, mean, length // parts)
        return known

    return Found(row, base, held_by, search, need, area, mean)


def assigned(ops: HostOps, found: Found, way: Any) -> Assigned:
    return assign(ops, found.row, found.search, way, found.base)


def best(ops: HostOps, found: Found, shared: int, of_way: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What each part gets, by the way with the least load of those that get by with these rows and
    are tried; and whether it is fair. of_way: `assigned`.
    """
    xp, mean = ops.xp, found.mean
    need = found.need.rows
    enough = need <= shared
    if xp is np and not enough.any():
        return None, False
    area = found.area(enough)
    # Ways that split the same documents are tried once.
    same = (area[:, None] == area) & (need[:, None] == need) & enough
    enough = enough & (same.argmax(axis=1) == xp.arange(len(area), dtype=np.int32))
    enough = enough & (area <= mean + mean // _FAIR)
    ways = ops.order(xp.where(enough, area, _HUGE))[: len(_ENOUGH)]
    enough = enough[ways]
    most = found.base.tokens.max()

    def load(mine: Assigned) -> Any:
        return xp.where(mine.split.max(axis=-1) + most <= shared, mine.area, _HUGE)

    if xp is np:
        least, chosen = _HUGE, None
        for way, part in zip(ways[enough], _ENOUGH, strict=False):
            mine = of_way(int(way))
            if load(mine) < least:
                least, chosen = load(mine), mine
            if least <= mean + mean // part:
                break
        return chosen, least <= mean + mean // _FAIR
    tried = ops.each(of_way, ways)
    area = xp.where(enough, load(tried), _HUGE)
    equal = ops.least_so_far(area) <= mean + mean // xp.asarray(_ENOUGH)
    last = xp.where(equal.any(), equal.argmax(), len(_ENOUGH))
    way = xp.where(xp.arange(len(_ENOUGH), dtype=np.int32) <= last, area, _HUGE).argmin()
    return Assigned(*(x[way] for x in tried)), area[way] <= mean + mean // _FAIR


def divide(ops: HostOps, found: Found, group: Group, mine: Assigned) -> Group:
    """The parts of a group: arrays have a first axis of them."""
    xp = ops.xp
    before = group.ends.shape[0]
    parts = found.base.tokens.shape[0]
    order = carry_out(ops, found.row, mine, found.held_by, before)
    part = xp.arange(parts, dtype=np.int32)[:, None]
    counts = [
        (found.held_by == part * before + kind).sum(axis=1, dtype=np.int32)
        for kind in range(before)
    ]
    ends = ops.sums(xp.stack([*counts, mine.split], axis=1))
    tokens = group.tokens[order] if before else order  # at first the row is in order
    return Group(tokens.reshape(parts, -1), ends)


def divide_all(ops: HostOps, keys: Any, group: Group, parts: int) -> Group:
    """The same where all that is left is split, in tiles of the row's order, dealt by area."""
    xp = ops.xp
    length, before = group.tokens.shape[0], group.ends.shape[0]
    kinds = before + 1
    index = xp.arange(length, dtype=np.int32)
    kind = ops.passed(group.ends, index) if before else 0 * index
    row = look(ops, 0 * index, keys[group.tokens], parts, np.int32(length))
    tile = TILE * xp.arange(length // TILE, dtype=np.int32)
    works = row.areas.between(tile, tile + TILE)
    heavy = ops.order(-works)
    heavy = heavy[ops.order(kind[tile][heavy])]
    of_tile = _to_parts(ops, works, heavy, xp.zeros(parts, np.int32))
    part = xp.arange(parts, dtype=np.int32)[:, None]
    # Of the last kind any two may be exchanged.
    last = kind[tile] == before
    others = xp.where((of_tile == part) & ~last, works, 0).sum(axis=1, dtype=np.int32)
    wanted = works.sum(dtype=np.int32) // parts - others
    of_last = xp.where(last, of_tile, -1)
    exchanged = settled(ops, of_last, works, ops.order(-works), wanted, length // (TILE * parts))
    of_tile = xp.where(last, exchanged, of_tile)
    held_by = of_tile[index // TILE] * kinds + kind
    counts = [(held_by == part * kinds + n).sum(axis=1, dtype=np.int32) for n in range(kinds)]
    order = ops.order(held_by)
    return Group(group.tokens[order].reshape(parts, -1), ops.sums(xp.stack(counts, axis=1)))


def _to_parts(ops: HostOps, works: Any, order: Any, load: Any) -> Any:
    """(tiles,) the part that gets each: in this order, in each round one to each, the largest to
    that with least."""
    xp = ops.xp
    parts = load.shape[0]
    rounds = order.reshape(-1, parts)
    if not len(rounds):
        return order
    rounds = ops.along(rounds, ops.order(-works[rounds]))
    part = xp.arange(parts, dtype=np.int32)

    def one_round(n: Any, state: Any) -> Any:
        load, takers = state
        load, mine = next_round(load, works[rounds[n]], xp)
        return load, ops.set_at(takers, n, ops.put(mine, part))

    _, takers = ops.repeat(len(rounds), one_round, (load - load.min(), 0 * rounds))
    return ops.put(rounds.reshape(-1), takers.reshape(-1))


def _dealt(
    ops: HostOps, row: Row, group: Group, parts: int, bounds: tuple[int, ...]
) -> tuple[Base, Any]:
    """What the levels before split, dealt in tiles: of each, as many to each part, by area."""
    xp = ops.xp
    length, kinds = group.tokens.shape[0], len(bounds)
    part = xp.arange(parts, dtype=np.int32)[:, None]
    tokens = areas = xp.zeros(parts, np.int32)
    held_by = xp.broadcast_to(np.int32(-1), (length,))
    index = ops.indices(length)
    begin = np.int32(0)
    for kind, bound in enumerate(bounds):
        tiles = parts * -(-bound // (TILE * parts))
        end = group.ends[kind]
        tile = TILE * xp.arange(tiles, dtype=np.int32)
        first, last = xp.minimum(begin + tile, end), xp.minimum(begin + tile + TILE, end)
        works = row.areas.between(row.held + first, row.held + last)
        of_tile = _to_parts(ops, works, ops.order(-works), areas)
        mine = of_tile == part
        tokens = tokens + xp.where(mine, last - first, 0).sum(axis=1, dtype=np.int32)
        areas = areas + xp.where(mine, works, 0).sum(axis=1, dtype=np.int32)
        if tiles:
            its_tile = xp.minimum(xp.maximum(index - begin, 0) // TILE, tiles - 1)
            here = (begin <= index) & (index < end)
            held_by = xp.where(here, of_tile[its_tile] * kinds + kind, held_by)
        begin = end
    return Base(tokens, areas), held_by
