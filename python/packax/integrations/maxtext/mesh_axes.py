"""The `AttentionSharding` that MaxText's mesh and logical axis rules mean."""

from __future__ import annotations

import math
from typing import Any

from flax import linen
from jax.sharding import PartitionSpec as P

from packax._src.core.sharding import AttentionSharding

_TILE = 256  # rows: two chunks of 128 for each rank
_BATCH, _ROWS, _HEADS = "activation_batch_attn", "activation_q_length", "activation_heads"


def sharding_of(
    mesh: Any, query: tuple[int, ...], key: tuple[int, ...], config: Any
) -> AttentionSharding | None:
    """None: nothing is divided.

    Axes of size 1 are left out, and axes that do not divide a size from its last one on. An axis
    of a `shard_map` or a `vmap` around (pipeline stages) is none of the rules here. The sequence
    is gathered where no kernel divides it: keys of another length, chunks of less than 128 rows,
    tokens that were reordered for another number of ranks.
    """
    if mesh is None or mesh.size == 1:
        return None
    rules = linen.get_logical_axis_rules()
    batch, rows, heads = (
        _dividing(mesh, _axes(mesh, name, rules), size)
        for name, size in ((_BATCH, query[0]), (_ROWS, query[1]), (_HEADS, query[2]))
    )
    ranks = math.prod(mesh.shape[axis] for axis in rows)
    if not (batch or rows or heads):
        return None
    ordered = reordered_ranks(mesh, config)
    in_tiles = ordered == 1 or (ordered == ranks and query[1] % (_TILE * ranks) == 0)
    if query[1] != key[1] or not in_tiles:
        rows = ()
    of_heads = heads if heads == _dividing(mesh, heads, key[2]) else ()
    return AttentionSharding(
        query=P(*map(_entry, (batch, rows, heads)), None),
        key_value=P(*map(_entry, (batch, rows, of_heads)), None),
        mesh=mesh,
    )


def reordered_ranks(mesh: Any, config: Any) -> int:
    """Over how many ranks MaxText's input pipeline reordered the tokens; 1: they are in order."""
    if mesh is None or not getattr(config, "context_parallel_load_balance", False):
        return 1
    return mesh.shape.get(getattr(config, "context_sharding", "context"), 1)


def _axes(mesh: Any, name: str, rules: Any) -> tuple[str, ...]:
    spec = linen.logical_to_mesh_axes((name,), rules=rules)
    entry = spec[0] if spec else None
    axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


def _dividing(mesh: Any, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes
