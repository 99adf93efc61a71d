"""Plans of kind "local": documents stay whole on a rank, but for those that balance must split.

A rank's rows are a shared part, whose keys every rank gathers, and a private part that no other
rank reads. local_search.py says which documents are split, local_rows.py where each token goes;
this file sets the size of the shared part and says what happens where it is too small.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.array_ops import DeviceOps, HostOps
from packax._src.context.load_balance import ContextPlan, balanced
from packax._src.context.local_rows import Row, carry_out, look
from packax._src.context.local_search import Search, deal, judge
from packax._src.core.shapes import TILE

SIZES = (0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
"""Shares of a rank's rows, of which the host takes the smallest shared part that will do."""

_FAIR = 1.03  # area of the most loaded rank over the mean
_HUGE = 2**30
_HOST, _DEVICE = HostOps(), DeviceOps()


class _Found(NamedTuple):
    """The ways to divide one row."""

    row: Row
    search: Search
    need: Any  # (K,) shared rows
    area: Any  # (K,) of the most loaded rank
    mean: Any


def local(ranks: int, ids: Any, keys: Any, shared: Any) -> ContextPlan:
    """Documents of `ids` (B or 1, length), None: one, which attend `keys` (B or 1, length)."""
    length = keys.shape[1]
    if length % (TILE * ranks):
        raise ValueError(
            f'length must be a multiple of ranks * {TILE} = {TILE * ranks} for "local", '
            f"but is {length}"
        )
    own = length // ranks
    rows = shared_rows(shared, own)
    if ids is None:
        rows = own
    arrays = [x for x in (ids, keys) if x is not None]
    on_host = all(isinstance(x, np.ndarray) for x in arrays)
    if rows is None and not on_host:
        raise ValueError(
            'shared must be given where a "local" plan is made on the device, since shapes of a '
            "program depend on it: a share of a rank's rows from 0.0 to 1.0, or a number of rows"
        )
    if rows == own:
        order = balanced(ranks, keys).index()
        return _plan(order, ranks, length, own)
    batch = max(len(x) for x in arrays)
    arrays = [(np if on_host else jnp).broadcast_to(x, (batch, length)) for x in arrays]
    ids, keys = arrays
    if on_host:
        return _on_host(ranks, ids, keys, rows)
    assert rows is not None
    order, split, fallback = _on_device(ids, keys, ranks=ranks, shared=rows)
    return _plan(order, ranks, length, rows, split, fallback)


def shared_rows(shared: Any, own: int) -> int | None:
    """Rows of the shared part of `own` rows, None where it is not said.

    Raises:
        ValueError: neither a share nor a number of rows.
    """
    if shared is None:
        return None
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


def _plan(
    order: Any, ranks: int, length: int, shared: int, split: Any = None, fallback: Any = None
) -> ContextPlan:
    if isinstance(order, np.ndarray):
        inverse = np.empty_like(order)
        np.put_along_axis(inverse, order, np.arange(length, dtype=np.int32)[None], axis=1)
    else:
        inverse = _inverse(order)
    return ContextPlan(order, inverse, "local", ranks, length, 1, shared, fallback, split)


@functools.partial(jax.jit, inline=True)
def _inverse(order: jax.Array) -> jax.Array:
    indices = jnp.arange(order.shape[1], dtype=jnp.int32)
    return jax.vmap(lambda x: _DEVICE.put(x, indices))(order)


def _find(ops: HostOps, ids: Any, keys: Any, ranks: int) -> _Found:
    row = look(ops, ids, keys, ranks)
    mean = row.documents.areas.sum(dtype=np.int32) // ranks
    length = ids.shape[0]
    search = deal(ops, row.documents, ranks, length, mean + mean // 34)
    need, area = judge(ops, row.documents, search, ranks, length)
    return _Found(row, search, need, area, mean)


def _best(ops: HostOps, found: _Found, shared: int) -> tuple[Any, Any]:
    """The way with the least load of those that get by with these rows, and whether it is fair."""
    xp = ops.xp
    area = xp.where(found.need <= shared, found.area, _HUGE)
    way = area.argmin()
    return way, area[way] <= found.mean + found.mean // 8


def _row(ops: HostOps, found: _Found, shared: int, ranks: int) -> tuple[Any, Any, Any]:
    """One row's order, the rows of each rank that are of split documents, and whether it fails."""
    way, fair = _best(ops, found, shared)
    order, split = carry_out(ops, found.row, found.search, way, ranks)
    return order, split[:, None], ~fair | (split.max() > shared)


def _on_host(ranks: int, ids: np.ndarray, keys: np.ndarray, shared: int | None) -> ContextPlan:
    ids, keys = (np.asarray(x, np.int32) for x in (ids, keys))
    length = keys.shape[1]
    own = length // ranks
    found = [_find(_HOST, *x, ranks) for x in zip(ids, keys, strict=True)]
    sizes = sorted({_rows_of(share, own) for share in SIZES} - {own})
    if shared is not None:
        sizes = [shared]
    for size in sizes:
        if not all(_best(_HOST, x, size)[1] for x in found):
            continue
        orders, splits = [], []
        for x, its_keys in zip(found, keys, strict=True):
            order, split, fails = _row(_HOST, x, size, ranks)
            if fails or (shared is None and _load(its_keys, order, ranks) > _FAIR):
                break
            orders.append(order)
            splits.append(split)
        else:
            return _plan(np.stack(orders), ranks, length, size, np.stack(splits))
    return _plan(balanced(ranks, keys).index(), ranks, length, own)


def _load(keys: np.ndarray, order: np.ndarray, ranks: int) -> float:
    """Area of the most loaded rank over the mean."""
    area = keys[order].reshape(ranks, -1).sum(axis=1, dtype=np.int64)
    return float(area.max() * ranks / max(area.sum(), 1))


@functools.partial(jax.jit, static_argnames=("ranks", "shared"), inline=True)
def _on_device(
    ids: jax.Array, keys: jax.Array, ranks: int, shared: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def one_row(ids: jax.Array, keys: jax.Array) -> tuple[Any, Any, Any]:
        return _row(_DEVICE, _find(_DEVICE, ids, keys, ranks), shared, ranks)

    order, split, fails = jax.vmap(one_row)(ids.astype(jnp.int32), keys)
    fallback = fails.any()
    order = jax.lax.cond(
        fallback, lambda _, keys: balanced(ranks, keys).index(), lambda order, _: order, order, keys
    )
    return order, split, fallback
