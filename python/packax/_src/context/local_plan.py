"""Plans of kind "local": documents stay whole on a rank, but for those that balance must split.

A rank's rows are a shared part, whose keys every rank gathers, and a private part that no other
rank reads. With levels there is a shared part for each: of all ranks, of those of a host.
local_search.py says which documents are split, local_rows.py where each token goes,
local_levels.py divides level by level; this file sets the sizes of the shared parts and says what
happens where they are too small.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.array_ops import DeviceOps, HostOps, promotion
from packax._src.context.load_balance import ContextPlan, balanced
from packax._src.context.local_levels import Group, assigned, best, divide, divide_all, find
from packax._src.core.shapes import TILE

SIZES = tuple(
    n / 128
    for n in (0, 0.25, *range(1, 9), 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 104, 112, 120, 128)
)
"""Shares of a rank's rows, of which the host takes the smallest shared part that will do."""

_FAIR = 1.03  # area of the most loaded rank over the mean
_HOST, _DEVICE = HostOps(), DeviceOps()


def local(levels: tuple[int, ...], ids: Any, keys: Any, shared: Any) -> ContextPlan:
    """Documents of `ids` (B or 1, length), None: one, which attend `keys` (B or 1, length).

    levels: sizes of the groups of ranks, of which each is part of the one before.
    """
    ranks, length = math.prod(levels), keys.shape[1]
    if length % (TILE * ranks):
        raise ValueError(
            f'length must be a multiple of ranks * {TILE} = {TILE * ranks} for "local", '
            f"but is {length}"
        )
    own = length // ranks
    rows = shared_rows(shared, own, levels)
    if not isinstance(shared, tuple) and shared is not None:
        levels = (ranks,)
    if ids is None:
        rows = (own,)
    arrays = [x for x in (ids, keys) if x is not None]
    on_host = all(isinstance(x, np.ndarray) for x in arrays)
    if rows is None and not on_host:
        raise ValueError(
            'shared must be given where a "local" plan is made on the device, since shapes of a '
            "program depend on it: a share of a rank's rows from 0.0 to 1.0, or a number of rows"
        )
    if rows is not None and rows[0] == own:
        return _all_shared(ranks, keys)
    batch = max(len(x) for x in arrays)
    arrays = [(np if on_host else jnp).broadcast_to(x, (batch, length)) for x in arrays]
    ids, keys = arrays
    if on_host:
        return _on_host(levels, ids, keys, rows)
    assert rows is not None
    with promotion():  # the same lines are numpy's on the host
        order, split, fallback = _on_device(ids, keys, levels=levels, shared=rows)
        return _plan(order, levels, rows, split, fallback)


def shared_rows(shared: Any, own: int, levels: tuple[int, ...]) -> tuple[int, ...] | None:
    """Rows of each shared part of `own` rows, the outermost first; None where it is not said.

    Raises:
        ValueError: neither a share nor a number of rows, or as many as levels that do not rise.
    """
    if shared is None:
        return None
    if not isinstance(shared, tuple):
        return (_rows(shared, own),)
    rows = tuple(_rows(x, own) for x in shared)
    if len(rows) != len(levels) or any(a > b for a, b in itertools.pairwise(rows)):
        raise ValueError(
            f"shared must hold a size for each of the levels of ranks, {levels}, none smaller than "
            f"the one before, but is {shared}"
        )
    return rows


def _rows(shared: Any, own: int) -> int:
    if isinstance(shared, float):
        if not 0 <= shared <= 1:
            raise ValueError(f"shared must be a share from 0.0 to 1.0, but is {shared}")
        return _rows_of(shared, own)
    try:
        number = operator.index(shared)
    except TypeError:
        number = None
    if number is None or isinstance(shared, bool):
        raise ValueError(
            f"shared must be a share from 0.0 to 1.0 or a number of rows, but is {shared!r}"
        ) from None
    if not 0 <= number <= own:
        raise ValueError(f"shared must be from 0 to {own} rows, those of a rank, but is {number}")
    return number


def _rows_of(share: float, own: int) -> int:
    return min(own, TILE * math.ceil(share * own / TILE))


def _all_shared(ranks: int, keys: Any) -> ContextPlan:
    order = balanced(ranks, keys).index()
    return _plan(order, (ranks,), (order.shape[1] // ranks,))


def _plan(
    order: Any,
    levels: tuple[int, ...],
    shared: tuple[int, ...],
    split: Any = None,
    fallback: Any = None,
) -> ContextPlan:
    length, ranks = order.shape[1], math.prod(levels)
    if isinstance(order, np.ndarray):
        inverse, index = np.empty_like(order), _HOST.indices(length).reshape(ranks, -1)
        for row, of_row in zip(inverse, order.reshape(-1, *index.shape), strict=True):
            for number, of_rank in zip(index, of_row, strict=True):
                row[_to_index(of_rank)] = number
    else:
        inverse = _inverse(order)
    one = len(levels) == 1
    return ContextPlan(
        *(order, inverse, "local", ranks, length, 1, shared[0] if one else shared, fallback, split),
        levels=() if one else levels,
    )


@functools.partial(jax.jit, inline=True)
def _inverse(order: jax.Array) -> jax.Array:
    indices = jnp.arange(order.shape[1], dtype=jnp.int32)
    return jax.vmap(lambda x: _DEVICE.put(x, indices))(order)


class _OnHost:
    """One row of the batch, of which groups are divided once for all sizes that divide it alike."""

    def __init__(
        self, levels: tuple[int, ...], ids: np.ndarray, keys: np.ndarray, most: float | None
    ) -> None:
        """most: area of the most loaded rank over the mean, None: any that is fair."""
        self.levels, self.ids, self.keys = levels, ids, keys
        mean = keys.sum(dtype=np.int64) / math.prod(levels)
        self.most = None if most is None else most * float(mean)
        self.known: dict[Any, Any] = {}

    def divided(self, shared: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
        """The order, and the rows of each rank that are split at each level; None: it fails."""
        length = len(self.keys)
        own = length // math.prod(self.levels)
        whole = Group(_HOST.indices(length), np.zeros(0, np.int32))
        groups: list[tuple[Any, Group]] = [((), whole)]
        made: list[Group] = []
        for level, parts in enumerate(self.levels):
            inside = math.prod(self.levels[level + 1 :])
            bounds = tuple(rows * parts * inside for rows in shared[:level])
            made = []
            for path, group in groups:
                got = self._parts(path, group, parts, bounds, shared[level], inside, own)
                if got is None:
                    return None
                made.append(got)
            groups = [
                ((*path, shared[level], n), Group(got.tokens[n], got.ends[n]))
                for (path, _), got in zip(groups, made, strict=True)
                for n in range(parts)
            ]
        tokens, ends = ([getattr(x, name) for x in made] for name in ("tokens", "ends"))
        order = (np.concatenate(tokens) if len(tokens) > 1 else tokens[0]).reshape(-1)
        split = np.concatenate(ends)
        return None if (split > np.array(shared)).any() else (order, split)

    def _parts(
        self, path: Any, group: Group, parts: int, bounds: Any, rows: int, inside: int, own: int
    ) -> Group | None:
        here = (*path, rows)
        if here not in self.known:
            self.known[here] = None
            if rows == own:
                self.known[here] = divide_all(_HOST, self.keys, group, parts)
            else:
                if path not in self.known:
                    found = find(_HOST, self.ids, self.keys, group, parts, bounds)
                    of_way = functools.cache(functools.partial(assigned, _HOST, found))
                    self.known[path] = found, of_way
                found, of_way = self.known[path]
                mine, fair = best(_HOST, found, rows * inside, of_way)
                if fair and not self._too_much(found, mine, inside):
                    self.known[here] = divide(_HOST, found, group, mine)
        return self.known[here]

    def _too_much(self, found: Any, mine: Any, inside: int) -> bool:
        """Whether a rank surely gets more than the most: areas are rounded down."""
        if self.most is None or inside > 1:
            return False
        return int(mine.area) * int(found.row.areas.unit) > self.most


def _on_host(
    levels: tuple[int, ...], ids: np.ndarray, keys: np.ndarray, shared: tuple[int, ...] | None
) -> ContextPlan:
    ids, keys = (np.asarray(x, np.int32) for x in (ids, keys))
    own = keys.shape[1] // math.prod(levels)
    most = _FAIR if shared is None else None
    rows = [_OnHost(levels, *x, most) for x in zip(ids, keys, strict=True)]
    tried: Any = [shared]
    if shared is None:
        sizes = sorted({_rows_of(share, own) for share in SIZES})
        tried = itertools.combinations_with_replacement(sizes, len(levels))
    for sizes in tried:
        if sizes[0] == own:
            break
        found = []
        for row in rows:
            divided = row.divided(sizes)
            if divided is None:
                break
            if most is not None and _load(row.keys, divided[0], math.prod(levels)) > most:
                break
            found.append(divided)
        else:
            orders, splits = zip(*found, strict=True)
            orders = orders[0][None] if len(orders) == 1 else np.stack(orders)
            return _plan(orders, levels, sizes, np.stack(splits))
    if shared is not None:
        rows_given = " and ".join(map(str, shared))
        warnings.warn(
            f"the documents do not fit a shared part of {rows_given} of a rank's {own} rows, so "
            "all rows are shared, as by a plan that keeps nothing local. Give a larger shared= (an "
            "int counts rows, a float is a share of them), or None to have it chosen",
            stacklevel=4,
        )
    return _all_shared(math.prod(levels), keys)


def _load(keys: np.ndarray, order: np.ndarray, ranks: int) -> float:
    """Area of the most loaded rank over the mean."""
    area = [keys.take(_to_index(x)).sum(dtype=np.int64) for x in order.reshape(ranks, -1)]
    return float(max(area) * ranks / max(sum(area), 1))


def _to_index(x: np.ndarray) -> np.ndarray:
    """What indexes faster than other integers. A rank at a time: small arrays reuse memory."""
    return x.astype(np.intp)


@functools.partial(jax.jit, static_argnames=("levels", "shared"), inline=True)
def _on_device(
    ids: jax.Array, keys: jax.Array, levels: tuple[int, ...], shared: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    ranks, length = math.prod(levels), ids.shape[1]

    def one_row(ids: jax.Array, keys: jax.Array) -> tuple[Any, Any, Any]:
        groups = Group(jnp.arange(length, dtype=jnp.int32)[None], jnp.zeros((1, 0), jnp.int32))
        fails = jnp.zeros((), bool)
        for level, parts in enumerate(levels):
            inside = math.prod(levels[level + 1 :])
            bounds = tuple(rows * parts * inside for rows in shared[:level])

            def one_group(
                group: Group, parts: int = parts, bounds: Any = bounds, level: int = level
            ) -> tuple[Group, Any]:
                if shared[level] * ranks == length:
                    return divide_all(_DEVICE, keys, group, parts), jnp.zeros((), bool)
                found = find(_DEVICE, ids, keys, group, parts, bounds)
                rows = shared[level] * math.prod(levels[level + 1 :])
                of_way = functools.partial(assigned, _DEVICE, found)
                mine, fair = best(_DEVICE, found, rows, of_way)
                return divide(_DEVICE, found, group, mine), ~fair

            divided, none = jax.vmap(one_group)(groups)
            fails |= none.any()
            groups = Group(*(x.reshape(-1, x.shape[2]) for x in divided))
        fails |= (groups.ends > jnp.array(shared)).any()
        return groups.tokens.reshape(-1), groups.ends, fails

    order, split, fails = jax.vmap(one_row)(ids.astype(jnp.int32), keys)
    fallback = fails.any()
    order = jax.lax.cond(
        fallback, lambda _, keys: balanced(ranks, keys).index(), lambda order, _: order, order, keys
    )
    return order, split, fallback
