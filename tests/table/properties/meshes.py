"""Properties of calls on meshes that shard the batch, the heads or the sequence."""

from __future__ import annotations

import contextlib
import functools
import zlib
from typing import Any

import calls
import jax
from calls import Call
from jax.sharding import PartitionSpec as P
from plain_jit import MOVES, OF_ROWS, collectives, mesh_of, specs
from ranks import odd, placed

from properties.rows import (
    decodes,
    differences,
    direction,
    directional,
    jax_nn,
    mapped,
    of_direction,
    of_each,
    ragged,
    row,
)

sharded = functools.partial(row, group="meshes")


def entered(call: Call, kind: str, mesh: Any) -> Any:
    """The mesh is set, entered, or only that of the operands."""
    ways = [jax.set_mesh, lambda _: contextlib.nullcontext(), lambda mesh: mesh]
    return ways[zlib.crc32(str(call).encode()) // 2 % (3 if kind == "Auto" else 2)](mesh)


def on_mesh(call: Call, kind: str, axes: dict[str, str], names: tuple[str, str]) -> list[str]:
    a = call.arrays(1)
    # jax before 0.9 types what a lowering rule traces on one device.
    one = kind == "Explicit" and odd(call) and jax.__version_info__ >= (0, 9)
    mesh = mesh_of(kind, (1, 1) if one else (2, 2), names)
    of = specs(call, axes)
    with entered(call, kind, mesh):
        placed = {n: jax.device_put(x, jax.NamedSharding(mesh, of[n])) for n, x in a.items()}
        compiled = jax.jit(call.step).lower(placed).compile()
        got = compiled(placed)
    wrong = differences(call, got, a)
    if kind == "Auto" and not decodes(call):
        wrong += moves(compiled)
    return wrong + (other_types(call, got, placed) if kind == "Explicit" else [])


def moves(compiled: Any) -> list[str]:
    """Gradients may be summed, and nothing else moves."""
    return [f"{what} in the program" for what in {*collectives(compiled)} & {*MOVES}]


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


@sharded("vmap on a mesh")
def _(call):
    """Over the mapped axis, or over the batch of explicit axes, before which it is placed."""
    both, stacked = mapped(call)
    first = "data" if odd(call) else None
    mesh = mesh_of("Auto" if first else "Explicit", (2, 2))
    of = specs(call, {"h": "tensor"} | ({} if first else OF_ROWS))
    of = {n: jax.NamedSharding(mesh, P(first, *spec)) for n, spec in of.items()}
    with jax.set_mesh(mesh):
        placed = jax.device_put(stacked, of)
        step = jax.vmap(call.step, spmd_axis_name=first)
        compiled = jax.jit(step).lower(placed).compile()
        wrong = of_each(call, compiled(placed), both)
    return wrong + (moves(compiled) if first and not decodes(call) else [])


@sharded("plain jit on a mesh")
def _(call):
    return on_mesh(call, "Auto", OF_ROWS | {"h": "tensor"}, ("data", "tensor"))


@sharded("explicit mesh")
def _(call):
    return on_mesh(call, "Explicit", OF_ROWS | {"h": "tensor"}, ("data", "tensor"))


@sharded(
    "derivatives on an explicit mesh",
    lambda call: decodes(call) or (call.dtype != "float32" and "of float32") or None,
)
def _(call):
    a, mesh = call.arrays(1), mesh_of("Explicit", (2, 2))
    of = specs(call, {"b": "data", "h": "tensor"})
    with jax.set_mesh(mesh):
        placed = [
            {n: jax.device_put(x, jax.NamedSharding(mesh, of[n])) for n, x in given.items()}
            for given in (a, direction(call, a))
        ]
        found = jax.jit(lambda a, along: directional(call, a, call.attend, along))(*placed)
    return of_direction(call, a, found)


@sharded(
    "explicit mesh, sharded sequence",
    lambda call: (
        jax_nn(call)
        or (not decodes(call) and call.mask != "expression" and "its ids would be sharded too")
        or None
    ),
    multiple=2,
)
def _(call):
    axes = OF_ROWS | dict.fromkeys("qtko", "context")
    a = call.arrays(1)
    mesh = mesh_of("Explicit", (2, 2), ("data", "context"))
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
    mesh = mesh_of("Auto", (2, 2))
    of = specs(call, {"b": "data", "h": "tensor"})
    of |= {name: P("tensor") for name in ("sinks", "slopes") if name in of}
    results = P("data", None, "tensor"), P("data", "tensor"), P("data", "tensor")
    results = results[: {"jax.nn": 1, "decode": 2}.get(call.function, 3)]
    if ragged(call):
        results = P(None, "tensor"), P("tensor")
    if odd(call) and not decodes(call):  # its gradients are computed on each device, too
        found = dict(zip(("out", "lse", "top"), results, strict=False))
        found |= {"d" + name: of[name] for name in call.differentiable()}
        step = jax.shard_map(call.step, mesh=mesh, in_specs=(of,), out_specs=found)
        return differences(call, jax.jit(step)(a), a)
    attend = jax.shard_map(call.attend, mesh=mesh, in_specs=(of,), out_specs=results)
    return differences(call, jax.jit(lambda a: call.step(a, attend))(a), a)
