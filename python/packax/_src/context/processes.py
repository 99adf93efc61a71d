"""Several processes: which batch rows each process must feed, and a check that it did.

If context or tensor axes span hosts, several hosts have shards of the same rows, and all of them
must feed these rows. jax does not check this, and the array could differ between hosts.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding

from packax._src.core.arguments import described
from packax._src.core.sharding import AttentionSharding, layout_of, spec


def process_rows(sharding: AttentionSharding, batch: int) -> np.ndarray:
    """The rows of a global batch that this process must feed: those that its devices need.

    Processes along the context and tensor axes get the same rows. With one process: all rows.

    Args:
        sharding: the `AttentionSharding` of the attention; its batch axes determine how rows are
            divided.
        batch: the number of rows of the global batch, a multiple of the size of those axes.

    Returns:
        Indices of rows, ascending. For a data loader that takes shards by index, the shard is
        `rows[0] // len(rows)` of `batch // len(rows)`.

    Raises:
        ValueError: there is no mesh with devices, or the batch axes do not divide the batch.

    Examples:
        >>> rows = packax.context.process_rows(sharding, 256)

        `jax.make_array_from_process_local_data(sharding_of_batch, tokens[rows])` makes the array.
    """
    layout = layout_of(sharding)
    mesh = layout.mesh or sharding.mesh or jax.sharding.get_mesh()
    if not isinstance(mesh, Mesh) or mesh.empty:
        raise ValueError(
            "process_rows needs a mesh of devices, outside of jit: jax.set_mesh(mesh), or "
            "AttentionSharding(..., mesh=mesh)"
        )
    pieces = layout.size(layout.batch)
    if batch < 1 or batch % pieces:
        raise ValueError(
            f"batch, {batch}, must be a multiple of the size of the batch axes of sharding, "
            f"{pieces}"
        )
    parts = NamedSharding(mesh, spec(layout.batch)).addressable_devices_indices_map((batch,))
    rows = (np.arange(batch)[index] for index in parts.values())
    return np.unique(np.concatenate([np.empty(0, int), *rows]))


def check_same_rows(batch: Any) -> None:
    """Raises unless processes fed the same data for the same part of each array.

    Every process must call it, ideally once, on the first batch: it copies each array's local part
    to the host and sends a checksum of it.

    Args:
        batch: arrays over all processes, or a pytree of them, as
            `jax.make_array_from_process_local_data` returns them.

    Raises:
        ValueError: processes fed different data for the same part of an array, or an argument is
            not an array over all processes.

    Examples:
        >>> packax.context.check_same_rows(batch)
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    several = jax.process_count() > 1
    for path, x in leaves:
        if not isinstance(x, jax.Array) or (several and x.is_fully_addressable):
            what = "an array of this process alone" if isinstance(x, jax.Array) else described(x)
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} must be a jax array over all processes, as "
                f"jax.make_array_from_process_local_data returns it, but is {what}"
            )
    sums = [
        (shard.device.id, number, zlib.crc32(np.asarray(shard.data).tobytes()))
        for number, (_, x) in enumerate(leaves)
        for shard in x.addressable_shards
    ]
    everywhere = process_allgather(np.asarray(sums, np.uint32).reshape(-1, 3)).reshape(-1, 3)
    parts = [_parts(x) for _, x in leaves]
    first: dict[Any, tuple[int, int]] = {}
    for device, number, checksum in everywhere.tolist():
        process, part = parts[number][device]
        other, expected = first.setdefault((number, part), (process, checksum))
        if checksum != expected:
            rows = "all rows" if not part or part[0] == (None, None) else f"rows {part[0]}"
            raise ValueError(
                f"batch{jax.tree_util.keystr(leaves[number][0])}: processes {other} and {process} "
                f"hold the same part of it ({rows}) and fed different data: give them the same "
                "rows, as packax.context.process_rows says"
            )


def _parts(x: jax.Array) -> dict[int, tuple[int, tuple[Any, ...]]]:
    """By device id: the process, and the start and stop of the device's part in every dimension."""
    indices: Any = x.sharding.devices_indices_map(x.shape)
    return {
        device.id: (device.process_index, tuple((dim.start, dim.stop) for dim in index))
        for device, index in indices.items()
    }
