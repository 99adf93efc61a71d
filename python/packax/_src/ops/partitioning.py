"""Lets XLA partition a primitive over a mesh by batch and heads, without communication.

XLA partitions a program under plain `jit` with sharded inputs. It cannot look into a custom call,
and would gather the whole batch for it on every device. So each primitive declares the kind of each
dimension of its operands (`Dims`, in partition_rules.py). The Shardy rule, the GSPMD rule, and the
computation of one device are derived from that.

On one device, or inside a `shard_map` over all axes, nothing is wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding
from jaxlib.mlir import ir

from packax._src.core.arguments import page
from packax._src.core.jax_compat import lower_with_devices
from packax._src.core.sharding import Axes, entered_mesh, spec, typed_axes
from packax._src.core.spec import accumulator

SEQUENCE_SWITCH = "PACKAX_SHARDED_SEQUENCE"
_CONTEXT_PAGE = page("Context parallelism")


def plain(aval: Any) -> Any:
    """The aval without mesh axes and sharding: the local array of a lowering."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


class Dims(NamedTuple):
    """A letter for every dimension of every operand and result.

    b, h, g: batch, query heads, and key/value heads, which follow the query heads. Sharded.
    e: biases, each for equally many consecutive batch rows, which follow the batch. Sharded.
    s, k: rows of query, rows of key and value. They must not arrive sharded, except k if it is in
    `divided`.
    p, o: pages of a cache, and the rows of a page.
    ".": any other dimension, which every device needs complete.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    of_kernels: frozenset[int] = frozenset()
    """Indices of operands that only kernels read. Without kernels, XLA need not compute them."""
    summed: Mapping[int, int] = MappingProxyType({})
    """Results that are summed over batch or heads, because they lack these dimensions. Maps their
    indices to those of the operands whose gradients they are, which have the dtypes of the sums."""
    divided: tuple[str, ...] = ("bh",)
    """The letters that may be sharded. If one mesh axis shards several, the first group counts, and
    in it the first operand."""
    by_keys: Callable[..., Any] | None = None
    """by_keys(bind, axes, *operands, **params) computes the results if keys are sharded, over the
    mesh axes axes[letter] of k, p and o. None: every device needs all keys."""


def partitioned(
    primitive: Any, dims: Callable[..., Dims], rule: Callable, kernels: bool = False
) -> Callable:
    """The lowering rule of a primitive that XLA may partition as `dims(*avals, **params)` declares.

    `kernels`: whether this platform has kernels.
    """

    def lower(ctx, *operands, **params):
        mesh = _mesh_in_use(ctx.module_context)
        if mesh is None:
            with without_mesh(ctx.avals_in):
                return rule(ctx, *operands, **params)
        avals = [plain(x) for x in ctx.avals_in]
        ctx = ctx.replace(avals_in=avals, avals_out=[plain(x) for x in ctx.avals_out])
        call = _custom_call(primitive, dims(*avals, **params), avals, params, kernels)
        kept = ctx.module_context.keepalives
        before = len(kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # jax needs this context
            with mesh:
                results = mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
        kept[before:] = map(_UntilCompiled, kept[before:])
        _record_parameters(f"{primitive} {sorted(params.items())}")
        return results

    return lower


@contextlib.contextmanager
def without_mesh(avals: Any) -> Iterator[None]:
    """A context to trace a function of arrays with these plain avals.

    Types on a mesh with Explicit axes, even of size 1, differ from those of plain avals.
    """
    with _with_64_bits(avals), jax.sharding.use_abstract_mesh(_NO_MESH):
        yield


def _with_64_bits(avals: Any) -> Any:
    """A context in which 64-bit values stay 64-bit.

    XLA may trace part of a program in another thread, which does not inherit the caller's
    `jax.enable_x64`.
    """
    known = jax.dtypes.canonicalize_dtype("float64") == "float64"
    if known or not any(x.dtype.itemsize == 8 for x in avals):
        return contextlib.nullcontext()
    module: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    return module.enable_x64(True)


class _UntilCompiled:
    """Keeps alive a function that XLA calls while it compiles the program.

    jax.experimental.serialize_executable pickles the compiled program, which does not need the
    function any more. The function cannot be pickled, so None is pickled instead.
    """

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> Any:
        return type(None), ()


def _record_parameters(text: str) -> None:
    """Writes the parameters into the program, where otherwise only a pointer identifies the call.

    jax's persistent cache may leave pointers out of its keys; this text then distinguishes calls.
    It is an attribute of an unused constant. XLA would copy an attribute of the call to all
    operations that replace the call, and compile operations again that differ only in this text.
    """
    unread: Any = mlir.ir_constant(np.int32(0))
    say: dict[str, ir.Attribute] = {"packax": ir.StringAttr.get(text)}
    unread.owner.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(say)


def _mesh_in_use(module: Any) -> Any:
    """A context manager that sets the mesh for jax; None if XLA has nothing to partition."""
    context = module.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is not None:  # inside a shard_map, where XLA cannot partition the call further
        _warn_of_unmapped_axes({n: k for n, k in context.mesh.shape.items() if n not in manual})
        return None
    if module.lowering_parameters.for_export:  # partitioning functions cannot be exported
        _warn_of_export(getattr(context, "num_devices", 1))
        return None
    devices = getattr(context, "device_assignment", None)
    if devices is None or context.num_devices == 1:
        return None
    entered = entered_mesh()
    if context.abstract_mesh is not None or (entered is not None and not entered.empty):
        return contextlib.nullcontext()
    known = jax.sharding.get_abstract_mesh()  # for operands without a mesh, as in eager vmap
    if known.empty or known.size != len(devices):
        return None
    return jax.sharding.Mesh(np.reshape(devices, known.axis_sizes), known.axis_names)


_NO_MESH = jax.sharding.AbstractMesh((), ())


def _warn_of_unmapped_axes(sizes: dict[str, int]) -> None:
    left = [name for name, size in sizes.items() if size > 1]
    if left:
        warnings.warn(
            "attention in a shard_map over some of the mesh's axes: arrays that are sharded over "
            f"{', '.join(map(repr, left))} are gathered on every device. Pass "
            f"sharding=packax.AttentionSharding(...), or map over all axes: see {_CONTEXT_PAGE}",
            stacklevel=2,
        )


def _warn_of_export(devices: int) -> None:
    if devices > 1:
        warnings.warn(
            f"attention in an exported program for {devices} devices: sharded arrays are gathered "
            "on every device. Pass sharding=packax.AttentionSharding(...), or call it in a "
            f"shard_map over all axes: see {page('Meshes')}",
            stacklevel=2,
        )


def _custom_call(
    primitive: Any, dims: Dims, avals: Sequence[Any], params: Any, kernels: bool
) -> Any:
    batch, biases, heads, kv_heads = (_size(letter, dims, avals) for letter in "behg")
    unread: frozenset[int] = frozenset() if kernels else dims.of_kernels
    read_operands = [n for n in range(len(avals)) if n not in unread]
    dims = dims._replace(
        operands=tuple(dims.operands[n] for n in read_operands),
        summed={result: read_operands.index(n) for result, n in dims.summed.items()},
    )

    def whole(*operands, bind=primitive.bind):
        by_index = dict(zip(read_operands, operands, strict=True))
        # Operands that only kernels read are replaced by a placeholder.
        all_operands = (by_index.get(n, operands[0]) for n in range(len(avals)))
        return tuple(bind(*all_operands, **params))

    def partition(mesh, arg_shapes, result_shapes):
        axes = _axes(mesh, dims, arg_shapes, result_shapes)
        _check_sequence(mesh, dims, arg_shapes, axes)
        # With fewer key/value heads or biases than devices, each device uses those that it reads.
        shared = []
        for letter, of, whole_size, size in (
            ("g", "h", heads, kv_heads),
            ("e", "b", batch, biases),
        ):
            read = _heads_read(whole_size, size, _pieces(mesh, axes[of]))
            if read is not None:
                shared.append((letter, size, axes[of], read))
                axes[letter] = ()

        sum_axes = {result: _reduced_axes(dims.results[result], axes) for result in dims.summed}
        local_call = whole
        of_keys = {letter: axes[letter] for letter in "kpo"}
        if dims.by_keys is not None and any(of_keys.values()):
            bind = functools.partial(dims.by_keys, primitive.bind, of_keys)
            local_call = functools.partial(whole, bind=bind)

        def local(*operands):
            with jax.sharding.use_abstract_mesh(_NO_MESH):  # pieces are not typed by the mesh
                widened = list(operands)  # of which gradients are summed over devices
                for result, n in dims.summed.items():
                    if sum_axes[result]:
                        widened[n] = widened[n].astype(accumulator(widened[n].dtype))
                results = list(of_pieces(*widened))
                for result, n in dims.summed.items():
                    if sum_axes[result]:
                        total = jax.lax.psum(results[result], sum_axes[result])
                        results[result] = total.astype(operands[n].dtype)
                return tuple(results)

        def of_pieces(*operands):
            spreads = []
            for letter, size, over, read in shared:
                own = read(jax.lax.axis_index(over))
                take = functools.partial(_take, own=own)
                operands = _map_shared(letter, dims.operands, operands, take)
                spread = functools.partial(_scatter_shared, own=own, size=size, axes=over)
                spreads.append((letter, spread))
            results = local_call(*operands)
            for letter, spread in spreads:
                results = _map_shared(letter, dims.results, results, spread)
            return results

        in_shardings = _shardings(mesh, axes, dims.operands)
        out_shardings = _shardings(mesh, axes, dims.results)
        return mesh, local, out_shardings, in_shardings

    def infer(mesh, arg_shapes, result_shapes):
        return _shardings(mesh, _axes(mesh, dims, arg_shapes, result_shapes), dims.results)

    call = custom_partitioning(lambda *operands: whole(*operands))  # without bind in its signature
    call.def_partition(partition, infer, decode_shardings=False, sharding_rule=shardy_rule(dims))
    return lambda *operands: call(*(operands[n] for n in read_operands))


def _reduced_axes(letters: str, axes: dict[str, Axes]) -> Axes:
    """The mesh axes of batch and heads, for those of the two that the result lacks."""
    letters = letters.replace("e", "b")
    return tuple(axis for of in "bh" if of not in letters for axis in axes[of])


def _size(letter: str, dims: Dims, avals: Sequence[Any]) -> int:
    sizes = (
        aval.shape[letters.index(letter)]
        for letters, aval in zip(dims.operands, avals, strict=True)
        if letter in letters
    )
    return next(sizes, 1)


def _pieces(mesh: Any, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _axes(mesh: Any, dims: Dims, arg_shapes: Any, result_shapes: Any) -> dict[str, Axes]:
    """The mesh axes of batch and heads, and of keys and pages if they may be sharded.

    For each, the axes of the first array whose dimension is sharded evenly.
    """
    axes: dict[str, Axes] = dict.fromkeys("bhgekpo", ())
    arrays = zip((*dims.operands, *dims.results), (*arg_shapes, *result_shapes), strict=True)
    known = [(letters, cuts(mesh, x), x.shape) for letters, x in arrays]
    for divided in dims.divided:
        for letter, cut, size in (one for x in known for one in zip(*x, strict=True)):
            of = {"g": "h", "e": "b"}.get(letter, letter)
            taken = {axis for of_letter in axes.values() for axis in of_letter}
            if of not in divided or axes[of] or not taken.isdisjoint(cut.axes):
                continue
            if cut.whole and size % cut.pieces == 0:
                axes[of] = cut.axes
    axes["g"], axes["e"] = axes["h"], axes["b"]
    return axes


def _shardings(mesh: Any, axes: dict[str, Axes], all_letters: Sequence[str]) -> tuple[Any, ...]:
    return tuple(
        NamedSharding(mesh, spec(*(axes.get(letter, ()) for letter in letters)))
        for letters in all_letters
    )


def _check_sequence(
    mesh: Any, dims: Dims, arg_shapes: Sequence[Any], axes: Mapping[str, Axes]
) -> None:
    """Rejects sharded rows, keys and pages, except those that are sharded over `axes`.

    For rows and keys it raises, unless the user asked for a gather. For pages it warns.
    """
    for letters, x in zip(dims.operands, arg_shapes, strict=True):
        for letter, cut in zip(letters, cuts(mesh, x), strict=True):
            if letter not in _SHARDED or cut.pieces == 1 or cut.axes == axes.get(letter, ()):
                continue
            text = _SHARDED["slices" if letter == "k" and dims.by_keys else letter]
            text = text.format(axes=", ".join(map(repr, cut.axes)))
            if letter in "sk" and os.environ.get(SEQUENCE_SWITCH) != "gather":
                raise ValueError(
                    f"{text}, or set {SEQUENCE_SWITCH}=gather to have it gathered on every device"
                )
            warnings.warn(f"{text}. It is gathered on every device", stacklevel=2)


def check_decode_types(query: Any, key: Any, value: Any, paged: bool) -> None:
    """Raises ValueError if array types show what `_check_sequence` would reject later."""
    tensors = {"query": query} | ({} if paged else {"key": key, "value": value})
    meshes = {name: jax.typeof(x).sharding.mesh for name, x in tensors.items()}
    several = {  # mesh axes of size above 1
        name: [tuple(a for a in axes if meshes[name].shape[a] > 1) for axes in typed_axes(x)]
        for name, x in tensors.items()
    }
    batch, _, heads, _ = several["query"]
    for name, (_, sequence, *_) in several.items():
        why = ""
        if not sequence:
            continue
        if name == "query":
            why = "a device attends to all new queries of a sequence"
        elif not {*batch, *heads}.isdisjoint(sequence):
            why = f"query is {jax.typeof(query)}, whose batch or heads have that axis"
        elif several["key"][1] not in ((), sequence):
            why = f"key is {jax.typeof(key)}, whose sequence axis has another"
        elif AxisType.Manual in meshes[name].axis_types:
            why = "this is a shard_map over other axes: map over this one, too, and join the parts "
            why += "by merge_attention"
        if why and os.environ.get(SEQUENCE_SWITCH) != "gather":
            raise ValueError(
                f"{name} is {jax.typeof(tensors[name])}: its sequence axis is sharded over "
                f"{', '.join(map(repr, sequence))}, but {why}. Reshard one of them "
                "(jax.sharding.reshard)"
            )


_CONTEXT = (
    f"for context parallelism pass sharding=packax.AttentionSharding(...): see {_CONTEXT_PAGE}"
)
_SHARDED = {
    "s": f"the sequence axis of query is sharded over {{axes}}: {_CONTEXT}",
    "k": f"the sequence axis of key and value is sharded over {{axes}}: {_CONTEXT}",
    "slices": "the sequence axis of key or value is sharded over {axes}, but unevenly, or over an "
    "axis that also shards the batch or heads, or differently in key and value: reshard them",
    **dict.fromkeys(
        "po",
        "the pages of key and value are sharded over {axes}, but unevenly, or differently in key "
        "and value: shard both in the same way",
    ),
}


def _heads_read(heads: int, kv_heads: int, pieces: int) -> Callable[[Any], jax.Array] | None:
    """A function from a device's index to the key/value heads (or biases) that it reads.

    None: they are divided evenly, so each device reads its own shard.
    """
    if kv_heads % pieces == 0:
        return None
    local, group = heads // pieces, heads // kv_heads
    step = math.gcd(local, group)
    return lambda index: (index * local + jnp.arange(0, local, step, dtype=jnp.int32)) // group


def _map_shared(
    letter: str, all_letters: Sequence[str], arrays: Any, function: Callable
) -> tuple[Any, ...]:
    """The arrays, with function(x, dim) applied to those with the letter, in dimension dim."""
    return tuple(
        function(x, letters.index(letter)) if letter in letters else x
        for x, letters in zip(arrays, all_letters, strict=True)
    )


def _take(x: jax.Array, dim: int, own: jax.Array) -> jax.Array:
    return jnp.take(x, own, axis=dim)


def _scatter_shared(x: jax.Array, dim: int, own: jax.Array, size: int, axes: Axes) -> jax.Array:
    """The gradients of all heads or biases, summed over the devices that read them."""
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    apart = jnp.zeros(shape, accumulator(x.dtype))
    apart = apart.at[(slice(None),) * dim + (own,)].add(x.astype(apart.dtype))
    return jax.lax.psum(apart, axes).astype(x.dtype)


def shardy_rule(dims: Dims) -> str:
    """The rule in Shardy's notation.

    Query heads and key/value heads are separate factors. As a single compound factor, they could be
    sharded only if the key/value heads are divisible. `partition` makes key/value heads follow.
    """
    names = (f"x{n}" for n in itertools.count())

    def text(all_letters: Sequence[str]) -> str:
        return ", ".join(
            " ".join(letter if letter in "bhge" else next(names) for letter in letters)
            for letters in all_letters
        )

    return f"{text(dims.operands)} -> {text(dims.results)}"


# --- How an array is sharded when XLA asks how to partition a call.


class Cut(NamedTuple):
    """How a dimension is sharded: over which mesh axes, major first, and into how many pieces.

    XLA may use part of an axis: two heads on an axis of four devices are two pieces, each on two
    devices. A PartitionSpec cannot express that, so jax cannot decode such shardings.
    """

    axes: Axes
    pieces: int
    whole: bool  # whether a PartitionSpec of these axes gives the same pieces


def cuts(mesh: Any, x: Any) -> tuple[Cut, ...]:
    """The cut of every dimension of an array, described by an arg_shape of XLA."""
    if x.sharding is None or isinstance(x.sharding, NamedSharding):
        # GSPMD asks before shardings are known; jax then fills in the mesh of its context.
        return (Cut((), 1, True),) * x.ndim
    # The number of pieces divides the number of devices. So for an array with one element per
    # device in every dimension, the first index on a device identifies the device's piece.
    indices = x.sharding.devices_indices_map((mesh.size,) * x.ndim)
    return tuple(
        _cut(mesh, np.asarray([indices[device][dim].start or 0 for device in mesh.devices.flat]))
        for dim in range(x.ndim)
    )


def _cut(mesh: Any, first: np.ndarray) -> Cut:
    """The cut of a dimension; `first`: the first index of each device, in an array of mesh.size."""
    first = first.reshape(mesh.devices.shape)
    number = len(np.unique(first)) if first.any() else 1
    steps = {  # the step of the index from one device to the next along each axis
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


# --- jax passes the devices only to lowering rules of programs whose primitives request them.

_devices_p = Primitive("packax_devices")
lower_with_devices(_devices_p)
_devices_p.def_impl(lambda x: x)
_devices_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_devices_p, lambda cotangent, x: [cotangent])
batching.defvectorized(_devices_p)
mlir.register_lowering(_devices_p, lambda ctx, x: [x])


def require_device_info(x: Any, *, untyped: bool = True) -> Any:
    """Returns x, and makes jax lower the program with known devices, so that XLA can partition it.

    Has no effect on an AbstractMesh and in a shard_map over all axes: such programs may be lowered
    without devices. `untyped`: whether it has an effect if no mesh is set and the type of x has
    none. Masks of constants need none, and do not know whether the attention is on an AbstractMesh.
    """
    context = jax.sharding.get_abstract_mesh()
    meshes = [mesh for mesh in (context, jax.typeof(x).sharding.mesh) if not mesh.empty]
    manual = not context.empty and all(kind == AxisType.Manual for kind in context.axis_types)
    abstract = any(mesh.abstract_device is None for mesh in meshes)
    if manual or abstract or not (meshes or untyped):
        return x
    return _devices_p.bind(x)
