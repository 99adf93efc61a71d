"""Shared by the tests of attention under plain jit: meshes, calls placed on them, and what moves.

A compiled program may all-reduce gradients of replicated operands; it must contain none of `MOVES`.
"""

import collections
import contextlib
import re
import zlib

import context
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
OF_ROWS = dict.fromkeys("bsp", "data")  # the batch, the sequences of a packed step, and pages


def mesh_of(kind="Auto", shape=(4, 2), names=("data", "tensor")):
    return context.mesh_of(*shape, kind=kind, axes=names)


@contextlib.contextmanager
def partitioner(name):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", name == "shardy")
    jax.clear_caches()
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
        jax.clear_caches()


def collectives(compiled):
    text = compiled.as_text()
    found = re.findall(rf"\b({'|'.join((*MOVES, 'all-reduce'))})(?:-start)?\(", text)
    return collections.Counter(found)


def specs(call, axes):
    """The spec of each array. `axes`: the mesh axis of each label."""
    kv_heads = int(call.heads.split("/")[1])
    axes = dict(axes)
    if "h" in axes and kv_heads % 2 == 0:
        axes["g"] = axes["h"]
    labels = call.labels()
    if zlib.crc32(str(call).encode()) % 2:  # the arrays of options arrive unsharded
        labels |= {name: "" for name in ("sinks", "slopes") if name in labels}
    return {name: P(*(axes.get(at) for at in axes_of)) for name, axes_of in labels.items()}


def placed(call, mesh, axes=OF_ROWS | {"h": "tensor"}, seed=1):
    """The arrays of a call on a mesh."""
    of = specs(call, axes)
    return {name: put(mesh, x, *of[name]) for name, x in call.arrays(seed).items()}


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))
