"""The mesh of context parallelism's benchmark: GPUs, or hosts and the GPUs of each."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def mesh_of(count: int, hosts: int) -> Any:
    """Of the first `count` devices; those of a host are taken to follow each other."""
    if count % hosts:
        raise SystemExit(f"--hosts must divide the {count} devices, but is {hosts}")
    sizes, names = ((count,), ("context",)) if hosts == 1 else ((hosts, count // hosts), LEVELS)
    devices, auto = jax.devices()[:count], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, devices=devices, axis_types=auto)


LEVELS = ("host", "gpu")


def context_axes(mesh: Any) -> str | tuple[str, ...]:
    names = tuple(mesh.axis_names)
    return names if len(names) > 1 else names[0]


def rows_of(mesh: Any) -> P:
    """The spec of query, key and value."""
    return P(None, context_axes(mesh))


def levels_of(mesh: Any) -> tuple[int, ...]:
    """As context_plan takes them."""
    return tuple(mesh.shape.values())
