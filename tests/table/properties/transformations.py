"""Properties of calls inside transformations of JAX, and of the program that is lowered."""

from __future__ import annotations

import contextlib
import functools
import re
import zlib
from typing import Any
from unittest import mock

import calls
import dense
import jax
import jax.export
import jax.numpy as jnp
import lowered
import numpy as np
import packax
from calls import Arrays, Call
from exported import restored
from lowered import Extension
from packax._src.core.schema import OPERANDS, TARGETS
from packax._src.ops import ffi, lowering, primitives
from packax.integrations import fallback
from ranks import over_rows

from properties.rows import (
    STEP,
    as_array,
    decodes,
    differences,
    jax_nn,
    mapped,
    of_each,
    ragged,
    reference,
    row,
)
from properties.values import compiled

x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
transformed = functools.partial(row, group="transformations")


@transformed("vmap")
def _(call):
    """Of every array, or with arrays that the mapped calls share: the tensors or the others."""
    both, stacked = mapped(call)
    names = [*both[0]]
    tensors = [name for name in names if name in calls.TENSORS]
    kinds = [], tensors[1:3], [name for name in names if name not in tensors], names[3:]
    if decodes(call):  # what a mapped length covers is in its cache
        kinds = [], names[1:], [], names[1:]
    shared = kinds[zlib.crc32(str(call).encode()) % len(kinds)]
    axes = {name: None if name in shared else 0 for name in names}
    arrays = {name: (both[0] if name in shared else stacked)[name] for name in names}
    each = [a | {name: both[0][name] for name in shared} for a in both]
    if not {*shared} & {*call.differentiable()}:
        return of_each(call, jax.jit(jax.vmap(call.step, in_axes=(axes,)))(arrays), each)

    @jax.jit
    def outside(a):  # the gradient of a shared array is a sum
        attend = jax.vmap(call.attend, in_axes=(axes,))
        along = {"dout": a["dout"], "dlse": a["dlse"]}
        along = {n: jnp.stack([x, x]) if n in shared else x for n, x in along.items()}
        return call.step(a | along, lambda x: attend(x | {n: a[n] for n in along}))

    got = outside(arrays)
    summed = {n: np.asarray(got.pop(n)) for n in [*got] if n.removeprefix("d") in shared}
    pairs = [call.references(a) for a in each]
    true, plain = ({n: sum(x[n] for x in y) for n in summed} for y in zip(*pairs, strict=True))
    return of_each(call, got, each) + dense.close(summed, true, plain, call.factor)


@transformed(
    "vmap of a mask's rows",
    lambda call: (
        decodes(call)
        or jax_nn(call)
        or (call.bias == "groups" and "mapped rows have a bias of their own")
        or (call.dropout != "none" and "mapped rows count from 0")
        or None
    ),
)
def _(call):
    """As Equinox maps a model of one row. The dense array of the mask is its definition."""
    a = call.arrays(1)
    mask = call.built(a)
    rows = functools.partial(over_rows, call.attend, call.labels())
    got = jax.jit(lambda a, mask: call.step(a, lambda x: rows(x, mask)))(a, mask)
    return differences(call, got, a) + as_array(call, lambda *_: jax.jit(mask.as_array)(), a)


@transformed("gradients in scan, with remat")
def _(call):
    both, stacked = mapped(call)
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
    attend = jax.checkpoint(call.attend, policy=keep)

    def layer(carry, a):
        return carry, call.step(a, attend)

    return of_each(call, jax.jit(lambda a: jax.lax.scan(layer, 0, a)[1])(stacked), both)


@transformed(
    "forward mode and second derivatives",
    lambda call: decodes(call) or (call.dtype != "float32" and "computed in float64") or None,
)
def _(call):
    """jvp, and one second derivative, in float64, against difference quotients of the reference.

    The second derivative is the jvp of the gradient or the gradient of the jvp, which are the same
    numbers, or the gradient of the gradient of half the sum of squares."""
    kind = ("jvp of grad", "grad of jvp", "grad of grad")[zlib.crc32(str(call).encode()) % 3]
    a = call.arrays(1)
    rng = np.random.default_rng(3)
    # A build with kernels has none for float64, where jax.nn's face would run jax.nn's own path.
    packax_takes_it = mock.patch.object(fallback, "has_kernels", lambda *_, **__: True)
    with x64(True), packax_takes_it:
        names = call.differentiable()
        a |= {name: np.asarray(a[name], np.float64) for name in (*names, "dout", "dlse")}
        along = {name: rng.standard_normal(np.shape(a[name])) for name in names}
        if "bias" in along:
            along["bias"] = np.where(np.isfinite(a["bias"]), along["bias"], 0)

        @jax.jit
        def derivatives(a, along):
            def function(x):
                out, *others = call.attend(a | x)
                lse = others[0] if others else jnp.zeros_like(a["dlse"])
                return out, jnp.where(jnp.isfinite(lse), lse, 0)

            operands = {name: a[name] for name in names}
            first = jax.jvp(function, (operands,), (along,))[1]

            def weighted(x):
                out, lse = jax.jvp(function, (x,), (along,))[1]
                return jnp.sum(out * a["dout"]) + jnp.sum(lse * a["dlse"])

            def gradient(x):
                found = call.step(a | x)
                return {name: found["d" + name] for name in names}

            def product(x):  # of the gradient and the direction
                found = jax.grad(lambda x: sum(jnp.sum(y**2) / 2 for y in function(x)))(x)
                return sum(jnp.sum(found[name] * along[name]) for name in names)

            if kind == "jvp of grad":
                return *first, jax.jvp(gradient, (operands,), (along,))[1]
            return *first, jax.grad(weighted if kind == "grad of jvp" else product)(operands)

        out, lse, second = derivatives(a, along)
    places = [a | {n: a[n] + s * along[n] for n in names} for s in (STEP, -STEP)]
    if kind == "grad of grad":
        results = [reference(call, x) for x in places]
        some = [np.where(np.isfinite(x["lse"]), x["lse"], 0) for x in results]
        given = zip(places, results, some, strict=True)
        places = [x | {"dout": y["out"], "dlse": lse} for x, y, lse in given]
    near = [reference(call, x) for x in places]
    slopes = {name: _slope(near[0][name], near[1][name]) for name in near[0]}
    wrong = []
    first = {"out": out} | ({} if call.function == "jax.nn" else {"lse": lse})
    results = ("jvp", first), (kind, {"d" + n: x for n, x in second.items()})
    for kind, found in results:
        for name, x in found.items():
            error, size = (np.abs(y).max(initial=0) for y in (x - slopes[name], slopes[name]))
            if not error <= 1e-6 * max(size, 1):
                wrong.append(f"{kind} {name}: error {error:.3g} of {size:.3g}")
    return wrong


def _slope(x: Any, y: Any) -> Any:
    finite = np.isfinite(x) & np.isfinite(y)
    return np.where(finite, np.where(finite, x, 0) - np.where(finite, y, 0), 0) / (2 * STEP)


@transformed("strict dtypes and ranks")
def _(call):
    """Strict promotion, and 64-bit types where jax has them, change no dtype. Not compiled, but for
    the dense array of the expression, which has the pairs of its definition also when traced."""
    a = call.arrays(1)
    wanted = jax.eval_shape(call.step, a)
    wrong = []
    for name, mode in MODES.items():
        with mode():
            step = jax.jit(call.step).trace(a)  # the rules of primitives run in lower()
            found = step.out_info
            step.lower()
            jax.jit(jax.vmap(call.step)).lower({name: x[None] for name, x in a.items()})
            if not decodes(call):
                jax.eval_shape(lambda a: traced_array(call, a), a)
        wrong += [f"{name}: {n} {found[n]}" for n in wanted if found[n].dtype != wanted[n].dtype]
    if decodes(call):
        return wrong
    return wrong + as_array(call, lambda *_: jax.jit(lambda a: traced_array(call, a))(a), a)


def traced_array(call: Call, a: Arrays) -> Any:
    return jnp.asarray(call.expression(a).as_array(a["query"].shape[1], a["key"].shape[1]))


MODES = {
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "64 bits": lambda: x64(True),
}


@transformed(
    "export of symbolic sizes",
    lambda call: (
        ragged(call)
        or (decodes(call) and call.shared and "groups of a symbolic batch")
        or (not decodes(call) and call.bias == "groups" and "groups of a symbolic batch")
        or None
    ),
)
def _(call):
    """The program of unknown batch and lengths, after serialization, with other sizes."""
    a = call.arrays(1)
    b, q, k, p, n = jax.export.symbolic_shape("b, q, k, p, n")
    cross = decodes(call) or a["query"].shape[1] != a["key"].shape[1]
    sizes = {"b": b, "q": q, "k": k if cross else q, "p": p, "n": n}
    labels = call.labels()
    shapes = {}
    for name, x in a.items():
        axes = [sizes.get(at, n) for at, n in zip(labels[name], x.shape, strict=True)]
        if name == "blocks":
            axes[2:] = [-(-sizes[at] // n) for at, n in zip("qk", call.block, strict=True)]
        shapes[name] = jax.ShapeDtypeStruct(axes, x.dtype)
    export = jax.export.export(jax.jit(call.step), disabled_checks=packax.export_checks())
    program = restored(export(shapes))
    longer = call.longer()
    a = longer.arrays(1)
    return differences(longer, program.call(a), a)


@transformed(
    "program for CUDA",
    lambda call: (
        decodes(call)
        or (call.dims == "8x12" and "kernels have multiples of 8")
        or (call.dtype == "float32" and call.function == "jax.nn" and "a dense mask in float32")
        or None
    ),
)
def _(call):
    """Both passes are kernels, in the text that a machine without a GPU lowers, with the operands
    of the call in the shapes of the schema."""
    jax.clear_caches()
    with mock.patch.object(ffi, "ext", Extension):
        found = lowered.calls(lowered.text_of(call.step, call.arrays(1)))
    targets = [target for target, *_ in found]
    passes = [one for one in found if "ward" in one[0]]
    if [target for target, *_ in passes] != ["packax_forward_v1", "packax_backward_v1"]:
        return [f"calls {targets}"]
    given = {
        "scales": call.scale == "array" or call.bias == "alibi",
        "slopes": call.bias == "alibi",
        "sinks": call.sinks != "none",
        "bias": call.bias in calls.BIASES,
        "dropout_streams": call.dropout != "none",
        "block_mask": "block" in call.selector
        or call.selector in calls.TREES
        or call.function == "jax.nn",
    }
    wrong = [line for one in passes for line in other_shapes(one)]
    for one in passes:
        of = lowered.by_name(one)
        for name in {*given} & {*of}:
            if (of[name] != lowered.ABSENT) != given[name]:
                wrong.append(f"{name} is {'left out' if given[name] else 'an operand'}")
    return wrong


def other_shapes(call: Any) -> list[str]:
    """Operands and results whose sizes are not those of the schema."""
    target = TARGETS[call[0].removeprefix("packax_").removesuffix("_v1")]
    rows = {x.name: x.shape for x in (*OPERANDS, *target.results)}
    found = lowered.by_name(call) | dict(
        zip((x.name for x in target.results), call[3], strict=True)
    )
    found = {name: kind.split("x")[:-1] for name, kind in found.items() if kind != lowered.ABSENT}
    # The first limit is in the place of ids and positions that are not read.
    unread = {"0": ("_ids", "_pos"), "1": ("_pos",)}.get(call[1]["mask_mode"][0], ())
    found = {name: of for name, of in found.items() if name[-4:] not in unread}
    sizes: dict[str, str] = {}
    wrong = []
    for name, of in found.items():
        names = rows[name].removeprefix("(").split(")")[0].split(", ")
        if like := re.match(r"like (\w+)", rows[name]):
            names = found[like[1]]
            if name == "q_pos" and call[1]["mask_mode"][0] == "3":  # two limits
                names = [names[0], "2", names[1]]
        if name == "q_pos" and len(names) != len(of):
            wrong.append(f"{call[0]} {name}: has {len(of)} axes")
        for size, n in zip(names, of, strict=False):
            known = sizes.setdefault(size, n) if size.isidentifier() else size
            if re.fullmatch(r"\w+", size) and n != known:
                wrong.append(f"{call[0]} {name}: {size} is {n}, not {known}")
    return wrong


@transformed("rewrites for the kernels", decodes)
def _(call):
    """The forms into which `lowering` rewrites calls for CUDA, all that apply at once, in XLA."""
    a = call.arrays(1)
    q_len, kv_len = call.sizes()
    kv_heads, group = a["key"].shape[2], a["query"].shape[2] // a["key"].shape[2]
    dims, applied = (24, 32), set()

    def rewritten(direction, spec, x):
        rewrites = {
            "padded": (x.query.shape[3] < dims[0], dims),
            "in_parts": (direction == "backward" and x.key.shape[2] == kv_heads, group),
            "with_keys": (x.bias is not None and x.key.shape[1] == kv_len, kv_len + 5),
            "packed": (packable(spec, x), None),
        }
        for name, (applies, argument) in rewrites.items():
            if applies and not (name == "in_parts" and group == 1):
                applied.add(name)
                return getattr(lowering, name)(direction, spec, x, argument)
        return bind[direction](spec, x)

    def packable(spec, x):
        sizes = max(q_len, kv_len) <= 64 and x.query.shape[0] > 1
        return sizes and not x.optional_operands and not spec.block_size

    bind = {name: getattr(primitives, name) for name in ("forward", "backward")}
    jax.clear_caches()  # of traces without and with the rewrites
    compiled.cache_clear()
    with contextlib.ExitStack() as patches:
        for name in bind:
            new = functools.partial(rewritten, name)
            patches.enter_context(mock.patch.object(primitives, name, new))
        got = jax.jit(call.step)(a)
    jax.clear_caches()
    return differences(call, got, a) + ([] if "padded" in applied else ["nothing is rewritten"])
