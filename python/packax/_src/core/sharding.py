"""`AttentionSharding`, the sharding that a user passes, and `Layout`, its form on a call's mesh.

They define which rank has which part of an array. context/shard.py gathers keys from other ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from packax._src.core import jax_compat

Axes = tuple[str, ...]
HeadGroups = int | tuple[int, ...] | None  # how a rank groups the gathers of its key/value heads

_DIMS = ("batch", "sequence", "heads", "head dim")


class _HasSpecs(Protocol):  # an AttentionMask; core/mask.py imports this module
    def specs(self, spec: Callable[..., Any], batch: Axes, context: Axes, heads: Axes) -> Any: ...


Mask = TypeVar("Mask", bound=_HasSpecs)


@dataclasses.dataclass(frozen=True)
class AttentionSharding:
    """How query, key and value are sharded over a mesh: data, context and tensor parallelism.

    Each entry of a spec is None, a mesh axis, or a tuple of axes (major first), as in
    `PartitionSpec("data", "context", "tensor", None)` for (batch, sequence, heads, head dim).

    Attributes:
        query: spec of query and of the output; the log-sum-exp is sharded in the same way.
        key_value: spec of key and value. Batch: as in query. Sequence: as in query (every rank
            gathers the keys and values, and their gradients are reduce-scattered), or None (every
            rank has all keys). Heads: as in query, or None (every rank has all key/value heads and
            uses those of its query heads).
        mesh: needed only where no mesh is set (`jax.set_mesh(mesh)`).

    Arrays with another sharding are resharded. On mesh axes of type Explicit, the type of an array
    must agree with the spec where both shard a dimension, and is used where only the type does.

    Inside your own `shard_map` over some of these axes, arrays are this rank's pieces along them,
    and packax maps only over the other axes (if any).

    Examples:
        >>> sharding = packax.AttentionSharding(
        ...     query=P(("data", "fsdp"), "context", "tensor", None),
        ...     key_value=P(("data", "fsdp"), "context", "tensor", None),
        ... )
    """

    query: P
    key_value: P
    mesh: Any = None

    def __post_init__(self) -> None:
        for name in ("query", "key_value"):
            _axes(name, getattr(self, name))

    def mask_specs(self, mask: Mask) -> Mask:
        """The PartitionSpec of every array of a mask, as a mask: for your own `shard_map`."""
        return mask.specs(spec, *_axes("query", self.query))


class Cut(NamedTuple):
    """The number of pieces into which the caller's shard_map cut each dimension."""

    rows: int = 1
    keys: int = 1
    heads: int = 1
    kv_heads: int = 1
    context: Axes = ()  # the mesh axes over which the sequence is sharded, inside or outside


@dataclasses.dataclass(frozen=True)
class Layout:
    """A sharding resolved on the mesh of one call; without arguments: nothing is sharded. Hashable,
    so that it can be static."""

    mesh: Any = None  # None: the mesh of the context
    sizes: tuple[tuple[str, int], ...] = ()
    manual: frozenset[str] = frozenset()  # the axes of the shard_map that surrounds the call
    explicit: frozenset[str] = frozenset()  # the axes whose sharding is part of array types
    batch: Axes = ()
    context: Axes = ()
    heads: Axes = ()
    kv_context: Axes = ()
    kv_heads: Axes = ()

    @property
    def on_mesh(self) -> bool:
        """Whether the call has a sharding, perhaps on a mesh of one device."""
        return bool(self.sizes)

    @property
    def mapped(self) -> frozenset[str]:
        """The axes that context/shard.py maps over."""
        return frozenset(name for name, _ in self.sizes) - self.manual

    def size(self, axes: Axes) -> int:
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in axes)

    def several(self, axes: Axes) -> Axes:
        """The axes of size above 1. Arrays are gathered and scattered only over these.

        jax_remove_size_one_mesh_axis_from_type also removes axes of size 1 from types.
        """
        return tuple(axis for axis in axes if self.size((axis,)) > 1)

    def steps(self, starts: tuple[int, ...]) -> tuple[Axes, ...]:
        """The mesh axes of each gather of keys; `starts`: the index of the first axis of each."""
        axes = self.kv_context
        pairs = itertools.pairwise((*starts, len(axes)))
        steps = (self.several(axes[first:end]) for first, end in pairs)
        return tuple(step for step in steps if step)

    def outside(self, axes: Axes) -> int:
        """The number of pieces into which the caller's shard_map cut a dimension over `axes`."""
        return self.size(tuple(axis for axis in axes if axis in self.manual))

    def inside(self, axes: Axes) -> int:
        """The number of pieces into which context/shard.py then cuts the dimension."""
        return self.size(tuple(axis for axis in axes if axis in self.mapped))

    def spec(self, *dims: Axes) -> P:
        """The PartitionSpec of `dims`, without mesh axes that the caller's shard_map covers."""
        return spec(*(tuple(axis for axis in axes if axis in self.mapped) for axes in dims))

    @property
    def sharding(self) -> AttentionSharding | None:
        if not self.on_mesh:
            return None
        return AttentionSharding(
            spec(self.batch, self.context, self.heads),
            spec(self.batch, self.kv_context, self.kv_heads),
            self.mesh,
        )

    @property
    def cut(self) -> Cut:
        dims = (self.context, self.kv_context, self.heads, self.kv_heads)
        rows, keys, heads, kv_heads = map(self.outside, dims)
        return Cut(rows, keys, heads, kv_heads, self.several(self.context))

    def place(self, x: Any, *dims: Axes) -> Any:
        """x resharded over these mesh axes, as far as they are of type Explicit.

        shard_map reshards it over other axes.
        """
        return self._resharded(x, self.spec(*dims)) if self.explicit else x

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Maps the function over all mesh axes that the caller's shard_map does not cover.

        XLA itself cannot partition a custom call.
        """
        if not self.mapped:
            return function
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.mapped),
            check_vma=jax_compat.checks_vma() if self.manual else True,
        )
        if not self.explicit:
            return mapped

        def placed(*operands: Any) -> Any:
            # Types must agree with in_specs. Where no mesh is set, jnp.zeros_like and other
            # functions that make arrays return unsharded ones.
            return mapped(*self.place_all(operands, in_specs))

        return placed

    def place_all(self, arrays: Any, specs: Any) -> Any:
        """The arrays resharded by these PartitionSpecs if array types include the sharding."""
        if not self.explicit:
            return arrays
        specs = jax.tree.broadcast(specs, arrays, is_leaf=lambda x: isinstance(x, P))
        return jax.tree.map(self._resharded, arrays, specs)

    def _resharded(self, x: Any, dims: P) -> Any:
        # Without a mesh in the context a spec alone has no meaning.
        dims = self.only(self.explicit, dims)
        target = dims if self.mesh is None else NamedSharding(self.mesh, dims)
        return jax.sharding.reshard(x, target)

    def only(self, axes: frozenset[str], dims: P) -> P:
        """dims with only the mesh axes that are among `axes`."""
        entries = ((e,) if isinstance(e, str) else e or () for e in dims)
        return spec(*(tuple(axis for axis in entry if axis in axes) for entry in entries))

    def own_part(self, x: jax.Array, axis: int) -> jax.Array:
        """This rank's piece of a complete x, if the caller's shard_map covers the context axes."""
        pieces = self.outside(self.context)
        if pieces == 1:
            return x
        size = x.shape[axis] // pieces
        x, first = vary_together(x, jax.lax.axis_index(self.context) * size)
        return jax.lax.dynamic_slice_in_dim(x, first, size, axis=axis)

    def gathers(
        self, kv_heads: int, groups: HeadGroups, backward: bool, ranks: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """The gathers of a rank's key/value heads: for each, the heads of every attended group.

        In the forward pass, the default for eight heads is 1, 3 and 4. The first gather is not
        overlapped, so it is small, and each attention overlaps with the next, larger gather. In the
        backward pass, 2 heads are gathered, then 6, which attention processes as 4 and 2. XLA runs
        one collective at a time, so with a third gather attention would wait for the gradients in
        flight. The reduce-scatter of the last gradients is not overlapped, so the last group is
        small.

        `ranks`: the number of ranks among which keys are gathered. None: all.
        """
        ranks = self.size(self.kv_context) if ranks is None else ranks
        if ranks == 1:
            return ((kv_heads,),)  # nothing to gather
        if isinstance(groups, tuple):
            return tuple((heads,) for heads in groups)
        if groups is not None:
            return ((kv_heads // groups,),) * groups
        if kv_heads == 1 or ranks <= 2:
            return ((kv_heads,),)
        if backward:
            end = max(1, kv_heads // 4)
            middle = kv_heads - 2 * end
            return ((end,), (middle, end) if middle else (end,))
        first = max(1, kv_heads // 8)
        second = (kv_heads - first) * 3 // 7
        return tuple((n,) for n in (first, second, kv_heads - first - second) if n)


def spec(*dims: Axes) -> P:
    return P(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims))


def typed_axes(x: Any) -> tuple[Axes, ...]:
    """The mesh axes of type Explicit over which the type of x shards each dimension."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return ((),) * x.ndim
    found = tuple(() if e is None else (e,) if isinstance(e, str) else e for e in sharding.spec)
    return found + ((),) * (x.ndim - len(found))


def typed_mesh(x: Any) -> Any:
    """The mesh of x's devices outside of jit, and the mesh of its type inside."""
    typed = jax.typeof(x).sharding.mesh
    return typed if isinstance(x, jax.core.Tracer) else getattr(x.sharding, "mesh", typed)


def typed_as(x: jax.Array, *dims: Axes) -> jax.Array:
    """x, its dimensions sharded over these mesh axes of type Explicit, and the rest over none."""
    dims += ((),) * (x.ndim - len(dims))
    if typed_axes(x) == dims:
        return x
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, spec(*dims)))


def over_auto_axes(
    function: Callable[..., Any], arrays: Sequence[Any], *dims: Sequence[Axes]
) -> Any:
    """function(*arrays), run with mesh axes of type Explicit changed to Auto.

    jax has no sharding rule for many operations on arrays with explicit sharding.
    `dims`: the mesh axes of each dimension of the result, or of each result of a tuple.
    """
    typed = [n for n, x in enumerate(arrays) if isinstance(x, jax.Array)]
    sharded = next((arrays[n] for n in typed if any(typed_axes(arrays[n]))), None)
    if sharded is None:
        return function(*arrays)

    def merged(*typed_arrays: Any) -> Any:
        all_arrays = list(arrays)
        for n, x in zip(typed, typed_arrays, strict=True):
            all_arrays[n] = x
        return function(*all_arrays)

    mesh = jax.typeof(sharded).sharding.mesh
    results = tuple(NamedSharding(mesh, spec(*of)) for of in dims)
    out_sharding = results[0] if len(results) == 1 else results
    return jax.sharding.auto_axes(merged, out_sharding=out_sharding)(*(arrays[n] for n in typed))


def with_types(
    sharding: Any, query: Any, key: Any, value: Any, name_of_it: str = "sharding"
) -> Any:
    """`sharding`, with its None entries filled in from the types of the tensors.

    Returns None if there is no sharding and no type shards a sequence: batch and heads need none.
    `name_of_it` is the name of the sharding in error messages.

    Raises:
        ValueError: the types disagree with `sharding` or with each other.
    """
    tensors = {"query": query, "key": key, "value": value}
    types = {name: typed_axes(x) for name, x in tensors.items()}
    if sharding is None:
        if not any(axes[1] for axes in types.values()):
            return None
        sharding = AttentionSharding(P(), P(), typed_mesh(query))
    elif not isinstance(sharding, AttentionSharding) or not any(map(any, types.values())):
        return sharding
    mesh = jax.typeof(query).sharding.mesh
    several = {  # the axes over which types may shard
        name
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if size > 1 and kind == AxisType.Explicit
    }
    specs = {of: list(_axes(of, getattr(sharding, of))) for of in ("query", "key_value")}
    source = {
        (of, dim): f"{name_of_it}.{of}" if axes else "the type of query"
        for of, dims in specs.items()
        for dim, axes in enumerate(dims)
    }
    for name, dims in types.items():
        own = "query" if name == "query" else "key_value"
        for dim, axes in enumerate(dims):
            said = [axis for axis in axes if axis in several]
            if said and not specs[own][dim]:
                specs[own][dim], source[own, dim] = axes, f"the type of {name}"
            for of in {own, "query"} if said else ():
                if said != [axis for axis in specs[of][dim] if axis in several]:
                    raise ValueError(
                        f"{name} is {jax.typeof(tensors[name])}: its {_DIMS[dim]} axis is sharded "
                        f"over {shown(axes)}, but {source[of, dim]} says {shown(specs[of][dim])}: "
                        "reshard one like the other (jax.sharding.reshard)"
                    )
    specs["key_value"][0] = specs["query"][0]
    return AttentionSharding(spec(*specs["query"]), spec(*specs["key_value"]), sharding.mesh)


UNSHARDED = Layout()


def layout_of(sharding: Any) -> Layout:
    """The layout of a sharding on the current mesh.

    Raises:
        ValueError: specs that do not match, no mesh, or axes that the mesh does not have.
        NotImplementedError: a dimension that is sharded over both manual and other axes.
    """
    if not isinstance(sharding, AttentionSharding):
        raise ValueError(
            "sharding must be an AttentionSharding(query=P(...), key_value=P(...)), but is a "
            f"{type(sharding).__name__}"
        )
    query = _axes("query", sharding.query)
    key_value = _axes("key_value", sharding.key_value)
    if key_value[0] != query[0]:
        raise ValueError(
            f"sharding.key_value must have the batch axes of sharding.query, {shown(query[0])}, "
            f"but has {shown(key_value[0])}"
        )
    for dim in (1, 2):
        if key_value[dim] not in ((), query[dim]):
            accepted = (
                f"{shown(query[dim])} as in sharding.query, or None" if query[dim] else "None"
            )
            raise ValueError(
                f"the {_DIMS[dim]} axes of sharding.key_value must be {accepted}, but are "
                f"{shown(key_value[dim])}"
            )

    mesh, known = _mesh(sharding)
    sizes = tuple(zip(known.axis_names, known.axis_sizes, strict=True))
    types = dict(zip(known.axis_names, known.axis_types, strict=True))
    manual, explicit = (
        frozenset(name for name, of_axis in types.items() if of_axis == kind)
        for kind in (AxisType.Manual, AxisType.Explicit)
    )
    for name, dims in (("query", query), ("key_value", key_value)):
        for axis in (axis for axes in dims for axis in axes):
            if axis not in known.axis_names:
                raise ValueError(
                    f"sharding.{name} names the axis {axis!r}, but the mesh has "
                    f"{', '.join(map(repr, known.axis_names)) or 'none'}"
                )
    single = {name for name, size in sizes if size == 1}
    for dim, axes in enumerate(query):
        several = set(axes) - single
        if manual.isdisjoint(several) or manual.issuperset(several):
            continue
        raise NotImplementedError(
            f"the {_DIMS[dim]} axes {shown(axes)} of sharding.query are partly axes of your "
            f"shard_map ({', '.join(sorted(manual))}) and partly not: map over all of them or none"
        )
    return Layout(mesh, sizes, manual, explicit, *query, *key_value[1:])


def layout_of_call(given: Any, mask: Any, query: Any, key: Any, value: Any) -> Layout:
    """The layout of the argument `sharding` or of the mask's, completed from the types of the
    tensors. UNSHARDED if neither exists, and no type shards a sequence.

    mask: an AttentionMask, or None if the call builds it.
    """
    asked = with_types(given, query, key, value)
    of_mask = None if mask is None else mask.sharding
    if of_mask is None:
        sharding = asked
    else:
        sharding = with_types(of_mask, query, key, value, "mask.sharding")
    if sharding is None:
        return UNSHARDED
    layout = layout_of(sharding)
    if mask is None:
        return layout
    whole = layout.context and of_mask is None  # but the sequence is sharded
    if given is None and whole:
        raise ValueError(
            f"query is {jax.typeof(query)}: its sequence axis is sharded over "
            f"{shown(layout.context)}, but mask was built for whole sequences. Build it from ids "
            "that are sharded as query is (jax.sharding.reshard), or with sharding=, or pass the "
            "expression as mask"
        )
    if given is not None and (whole or layout_of(asked) != layout):
        raise ValueError(
            f"sharding must be that of the mask, {of_mask}, but is {given}: pass it to "
            "create_attention_mask only"
        )
    if of_mask is not None and mask.shards != layout.size(layout.context):
        raise ValueError(
            f"mask was built for queries in {mask.shards} pieces, but the context axes of its "
            f"sharding now have size {layout.size(layout.context)}: build it on the mesh that it "
            "is used on"
        )
    return layout


def shown(axes: Axes) -> str:
    return repr(None if not axes else axes[0] if len(axes) == 1 else axes)


def _axes(name: str, given: Any) -> tuple[Axes, Axes, Axes]:
    """The checked mesh axes of batch, sequence and heads."""
    if not isinstance(given, P):
        raise ValueError(
            f"sharding.{name} must be a PartitionSpec of (batch, sequence, heads, head dim), but "
            f"is {given!r}"
        )
    if len(given) > 4:
        raise ValueError(
            f"sharding.{name} must have at most 4 entries, (batch, sequence, heads, head dim), but "
            f"is {given}"
        )
    dims: list[Axes] = []
    for entry in (*given, *[None] * (4 - len(given))):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
            raise ValueError(
                f"sharding.{name} must hold None, axis names or tuples of them, but holds {entry!r}"
            )
        dims.append(axes)
    if dims[3]:
        raise ValueError(
            f"sharding.{name} must not shard the head dim, but says {shown(dims[3])}: shard "
            "the heads"
        )
    used = [axis for axes in dims for axis in axes]
    twice = [axis for axis in used if used.count(axis) > 1]
    if twice:
        raise ValueError(f"sharding.{name} uses the axis {twice[0]!r} twice: {given}")
    return dims[0], dims[1], dims[2]


def _mesh(sharding: AttentionSharding) -> tuple[Any, Any]:
    """(the mesh argument of shard_map, the mesh that defines names, sizes and types of axes)."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return None, context
    mesh = entered_mesh() if sharding.mesh is None else sharding.mesh
    if mesh is not None and not hasattr(mesh, "empty"):
        raise ValueError(f"sharding.mesh must be a jax.sharding.Mesh, but is {mesh!r}")
    if mesh is None or mesh.empty:
        raise ValueError(
            "sharding needs a mesh: set one with jax.set_mesh(mesh), or pass "
            "AttentionSharding(..., mesh=mesh)"
        )
    return mesh, getattr(mesh, "abstract_mesh", mesh)


def check_divides(layout: Layout, name: str, what: str, size: int, axes: Axes) -> None:
    """Raises ValueError unless the mesh axes divide `size`, the size of the caller's array."""
    if not isinstance(size, numbers.Integral):  # jax crashes when compiling such a program
        raise NotImplementedError(
            f"with sharding, the {what} of {name} must be a constant, but is the symbolic "
            f"dimension {size} of jax.export"
        )
    pieces = layout.inside(axes)
    if size % pieces:
        raise ValueError(
            f"the {what} of {name}, {size}, must be a multiple of the size of its mesh axes "
            f"{shown(axes)}, {pieces}"
        )


def checked_head_groups(groups: Any) -> HeadGroups:
    """The checked gather_head_groups argument; `check_tensors` compares it with the heads."""
    numbers = groups if isinstance(groups, tuple) and groups else (groups,)
    if groups is not None and any(
        not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers
    ):
        raise ValueError(
            "gather_head_groups must be None, a positive integer or a tuple of positive integers, "
            f"not {groups!r}"
        )
    return groups


def check_tensors(layout: Layout, query: Any, key: Any, groups: HeadGroups) -> None:
    """Raises ValueError unless the layout and the groups of heads divide the tensors evenly."""
    check_divides(layout, "query", "batch size", query.shape[0], layout.batch)
    check_divides(layout, "query", "length", query.shape[1], layout.context)
    check_divides(layout, "query", "number of heads", query.shape[2], layout.heads)
    check_divides(layout, "key and value", "length", key.shape[1], layout.kv_context)
    if key.shape[2] % layout.inside(layout.kv_heads):
        raise ValueError(
            f"the number of heads of key and value, {key.shape[2]}, must be a multiple of the size "
            f"of its mesh axes {shown(layout.kv_heads)}, {layout.inside(layout.kv_heads)}. "
            "Otherwise pass None for heads in sharding.key_value: every rank then uses the heads "
            "that it needs"
        )
    if groups is not None and layout.kv_context:
        own = kv_heads_per_rank(layout, query.shape[2], key.shape[2])
        if sum(map(sum, layout.gathers(own, groups, backward=False))) != own:
            raise ValueError(
                f"gather_head_groups must divide the key/value heads of a rank, {own}, or be "
                f"numbers that add up to them, but is {groups}"
            )


def kv_heads_per_rank(layout: Layout, heads: int, kv_heads: int) -> int:
    """The number of the caller's key/value heads that the attention of one rank reads."""
    local = heads // layout.inside(layout.heads)
    if layout.heads == layout.kv_heads:
        return kv_heads // layout.inside(layout.kv_heads)
    group = heads * layout.outside(layout.heads) // kv_heads
    return local // math.gcd(local, group)


# --- The mesh of a `with` block, and the axes of shard_map over which values vary


def entered_mesh() -> Any:
    """The mesh of a `with mesh:` block, which older programs use instead of jax.set_mesh."""
    try:
        from jax._src.mesh import thread_resources

        return thread_resources.env.physical_mesh
    except (ImportError, AttributeError):
        return None


def varying_axes(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value varies in shard_map; jax renamed the attribute."""
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def vary_together(*trees: Any) -> tuple[Any, ...]:
    """The trees, with every array marked as varying over each axis over which any array varies.

    The transpose of this marking is the psum that the gradient of a replicated operand needs.
    """
    union = frozenset[str]().union(*(varying_axes(jax.typeof(x)) for x in jax.tree.leaves(trees)))
    if not union:  # for example outside of shard_map
        return trees

    def mark(x):
        missing = tuple(sorted(union - varying_axes(jax.typeof(x))))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # jax 0.7

    return jax.tree.map(mark, trees)
