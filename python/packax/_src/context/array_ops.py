"""The few array functions that numpy and jax spell differently, for plans that both make alike.

All numbers are int32, so that the host and the device find the same integers. `K` is an axis of
candidates, of which a caller keeps one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SHORT = 64  # of such an axis sums are made by comparing, in a fusion


@contextlib.contextmanager
def promotion() -> Iterator[None]:
    """Of ranks and dtypes, as numpy does it: whatever the user lets jax do."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@functools.lru_cache(256)
def _begins(shape: tuple[int, ...], width: int) -> np.ndarray:
    """Where each row of a last axis of this width begins in the flat array, to add to indices."""
    rows = np.arange(math.prod(shape), dtype=np.intp) * width
    return rows.reshape(*shape, 1)


@functools.lru_cache(8)
def indices(number: int) -> np.ndarray:
    """0, 1, ... of numpy, to be read: new memory costs more than the arithmetic on it."""
    index = np.arange(number, dtype=np.int32)
    index.flags.writeable = False
    return index


class HostOps:
    """numpy."""

    xp: Any = np

    def indices(self, number: int) -> Any:
        """0, 1, ..., not to be changed."""
        return indices(number)

    def order(self, x: Any) -> Any:
        """Stable, along the last axis, smallest first."""
        return x.argsort(axis=-1, kind="stable").astype(np.int32)

    def ranked(self, x: Any) -> tuple[Any, Any]:
        """The same of a short axis, and each entry's place in that order."""
        order = x.argsort(axis=-1, kind="stable")
        place = np.empty(x.shape, np.int32)
        flat = order + _begins(x.shape[:-1], x.shape[-1])
        place.reshape(-1)[flat] = np.arange(x.shape[-1], dtype=np.int32)
        return order.astype(np.int32), place

    def sorted(self, x: Any) -> tuple[Any, Any]:
        """The same order of a short axis, and x in that order."""
        order = x.argsort(axis=-1, kind="stable")
        return order, x.take(order + _begins(x.shape[:-1], x.shape[-1]))

    def added(self, x: Any, index: Any, more: Any) -> Any:
        """x[m, k, index[k, n]] + more[m, k, n], where an index is a permutation of a short axis;
        x may be changed."""
        flat = index + _begins(index.shape[:-1], index.shape[-1])
        x.reshape(len(x), -1)[:, flat] += more
        return x

    def written(self, x: Any, begin: Any, values: Any) -> Any:
        """x (K, N) with x[k, begin[k] + n] = values[k, n], n few; x may be changed."""
        at = begin[:, None] + np.arange(values.shape[1])
        x.reshape(-1)[at + _begins((len(x),), x.shape[1])] = values
        return x

    def copied(self, x: Any) -> Any:
        """x, to be changed."""
        return x.copy()

    def in_front(self, x: Any) -> Any:
        """The order of a (K, G) bool with True in front, stable."""
        return (~x).argsort(axis=-1, kind="stable").astype(np.int32)

    def sums(self, x: Any) -> Any:
        """Of the entries so far, along the last axis."""
        return x.cumsum(axis=-1, dtype=np.int32)

    def least_so_far(self, x: Any) -> Any:
        return np.minimum.accumulate(x, axis=-1)

    def all_so_far(self, x: Any) -> Any:
        """Of a (K, R) bool, R short."""
        return np.logical_and.accumulate(x, axis=1)

    def passed(self, ends: Any, x: Any) -> Any:
        """How many of `ends` (R,), which rise, are at most x (N,)."""
        return ends.searchsorted(x, side="right").astype(np.int32)

    def sums_by(self, of: Any, x: Any, number: int) -> Any:
        """(number,) sums of the x (N,) that are `of` each; others, of -1 or more, are left out."""
        return np.bincount(of + 1, x, number + 2)[1 : number + 1].astype(np.int32)

    def put(self, index: Any, x: Any) -> Any:
        """x (N,) moved by a permutation: entry n goes to index[n]."""
        moved = np.empty_like(x)
        moved[index] = x
        return moved

    def placed(self, x: Any, index: Any, values: Any) -> Any:
        """x with x[index] = values, where the index is not -1."""
        x = x.copy()
        x[index[index >= 0]] = values[index >= 0]
        return x

    def where_true(self, x: Any) -> Any:
        """The indices of a (N,) bool, then N: at least one."""
        return np.append(np.flatnonzero(x), len(x)).astype(np.int32)

    def along(self, x: Any, index: Any) -> Any:
        """x[k, index[k, n]], (K, N) each."""
        if len(x) == 1:
            return x[0].take(index)
        return x.take(index + _begins((len(x),), x.shape[1]))

    def each(self, function: Callable[[Any], Any], x: Any) -> Any:
        """A function, which returns a NamedTuple, of every entry of x, stacked."""
        made = [function(one) for one in x]
        return type(made[0])(*(np.stack(found) for found in zip(*made, strict=True)))

    def repeat(
        self, times: int, body: Callable[[Any, Any], Any], state: Any, done: Any = None
    ) -> Any:
        """state = body(n, state), so many times. done(state): whether more would change nothing."""
        for n in range(times):
            state = body(n, state)
            if done is not None and done(state):
                break
        return state

    def set_at(self, x: Any, n: Any, value: Any) -> Any:
        """x with x[n] = value; x may be changed."""
        x[n] = value
        return x


def _so_far(x: Any) -> jax.Array:
    """(R, R) which entries of a short last axis are not behind each: XLA fuses what uses it."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return index <= index[:, None]


class DeviceOps(HostOps):
    """jax, under jit: arrays as long as they can become, where numpy's are as long as they are."""

    xp: Any = jnp

    def indices(self, number: int) -> Any:
        return jnp.arange(number, dtype=jnp.int32)

    def order(self, x: Any) -> Any:
        return jnp.argsort(x, axis=-1, stable=True).astype(jnp.int32)

    def ranked(self, x: Any) -> tuple[Any, Any]:
        order, place, _ = self._compared(x)
        return order, place

    def sorted(self, x: Any) -> tuple[Any, Any]:
        order, _, values = self._compared(x)
        return order, values

    def _compared(self, x: Any) -> tuple[Any, Any, Any]:
        index = jnp.arange(x.shape[-1], dtype=jnp.int32)
        mine, other = x[..., :, None], x[..., None, :]
        before = (other < mine) | ((other == mine) & (index[None, :] < index[:, None]))
        place = before.sum(axis=-1, dtype=jnp.int32)
        here = place[..., None, :] == index[:, None]
        order, values = (
            jnp.where(here, y, 0).sum(axis=-1, dtype=jnp.int32) for y in (index, x[..., None, :])
        )
        return order, place, values

    def added(self, x: Any, index: Any, more: Any) -> Any:
        rank = jnp.arange(x.shape[-1], dtype=jnp.int32)[:, None]
        here = index[..., None, :] == rank
        return x + jnp.where(here, more[..., None, :], 0).sum(axis=-1, dtype=jnp.int32)

    def written(self, x: Any, begin: Any, values: Any) -> Any:
        place = jnp.arange(x.shape[1], dtype=jnp.int32) - begin[:, None]
        number = values.shape[1]
        here = place[:, :, None] == jnp.arange(number, dtype=jnp.int32)
        values = jnp.where(here, values[:, None], 0).sum(axis=2, dtype=jnp.int32)
        return jnp.where((place >= 0) & (place < number), values, x)

    def copied(self, x: Any) -> Any:
        return x

    def in_front(self, x: Any) -> Any:
        chosen = x.sum(axis=1, keepdims=True, dtype=jnp.int32)
        place = jnp.where(x, self.sums(x) - 1, chosen + self.sums(~x) - 1)
        index = jnp.arange(x.shape[1], dtype=jnp.int32)
        return jax.vmap(lambda place: self.put(place, index))(place)

    def sums(self, x: Any) -> Any:
        if x.shape[-1] > _SHORT:
            return jnp.cumsum(x, axis=-1, dtype=jnp.int32)
        return jnp.where(_so_far(x), x[..., None, :], 0).sum(axis=-1, dtype=jnp.int32)

    def least_so_far(self, x: Any) -> Any:
        return jnp.where(_so_far(x), x[..., None, :], np.iinfo(np.int32).max).min(axis=-1)

    def all_so_far(self, x: Any) -> Any:
        return (x[:, None, :] | ~_so_far(x)).all(axis=2)

    def passed(self, ends: Any, x: Any) -> Any:
        return (ends[:, None] <= x).sum(axis=0, dtype=jnp.int32)

    def sums_by(self, of: Any, x: Any, number: int) -> Any:
        mine = of == jnp.arange(number, dtype=jnp.int32)[:, None]
        return jnp.where(mine, x, 0).sum(axis=1, dtype=jnp.int32)

    def put(self, index: Any, x: Any) -> Any:
        return jnp.zeros_like(x).at[index].set(x, unique_indices=True)

    def placed(self, x: Any, index: Any, values: Any) -> Any:
        return x.at[jnp.where(index < 0, x.shape[0], index)].set(values, mode="drop")

    def where_true(self, x: Any) -> Any:
        size = x.shape[0]
        return jnp.nonzero(x, size=size + 1, fill_value=size)[0].astype(jnp.int32)

    def along(self, x: Any, index: Any) -> Any:
        return jnp.take_along_axis(x, index, axis=1)

    def each(self, function: Callable[[Any], Any], x: Any) -> Any:
        return jax.vmap(function)(x)

    def repeat(
        self, times: int, body: Callable[[Any, Any], Any], state: Any, done: Any = None
    ) -> Any:
        return jax.lax.fori_loop(0, times, body, state)

    def set_at(self, x: Any, n: Any, value: Any) -> Any:
        return x.at[n].set(value)
