"""The rows of the table: what must hold for every call. A property runs a call in some way, and
returns what is wrong with the results; `reason` says where it does not apply."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
import zlib
from collections.abc import Callable
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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import Extension
from packax._src.ops import ffi, lowering, primitives
from packax.integrations import fallback
from plain_jit import MOVES, collectives
from ranks import ALONE, OverRanks, odd, or_zigzag, placed, why_not

x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
GARBAGE = 1e4  # finite in float16
STEP = 1e-5  # of difference quotients
Reason = Callable[[Call], str | None]


@dataclasses.dataclass(frozen=True)
class Property:
    name: str
    check: Callable[[Call], list[str]]
    reason: Reason
    multiple: int  # of the lengths
    calls: str  # rows with the same word here get the same calls
    group: str  # rows with the same word here share calls each time: cover.py
    ranks: bool  # whether the feature "ranks" of a call has a meaning


PROPERTIES: dict[str, Property] = {}


def decodes(call: Any) -> str | None:
    one = call.function in ("decode", "ragged")
    return "decoding has no gradients and no plans" if one else None


def ragged(call: Any) -> str | None:
    return "the sizes of a packed step are static" if call.function == "ragged" else None


def jax_nn(call: Any) -> str | None:
    return "jax.nn has no such argument" if call.function == "jax.nn" else None


def row(
    name: str, reason: Reason = lambda call: None, multiple: int = 1, calls: str | None = None,
    group: str = "", ranks: bool = False,
) -> Any:  # fmt: skip
    """Adds a property to the table."""

    def add(check: Callable[[Call], list[str]]) -> Callable[[Call], list[str]]:
        row = Property(name, check, reason, multiple, calls or name, group or name, ranks)
        PROPERTIES[name] = row
        return check

    return add


class Program:
    """The results and gradients of a call, with the expression or a built mask as an argument, and
    donated tensors."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.traced = 0
        self.step = jax.jit(self._step, donate_argnums=0)

    def _step(self, donated: Arrays, others: Arrays, mask: Any) -> dict[str, Any]:
        self.traced += 1
        call = self.call
        return call.step(others | donated, functools.partial(call.attend, mask=mask))

    def __call__(self, a: Arrays) -> dict[str, Any]:
        call = self.call
        inside = decodes(call) or call.mask == "stacked"  # the step builds the mask
        mask = None if inside else call.expression(a)
        if mask is not None and call.mask == "built":
            lengths = {"q_len": a["query"].shape[1], "kv_len": a["key"].shape[1]}
            mask = packax.create_attention_mask(mask, **lengths)
        donated = {name: jnp.asarray(a[name]) for name in ("query", "key", "value")}
        others = {name: x for name, x in a.items() if name not in donated}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self.step(donated, others, mask)


compiled = functools.lru_cache(maxsize=32)(Program)  # for the rows that only change values
values = functools.partial(row, calls="values", group="values")
transformed = functools.partial(row, group="transformations")
sharded = functools.partial(row, group="meshes")


def differences(call: Call, got: Any, a: Arrays, where: str = "") -> list[str]:
    return [f"{where}{line}" for line in call.wrong(got, a)]


def unequal(got: dict[str, Any], want: dict[str, Any], where: str) -> list[str]:
    """Names of results whose bits differ."""
    pairs = {name: (np.asarray(got[name]), np.asarray(want[name])) for name in want}
    bits = {name: [x.view(f"u{x.itemsize}") for x in pair] for name, pair in pairs.items()}
    return [f"{where}{name}" for name, (x, y) in bits.items() if not np.array_equal(x, y)]


@values("equals the reference")
def _(call):
    a = call.arrays(1)
    wrong = differences(call, compiled(call)(a), a)
    return wrong if decodes(call) else wrong + as_array(call, call.expression(a).as_array, a)


def as_array(call: Call, given: Any, a: Arrays) -> list[str]:
    """The dense array of the expression is its definition."""
    pairs = dense.four_axes(given(a["query"].shape[1], a["key"].shape[1]))
    same = np.array_equal(*np.broadcast_arrays(pairs, call.defined(a)))
    return [] if same else ["as_array is another mask"]


@values("same bits twice")
def _(call):
    a = call.arrays(1)
    first, second = (compiled(call)(a) for _ in range(2))
    return unequal(first, second, "other bits: ")


@values(
    "finite garbage where nothing is attended",
    lambda call: decodes(call) and "keys that decoding must not read are NaN in every cell",
)
def _(call):
    """The same bits, and the cotangents of idle queries are ignored. Then garbage in a few keys and
    queries: the same numbers in all others that do not attend to these."""
    a = call.arrays(1)
    allowed = call.allowed(a)
    if "bias" in a:
        bias = a["bias"] != -np.inf
        allowed = allowed & np.repeat(bias, call.batch // len(bias), 0)
    heads, kv_heads = a["query"].shape[2], a["key"].shape[2]
    allowed = np.broadcast_to(allowed, (call.batch, heads, *allowed.shape[2:]))
    queries = ~allowed.any(-1).swapaxes(1, 2)  # (B, Sq, H)
    keys = ~of_groups(allowed.any(2), kv_heads)  # (B, Skv, Hkv)
    dirty = with_garbage(a, queries, keys)
    dirty["dlse"] = np.where(queries.swapaxes(1, 2), -GARBAGE, a["dlse"])
    if "bias" in a:
        dirty["dout"] = np.where(queries[..., None], np.nan, a["dout"]).astype(a["dout"].dtype)
    got, want = compiled(call)(dirty), compiled(call)(a)
    wrong = differences(call, got, a) + unequal(got, want, "other bits: ")

    rng = np.random.default_rng(2)
    some = [rng.permutation(np.arange(n) < 3) for n in allowed.shape[2:]]
    queries, keys = (
        np.broadcast_to(x[:, None], y.shape) for x, y in zip(some, (queries, keys), strict=True)
    )
    got = compiled(call)(with_garbage(a, queries, keys))
    rows = allowed[..., some[1]].any(-1) | some[0]  # (B, H, Sq)
    reached = of_groups((allowed & rows[..., None]).any(2), kv_heads) | keys
    of_rows, of_keys = {"out", "dquery"}, {"dkey", "dvalue"}
    for name in of_rows | of_keys:
        others = ~(rows.swapaxes(1, 2) if name in of_rows else reached)
        same = np.array_equal(np.asarray(got[name])[others], np.asarray(want[name])[others])
        wrong += [] if same else [f"{name} depends on what is not attended"]
    return wrong


def of_groups(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """(B, H, S) to (B, S, Hkv): whether it holds in any head of a group."""
    return x.reshape(len(x), kv_heads, -1, x.shape[2]).any(2).swapaxes(1, 2)


def with_garbage(a: Arrays, queries: np.ndarray, keys: np.ndarray) -> Arrays:
    places = {"query": queries, "dout": queries, "key": keys, "value": keys}
    return a | {
        name: np.where(place[..., None], GARBAGE, a[name]).astype(a[name].dtype)
        for name, place in places.items()
    }


@values(
    "NaN stays in its row and head",
    lambda call: decodes(call) and "sequences may share pages",
)
def _(call):
    a = call.arrays(1)
    kv_heads = a["key"].shape[2]
    group = a["query"].shape[2] // kv_heads
    dirty = {name: np.array(x) for name, x in a.items()}
    for name, head in (("query", 0), ("key", 0), ("value", 0), ("dout", 0)):
        dirty[name][0, :, head] = np.nan
    got, want = compiled(call)(dirty), compiled(call)(a)
    heads = {"out": group, "dquery": group, "dkey": 1, "dvalue": 1}
    wrong = []
    for name, of in heads.items():
        x, y = (np.array(z[name], np.float32) for z in (got, want))
        x[0, :, :of] = y[0, :, :of] = 0
        wrong += [] if np.array_equal(x, y) else [f"{name} of another row or head"]
    if "lse" not in got:
        return wrong
    x, y = (np.array(z["lse"], np.float32) for z in (got, want))
    x[0, :group] = y[0, :group] = 0
    return wrong + ([] if np.array_equal(x, y) else ["lse of another row or head"])


@values("extreme values")
def _(call):
    """Zeros, logits in the hundreds, and a cotangent of zero."""
    a = call.arrays(1)
    wrong = []
    for name, scale in (("query", 0), ("query", 60), ("dout", 0)):
        if name not in a:
            continue
        other = a | {name: (scale * a[name]).astype(a[name].dtype)}
        got = compiled(call)(other)
        if scale == 60:  # the gradients lose accuracy: docs/guide/numerics.md
            got = {n: x for n, x in got.items() if n in ("out", "lse", "top")}
        wrong += differences(call, got, other, f"{name} times {scale}: ")
    return wrong


@values("one program for other values")
def _(call):
    a = call.arrays(2)
    program = compiled(call)
    wrong = differences(call, program(a), a)
    program(call.arrays(3))
    return wrong + ([] if program.traced == 1 else [f"traced {program.traced} times"])


def mapped(call: Call) -> tuple[list[Arrays], Arrays]:
    """Operands of two calls, and both stacked."""
    both = [call.arrays(seed) for seed in (1, 2)]
    return both, {name: np.stack([a[name] for a in both]) for name in both[0]}


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
        return _each(call, jax.jit(jax.vmap(call.step, in_axes=(axes,)))(arrays), each)

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
    return _each(call, got, each) + dense.close(summed, true, plain, call.factor)


def _each(call: Call, got: Any, both: list[Arrays]) -> list[str]:
    parts = [{name: x[n] for name, x in got.items()} for n in range(len(both))]
    return [line for n, a in enumerate(both) for line in differences(call, parts[n], a, f"{n}: ")]


@transformed("gradients in scan, with remat")
def _(call):
    both, stacked = mapped(call)
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
    attend = jax.checkpoint(call.attend, policy=keep)

    def layer(carry, a):
        return carry, call.step(a, attend)

    return _each(call, jax.jit(lambda a: jax.lax.scan(layer, 0, a)[1])(stacked), both)


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
        results = [_reference(call, x) for x in places]
        some = [np.where(np.isfinite(x["lse"]), x["lse"], 0) for x in results]
        given = zip(places, results, some, strict=True)
        places = [x | {"dout": y["out"], "dlse": lse} for x, y, lse in given]
    near = [_reference(call, x) for x in places]
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


def _reference(call: Call, a: Arrays) -> Any:
    a = a | {name: np.asarray(a[name], np.float64) for name in (*call.differentiable(), "dout")}
    return dense.true_of(call.operands(a), call.allowed(a), **call.options(a))


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
            axes[2:] = [-(-sizes[at] // n) for at, n in zip("qk", calls.BLOCK, strict=True)]
        shapes[name] = jax.ShapeDtypeStruct(axes, x.dtype)
    program = restored(jax.export.export(jax.jit(call.step))(shapes))
    longer = call.longer()
    a = longer.arrays(1)
    return differences(longer, program.call(a), a)


def mesh_of(kind: str, names: tuple[str, str]) -> Any:
    types = (getattr(AxisType, kind),) * 2
    return jax.make_mesh((2, 2), names, devices=jax.devices("cpu")[:4], axis_types=types)


def specs(call: Call, axes: dict[str, str]) -> dict[str, P]:
    """The spec of each array. `axes`: the mesh axis of each label."""
    kv_heads = int(call.heads.split("/")[1])
    axes = dict(axes)
    if "h" in axes and kv_heads % 2 == 0:
        axes["g"] = axes["h"]
    labels = call.labels()
    if zlib.crc32(str(call).encode()) % 2:  # the arrays of options arrive unsharded
        labels |= {name: "" for name in ("sinks", "slopes") if name in labels}
    return {name: P(*(axes.get(at) for at in axes_of)) for name, axes_of in labels.items()}


def on_mesh(call: Call, kind: str, axes: dict[str, str], names: tuple[str, str]) -> list[str]:
    a = call.arrays(1)
    mesh = mesh_of(kind, names)
    of = specs(call, axes)
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, jax.NamedSharding(mesh, of[n])) for n, x in a.items()}
        compiled = jax.jit(call.step).lower(placed).compile()
        got = compiled(placed)
    wrong = differences(call, got, a)
    if kind == "Auto" and not decodes(call):  # gradients may be summed, and nothing else moves
        wrong += [f"{what} in the program" for what in {*collectives(compiled)} & {*MOVES}]
    return wrong + (other_types(call, got, placed) if kind == "Explicit" else [])


def other_types(call: Call, got: Any, placed: Any) -> list[str]:
    """Results that are not sharded as the operands are."""
    pairs = {"out": "dout", "lse": "dlse"} | {"d" + n: n for n in call.differentiable()}
    pairs = {"out": "query"} if decodes(call) else pairs
    wrong = []
    for name, like in [(n, like) for n, like in pairs.items() if n in got]:
        x, y = (jax.typeof(z).sharding.spec for z in (got[name], placed[like]))
        if x != y:
            wrong.append(f"{name} is sharded as {x}, not as {like}, {y}")
    return wrong


@sharded("plain jit on a mesh")
def _(call):
    return on_mesh(call, "Auto", {"b": "data", "h": "tensor"}, ("data", "tensor"))


@sharded("explicit mesh")
def _(call):
    return on_mesh(call, "Explicit", {"b": "data", "h": "tensor"}, ("data", "tensor"))


@sharded(
    "derivatives on an explicit mesh",
    lambda call: decodes(call) or (call.dtype != "float32" and "of float32") or None,
)
def _(call):
    a, mesh = call.arrays(1), mesh_of("Explicit", ("data", "tensor"))
    of = specs(call, {"b": "data", "h": "tensor"})
    with jax.set_mesh(mesh):
        placed = [
            {n: jax.device_put(x, jax.NamedSharding(mesh, of[n])) for n, x in given.items()}
            for given in (a, direction(call, a))
        ]
        found = jax.jit(lambda a, along: directional(call, a, call.attend, along))(*placed)
    return of_direction(call, a, found)


def direction(call: Call, a: Arrays) -> Arrays:
    rng = np.random.default_rng(3)
    return {n: rng.standard_normal(np.shape(a[n])).astype("float32") for n in call.differentiable()}


def directional(call: Call, a: Arrays, attend: Any, along: Arrays) -> Any:
    """The jvp of the results and that of the gradients, each as one number: the product of the
    cotangents with the first is that of the gradients with the direction."""
    along = {n: jnp.where(jnp.isfinite(a[n]), x, 0) for n, x in along.items()}
    operands = {name: a[name] for name in along}

    def function(x):
        out, *others = attend(a | x)
        return out, [jnp.where(jnp.isfinite(lse), lse, 0) for lse in others[:1]]

    def gradients(x):
        found = call.step(a | x, attend)
        return {name: found["d" + name] for name in along}

    out, lse = jax.jvp(function, (operands,), (along,))[1]
    second = jax.jvp(gradients, (operands,), (along,))[1]
    first = (out * a["dout"]).sum() + sum((x * a["dlse"]).sum() for x in lse)
    return first, sum((second[n] * along[n]).sum() for n in along)


def of_direction(call: Call, a: Arrays, found: Any) -> list[str]:
    """What is wrong with the numbers of `directional`, in float32."""
    along = {n: np.where(np.isfinite(a[n]), x, 0) for n, x in direction(call, a).items()}
    moved = (
        {n: np.asarray(a[n], np.float64) + s * along[n] for n in along} for s in (0, STEP, -STEP)
    )
    near = [_reference(call, a | x) for x in moved]
    sums = [sum((x["d" + n] * along[n]).sum() for n in along) for x in near]
    wanted = sums[0], (sums[1] - sums[2]) / (2 * STEP)
    wrong = []
    for order, x, y in zip(("first", "second"), found, wanted, strict=True):
        if not abs(float(x) - y) <= 1e-3 * max(abs(y), 5):
            wrong.append(f"{order} derivative {float(x):.5g}, not {y:.5g}")
    return wrong


@sharded(
    "explicit mesh, sharded sequence",
    lambda call: (
        jax_nn(call)
        or (decodes(call) and call.paged and "pages are gathered")
        or (ragged(call) and "the sequences of dense caches are gathered, like pages")
        or (not decodes(call) and call.mask != "expression" and "its ids would be sharded too")
        or None
    ),
    multiple=2,
)
def _(call):
    axes = {"b": "data", "q": "context", "k": "context"}
    a = call.arrays(1)
    mesh = mesh_of("Explicit", ("data", "context"))
    tensors = {*calls.TENSORS, "bias"}
    of = specs(call, axes)
    of = {n: s if n in tensors else specs(call, {})[n] for n, s in of.items()}
    if odd(call) and not decodes(call):  # every device has all keys
        of |= {n: P("data", *[None] * 3) for n in ("key", "value")}
    if "bias" in of:  # as query: keys whole
        of["bias"] = P(*of["bias"][:3])
    with jax.set_mesh(mesh):
        on_devices = {n: jax.device_put(x, jax.NamedSharding(mesh, of[n])) for n, x in a.items()}
        got = jax.jit(functools.partial(call.step, places=placed(call, a)))(on_devices)
    tensors = ({n: got[n] for n in ("out", "dquery", "dkey", "dvalue") if n in got}, on_devices)
    return differences(call, got, a) + other_types(call, *tensors)


@sharded(
    "shard_map over batch and heads",
    lambda call: (
        not decodes(call) and call.dropout != "none" and "each device counts rows and heads from 0"
    ),
)
def _(call):
    a = call.arrays(1)
    mesh = mesh_of("Auto", ("data", "tensor"))
    if int(call.heads.split("/")[1]) % 2:
        return on_mesh(call, "Auto", {"b": "data"}, ("data", "tensor"))
    of = specs(call, {"b": "data", "h": "tensor"})
    of |= {name: P("tensor") for name in ("sinks", "slopes") if name in of}
    results = P("data", None, "tensor"), P("data", "tensor"), P("data", "tensor")
    results = results[: {"jax.nn": 1, "decode": 2}.get(call.function, 3)]
    if ragged(call):
        results = P(None, "tensor"), P("tensor")
    mapped = jax.shard_map(call.attend, mesh=mesh, in_specs=(of,), out_specs=results)
    return differences(call, jax.jit(lambda a: call.step(a, mapped))(a), a)


def no_plan(call: Call) -> str | None:
    if jax_nn(call) or decodes(call):
        return jax_nn(call) or decodes(call)
    if call.bias in ("shared", "groups") and call.rows == "own masks":
        return "a plan for each row needs a bias for each row"
    return "a plan permutes queries and keys alike" if len(set(call.sizes())) > 1 else None


def no_local_plan(call: Call) -> str | None:
    if decodes(call):
        return decodes(call)
    if call.dropout != "none" or call.bias in calls.BIASES:
        return "refused: a bias array or dropout with a local plan"
    return no_plan(call)


over_ranks = functools.partial(row, group="ranks", ranks=True)


@over_ranks("context plan", lambda x: no_plan(x) or why_not(x, "plan"), multiple=512)
def _(call):
    return OverRanks(call, or_zigzag(call, "balanced")).wrong()


@over_ranks("local context plan", lambda x: no_local_plan(x) or why_not(x, "local"), multiple=512)
def _(call):
    program = OverRanks(call, "local")
    local = call.selector in ("documents", "positions") and call.ranks not in ALONE
    ranks = int(np.prod([program.at.mesh[axis] for axis in program.at.context]))
    local &= int(np.sum(program.plan.shared)) * ranks < call.sizes()[0]  # not all rows are shared
    wrong = program.wrong()
    return wrong + (["no private part"] if local and program.built.private_part is None else [])


@over_ranks(
    "context parallelism without a plan",
    lambda x: jax_nn(x) or decodes(x) or why_not(x, None),
    multiple=4,
)
def _(call):
    return OverRanks(call, None).wrong()


def no_halos(call: Call) -> str | None:
    if decodes(call) or jax_nn(call):
        return decodes(call) or jax_nn(call)
    if call.bias in calls.BIASES or call.dropout != "none":
        return "a bias array or dropout reads all keys"
    if call.interval == "window":
        return "halos on both sides are as long as all keys of rows as short as these"
    if call.interval not in ("left", "chunked", "union"):
        return "only windows and chunks have halos"
    if call.selector not in ("none", "documents", "positions", "ranges"):
        return "their windows are not of the order of the tokens"
    return "self-attention alone" if len(set(call.sizes())) > 1 else why_not(call, "halos")


@over_ranks("context parallelism with halos", no_halos, multiple=512)
def _(call):
    program = OverRanks(call, or_zigzag(call, None))
    return program.wrong() + ([] if program.built.halo is not None else ["no halo"])


def kinds_of(call: Call) -> dict[str | None, str | None]:
    """Why each kind of plan does not apply."""
    return {
        "plan": no_plan(call) or why_not(call, "plan"),
        "local": no_local_plan(call) or why_not(call, "local"),
        "halos": no_halos(call),
        None: jax_nn(call) or decodes(call) or why_not(call, None),
    }


@over_ranks(
    "derivatives over ranks",
    lambda call: (
        decodes(call)
        or (call.dtype != "float32" and "of float32")
        or (all((whys := kinds_of(call)).values()) and whys[None])
        or None
    ),
    multiple=512,
)
def _(call):
    kinds = [kind for kind, why in kinds_of(call).items() if not why]
    kind = kinds[zlib.crc32(str(call).encode()) % len(kinds)]
    program = OverRanks(call, {"plan": "balanced", "halos": None}.get(kind, kind))
    a = program.arrays
    found, _ = program.run(functools.partial(directional, call), direction(call, a))
    return of_direction(call, a, found)


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
    """Both passes are kernels, in the text that a machine without a GPU lowers."""
    jax.clear_caches()
    with mock.patch.object(ffi, "ext", Extension):
        found = [target for target, *_ in lowered.calls(lowered.text_of(call.step, call.arrays(1)))]
    passes = [name for name in found if "ward" in name]
    return [] if passes == ["packax_forward_v1", "packax_backward_v1"] else [f"calls {found}"]


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
