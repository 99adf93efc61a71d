"""From attention specs and a mesh to packax's sharding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from packax import AttentionSharding
from packax.extend import UNSHARDED, Layout, entered_mesh, layout_of
from packax.kvax.utils.specs import Axes, get_attention_specs
from packax.kvax.utils.typing import Specs


def mesh_in_use(mesh: Any = None) -> Any:
    """The mesh argument, or the mesh of `jax.set_mesh` or of a `with mesh:` block, or None.

    Raises:
        ValueError: mesh has other axes than the mesh of jax.set_mesh.
    """
    context = jax.sharding.get_abstract_mesh()
    if mesh is None:
        mesh = entered_mesh() if context.empty else context
        return None if mesh is None or mesh.empty else mesh
    if not context.empty and dict(context.shape) != dict(mesh.shape):
        raise ValueError(
            f"mesh has the axes {dict(mesh.shape)}, but jax.set_mesh set one with "
            f"{dict(context.shape)}"
        )
    return mesh


def _mesh(mesh: Any, why: str) -> Any:
    mesh = mesh_in_use(mesh)
    if mesh is None:
        raise ValueError(
            f"{why} a mesh: pass mesh=, or set one by `with mesh:` or jax.set_mesh(mesh)"
        )
    return mesh


def attention_layout(mesh: Any = None) -> Layout:
    """packax's layout for the attention specs; UNSHARDED without a mesh and axes.

    Raises:
        ValueError: the specs name axes, but there is no mesh, or the mesh does not have them.
        NotImplementedError: inside the caller's shard_map over the context axes.
    """
    specs = get_attention_specs()
    query, kv = tuple(specs.query_specs), tuple(specs.kv_specs)
    mesh = mesh_in_use(mesh)
    if mesh is None:
        if all(axes is None for axes in query + kv):
            return UNSHARDED
        mesh = _mesh(mesh, f"the attention specs {query} and {kv} need")
    layout = layout_of(AttentionSharding(P(*query), P(*kv), mesh=mesh))
    if layout.outside(layout.context) > 1:
        raise NotImplementedError(
            f"inside a shard_map over the context axes {layout.context} ids and keys would be "
            "of one rank: call this outside it, or use packax.flash_attention"
        )
    return layout


def gathered(layout: Layout) -> AttentionSharding | None:
    """The sharding with keys sharded over the context axes, like the rows of their tokens.

    Each rank then gathers keys in groups of heads, overlapped with attention, and key gradients are
    reduce-scattered. Results are the same.
    """
    return dataclasses.replace(layout, kv_context=layout.context).sharding


def shard_map(f: Callable[..., Any], in_specs: Specs, out_specs: Specs, mesh: Any = None) -> Any:
    """`jax.shard_map` with specs as tuples: None, or a tuple that begins with None or holds an
    axis.

    Other tuples are trees of specs. A PartitionSpec is always a single spec, so use one where the
    first entry is a tuple of axes and the others are None.
    """

    def is_spec(node: Any) -> bool:
        if isinstance(node, P):
            return True
        if not isinstance(node, tuple):
            return False
        return not node or node[0] is None or any(isinstance(entry, str) for entry in node)

    def convert(specs: Any) -> Any:
        return jax.tree.map(lambda spec: P(*spec), specs, is_leaf=is_spec)

    mesh = _mesh(mesh, "shard_map needs")
    return jax.shard_map(
        f, mesh=mesh, in_specs=convert(in_specs), out_specs=convert(out_specs), check_vma=False
    )


def get_query_context_mesh_axis_name(mesh: Any = None) -> Any:
    """The sequence entry of the query specs: None, an axis, or a tuple of axes."""
    return get_attention_specs().query_specs[Axes.query_sequence]


def get_query_context_mesh_axis_size(mesh: Any = None) -> int:
    """The number of ranks over which queries are sharded.

    Raises:
        ValueError: no mesh, specs without a context axis, or an axis that the mesh does not have.
    """
    name = get_query_context_mesh_axis_name()
    mesh = _mesh(mesh, "the size of the context axis needs")
    axes = name if isinstance(name, tuple) else (name,)
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"the mesh has no axis {axis!r}, which query_specs names for the sequence: it has "
                f"{', '.join(map(repr, mesh.shape))}"
            )
    return math.prod(mesh.shape[axis] for axis in axes)
