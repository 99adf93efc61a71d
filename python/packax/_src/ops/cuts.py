"""How the dimensions of an array are cut over a mesh when XLA asks how to divide a call."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from packax._src.core.sharding import Axes


class Cut(NamedTuple):
    """How a dimension arrives: over which mesh axes, major first, and in how many pieces.

    XLA may use part of an axis: two heads on an axis of four devices are two pieces, each on two
    devices. No PartitionSpec can express that, so jax cannot decode such shardings.
    """

    axes: Axes
    pieces: int
    whole: bool  # the pieces are those of a PartitionSpec with these axes


def cuts(mesh: Any, x: Any) -> tuple[Cut, ...]:
    """The cut of every dimension of an array that XLA asks about."""
    if x.sharding is None or isinstance(x.sharding, NamedSharding):
        # GSPMD asks before it knows, and jax then answers with the mesh of its own context.
        return (Cut((), 1, True),) * x.ndim
    # Every number of pieces divides the number of devices. With that many elements in every
    # dimension, the first index on a device tells which piece it has.
    indices = x.sharding.devices_indices_map((mesh.size,) * x.ndim)
    return tuple(
        _cut(mesh, np.asarray([indices[device][dim].start or 0 for device in mesh.devices.flat]))
        for dim in range(x.ndim)
    )


def _cut(mesh: Any, first: np.ndarray) -> Cut:
    """`first`: the first of mesh.size indices on every device."""
    first = first.reshape(mesh.devices.shape)
    number = len(np.unique(first)) if first.any() else 1
    steps = {  # of the index, from one device to the next along an axis
        name: int(np.take(first, 1, axis).flat[0])
        for axis, name in enumerate(mesh.axis_names)
        if (first != first.take([0], axis)).any()
    }
    axes = tuple(sorted(steps, key=lambda name: -steps[name]))
    steps = {name: steps.get(name, 0) for name in mesh.axis_names}
    places = np.indices(first.shape)
    linear = sum(place * step for place, step in zip(places, steps.values(), strict=True))
    return Cut(
        axes,
        number,
        math.prod(mesh.shape[axis] for axis in axes) == number and bool((first == linear).all()),
    )
