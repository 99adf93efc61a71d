"""Context parallelism of a call: on which mesh, with which plan, inside which transformation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import zlib
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import packax
from calls import Arrays, Call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from local_plans import greedy


@dataclasses.dataclass(frozen=True)
class Ranks:
    mesh: dict[str, int]
    context: tuple[str, ...] = ("context",)
    heads: tuple[Any, Any] = (None, None)  # mesh axes of those of query; of key and value
    run: str = ""
    groups: int | None = None  # of heads whose keys are gathered together

    @property
    def two(self) -> bool:
        return math.prod(self.mesh[axis] for axis in self.context) == 2

    @property
    def alone(self) -> bool:
        """Whether a rank has all keys."""
        one = math.prod(self.mesh[axis] for axis in self.context) == 1
        return one or self.run == "one device"


ROWS = {"data": 2, "context": 2}
HEADS = {"context": 2, "tensor": 2}
RANKS = {  # one for each feature "ranks" of a call
    "two": Ranks({"context": 2}),  # of tests on GPUs
    "2": Ranks(HEADS, heads=("tensor", "tensor")),
    "4": Ranks({"context": 4}, groups=1),
    "data": Ranks(ROWS, run="scan"),
    "keys of all heads": Ranks(HEADS, heads=("tensor", None), groups=1),
    "levels": Ranks({"host": 2, "gpu": 2}, ("host", "gpu"), groups=4),
    "levels reversed": Ranks({"gpu": 2, "host": 2}, ("host", "gpu")),
    "explicit": Ranks(HEADS, heads=("tensor", "tensor"), run="explicit"),
    "shard_map": Ranks(ROWS, run="shard_map"),
    "shard_map of a mask": Ranks(HEADS, heads=("tensor", "tensor"), run="shard_map of a mask"),
    "vmap": Ranks({"context": 2}, run="vmap", groups=2),
    "axes of one": Ranks(
        {"data": 1, "context": 2, "sequence": 1, "tensor": 2},
        ("context", "sequence"),
        ("tensor", "tensor"),
    ),
    "context of one": Ranks(
        {"data": 2, "context": 1, "tensor": 2}, heads=("tensor", "tensor"), run="explicit"
    ),
    "keys in order": Ranks({"context": 2}, run="keys in order"),
    "one device": Ranks({"context": 2}, run="one device"),
    "shard_batch": Ranks(ROWS, run="shard_batch"),
    "one explicit axis": Ranks(ROWS, run="one explicit axis"),
    "shard_map of some axes": Ranks(
        {"data": 1, "context": 2, "one": 1, "tensor": 2},
        heads=(("tensor", "one"), ("tensor", "one")),
        run="shard_map of some axes",
        groups=1,
    ),
    "stages": Ranks({"stage": 2, "context": 2}, run="stages"),
    "mask of one device": Ranks(
        {"data": 2, "tensor": 2}, (), ("tensor", "tensor"), run="mask of one device"
    ),
}
KEEP = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
REMOVE = "jax_remove_size_one_mesh_axis_from_type"


def why_not(call: Call, kind: str | None) -> str | None:
    """Why a call does not run on its ranks. `kind`: "plan", "local", "halos" or None."""
    run = RANKS[call.ranks].run
    if run == "keys in order" and kind != "plan":
        return "its keys are in order, or stay where their documents are"
    if run == "shard_batch" and kind not in ("plan", "local"):
        return "shard_batch makes a plan"
    if run == "mask of one device" and kind is not None:
        return "its mask has no plan"
    if run == "one device" and kind is None:
        return "one device in order is the first property"
    if RANKS[call.ranks].alone and kind == "halos":
        return "one rank has all keys"
    if run == "shard_map of some axes" and jax.__version_info__ < (0, 10):
        return "a shard_map inside another hangs on CPUs in jax 0.7, does not compile in jax 0.8"
    if call.bias == "groups" and run == "vmap":
        return "mapped rows have a bias of their own"
    if "seed" in call.names() and run in ("keys in order", "vmap", "stages"):
        return "dropout counts keys in the order of the plan, and mapped rows from 0"
    return None


class OverRanks:
    """The results of a call over ranks, with rows in the order of a plan."""

    def __init__(self, call: Call, kind: str | None) -> None:
        self.call, self.at = call, RANKS[call.ranks]
        at, heads = self.at, self.at.heads
        if int(call.heads.split("/")[1]) % 2:  # every device has the one head of the keys
            heads = heads[0], None
        batch = "data" if "data" in at.mesh else None
        context = at.context or None
        self.axes = {"b": batch, "q": context, "k": context, "h": heads[0], "g": heads[1]}
        explicit = {"explicit": len(at.mesh), "one explicit axis": 1}.get(at.run, 0)
        types = [AxisType.Explicit if n < explicit else AxisType.Auto for n in range(len(at.mesh))]
        devices = jax.devices(call.implementation or "cpu")[: math.prod(at.mesh.values())]
        self.mesh = jax.make_mesh(
            (*at.mesh.values(),), (*at.mesh,), devices=devices, axis_types=tuple(types)
        )
        specs = (self.spec("bqh."), self.spec("bkg."))
        self.sharding = None if at.run == "one device" else packax.AttentionSharding(*specs)
        self.arrays = call.arrays(1)
        self.lengths = call.sizes()
        levels = tuple(at.mesh[axis] for axis in at.context)
        self.plan = kind and (
            greedy(self.arrays.get("ids", np.zeros(self.lengths[0])), levels)
            if kind == "local"
            else packax.context_plan(
                call.expression(self.arrays),
                ranks=math.prod(levels),
                kind=kind,
                length=self.lengths[0],
            )
        )
        self.built: Any = None
        self.labels = call.labels()
        if places := placed(call, self.arrays):
            self.labels |= {"q_places": "bq", "kv_places": "b."}
            self.arrays |= dict(zip(("q_places", "kv_places"), places, strict=True))

    def spec(self, labels: str) -> P:
        return P(*(self.axes.get(at) for at in labels))

    def spec_of(self, name: str) -> P:
        """Tensors, and the rows of a bias, are sharded; of other arrays, the batch."""
        labels = self.labels[name]
        if name == "bias":
            return self.spec(labels.replace("k", "."))
        if name in (*calls.TENSORS, "q_places"):
            return self.spec(labels)
        if name in ("sinks", "slopes") and "shard_map" in self.at.run:
            return self.spec(labels)
        return self.spec("b") if labels.startswith("b") else P()

    def permuted(self, name: str) -> int | None:
        """The axis of an array that is in the order of the plan."""
        axes = {"out": 1, "lse": 2, "dlse": 2, "q_places": 1, "query": 1, "dout": 1}
        if self.at.run != "keys in order":
            axes |= {"key": 1, "value": 1}
        if self.labels.get("bias", "....")[2] == "q":
            axes["bias"] = 2
        name = name if name in axes else name.removeprefix("d")
        return axes.get(name) if self.plan is not None else None

    def moved(self, name: str, x: Any, back: bool = False) -> Any:
        axis = self.permuted(name)
        if axis is None:
            return x
        return (self.plan.unpermute if back else self.plan.permute)(x, axis)

    def mask(self, a: Arrays, plan: Any) -> Any:
        order = {"permuted_keys": False} if self.at.run == "keys in order" else {}
        # In a shard_map, the tensors have the rows of one rank.
        whole = a | {name: self.arrays[name] for name in ("query", "key")}
        self.built = self.call.built(whole, sharding=self.sharding, plan=plan, **order)
        return self.built

    def attend(self, a: Arrays, mask: Any, **more: Any) -> Any:
        places = (a["q_places"], a["kv_places"]) if "q_places" in a else None
        if self.at.groups is not None:
            more["gather_head_groups"] = min(self.at.groups, a["key"].shape[2])
        return self.call.attend(a, mask, places, **more)

    def mapped(self, a: Arrays, plan: Any) -> Any:
        """In a shard_map of the caller, which builds the mask or gets it. It may map only the
        sequence, and packax the heads."""
        own = {*self.mesh.axis_names}
        if self.at.run == "shard_map of some axes":
            self.axes = {label: axes for label, axes in self.axes.items() if label in "qk"}
            own = {*self.at.context}
        of = {name: self.spec_of(name) for name in a}
        results = self.spec("bqh."), self.spec("bhq"), self.spec("bh")
        results = results[: len(self.call.results.split("+"))]
        if self.at.run != "shard_map of a mask":
            of_plan = jax.tree.map(lambda x: self.spec("b") if len(x) > 1 else P(), plan)
            return jax.shard_map(
                lambda a, plan: self.attend(a, self.mask(a, plan)),
                mesh=self.mesh, in_specs=(of, of_plan), out_specs=results, axis_names=own,
            )(a, plan)  # fmt: skip
        mask = self.mask(a, plan)
        return jax.shard_map(
            self.attend, mesh=self.mesh, in_specs=(of, self.sharding.mask_specs(mask)),
            out_specs=results,
        )(a, mask)  # fmt: skip

    def of_rows(self, a: Arrays, plan: Any) -> Any:
        """Mapped over the batch, together with the mask."""
        return over_rows(self.attend, self.labels, a, self.mask(a, plan))

    def scanned(self, a: Arrays, plan: Any) -> Any:
        layer = jax.checkpoint(self.attend, policy=KEEP)
        mask = self.mask(a, plan)
        _, results = jax.lax.scan(lambda c, _: (c, layer(a, mask)), 0, None, length=1)
        return tuple(x[0] for x in results)

    def staged(self, a: Arrays, plan: Any) -> Any:
        """The second of two stages of a pipeline, of which the first has other tensors."""
        mask = self.mask(a, plan)
        stages = {n: jnp.stack([-a[n], a[n]]) for n in ("query", "key", "value")}
        one = lambda tensors: self.attend(a | tensors, mask)  # noqa: E731
        return tuple(x[1] for x in jax.vmap(one, spmd_axis_name="stage")(stages))

    def of_one_device(self, a: Arrays, plan: Any) -> Any:
        return self.attend(a, self.call.built(a), sharding=self.sharding)

    def plain(self, a: Arrays, plan: Any) -> Any:
        mask = self.mask(a, plan)
        if plan is None and self.call.mask == "expression":  # built by attention
            return self.attend(a, None, sharding=self.sharding)
        return self.attend(a, mask)

    def of_batch(self, a: Arrays, plan: Any) -> Any:
        """shard_batch permutes the tensors, with a plan that it makes if it can."""
        batch = {name: self.moved(name, a[name], back=True) for name in ("query", "key", "value")}
        how = {"plan": plan} if self.plan.kind == "local" else {"kind": self.plan.kind}
        batch, self.built, _ = packax.context.shard_batch(
            batch, self.call.expression(a), sharding=self.sharding, **how
        )
        return self.attend(a | batch, self.built)

    def results(self) -> dict[str, Any]:
        """In the order of the sequence."""
        got, _ = self.run(lambda a, attend, _: self.call.step(a, attend))
        return {name: self.moved(name, np.asarray(x), back=True) for name, x in got.items()}

    def run(self, function: Any, along: Any = ()) -> Any:
        """A jitted function of the operands, the attention, and more arrays like operands; and the
        operands in the order of the plan."""
        runs = {"vmap": self.of_rows, "scan": self.scanned, "shard_batch": self.of_batch}
        runs |= {"stages": self.staged, "mask of one device": self.of_one_device}
        runs |= {name: self.mapped for name in RANKS if name.startswith("shard_map")}
        run = runs.get(self.at.run, self.plain)
        a = {name: self.moved(name, x) for name, x in self.arrays.items()}
        along = {name: self.moved(name, x) for name, x in dict(along).items()}
        alone = self.sharding is None
        with (
            contextlib.nullcontext() if alone else jax.set_mesh(self.mesh),
            size_one(odd(self.call)),
        ):
            if "explicit" in self.at.run:
                specs = {name: self.spec_of(name) if name in calls.TENSORS else P() for name in a}
                place = lambda n, x: jax.device_put(x, NamedSharding(self.mesh, specs[n]))  # noqa: E731
                a = {name: place(name, x) for name, x in a.items()}
                along = {name: place(name, x) for name, x in dict(along).items()}
            elif self.sharding is not None and odd(self.call):  # the sequence is cut otherwise
                other = NamedSharding(self.mesh, P(None, self.mesh.axis_names))
                a |= {name: jax.device_put(a[name], other) for name in ("query", "key", "value")}
            step = jax.jit(
                lambda a, plan, along: function(a, functools.partial(run, plan=plan), along)
            )
            plan = jax.tree.map(np.asarray, self.plan)
            self.program = str(step.trace(a, plan, along).jaxpr) if self.at.alone else ""
            return jax.block_until_ready(step(a, plan, along)), a

    def wrong(self) -> list[str]:
        wrong = self.call.wrong(self.results(), self.arrays)
        names = [name for name in ("all_gather", "reduce_scatter") if name in self.program]
        return wrong + [f"{name} of one rank" for name in names]


def over_rows(attend: Any, labels: dict[str, str], a: Arrays, mask: Any) -> Any:
    """attend, mapped over the rows of the batch and of the mask."""
    names = {*calls.TENSORS, "q_places", "kv_places", "positions", "kv_positions", "bias"} & {*a}
    along = {n: a[n] for n in names if labels[n].startswith("b") and len(a[n]) > 1}

    def one(along, mask):
        rows = {name: x[None] for name, x in along.items()}
        return [x[0] for x in attend(a | rows, mask)]

    return (*jax.vmap(one, in_axes=(0, mask.vmap_axes()))(along, mask),)


@contextlib.contextmanager
def size_one(removed: bool) -> Any:
    """With axes of size 1 in types, or without, as MaxText sets."""
    with contextlib.ExitStack() as after:
        if hasattr(jax.config, REMOVE):
            after.callback(jax.config.update, REMOVE, getattr(jax.config, REMOVE))
            jax.config.update(REMOVE, removed)
        yield


def placed(call: Call, a: Arrays) -> Any:
    """The positions that ALiBi needs where the sequence is sharded."""
    if "slopes" not in a:
        return None
    index = [np.arange(n)[None] for n in call.sizes()]
    pairs = zip(call.places(a) or index, call.sizes(), strict=True)
    return [np.broadcast_to(x, (call.batch, n)).astype(np.int32) for x, n in pairs]


def odd(call: Call) -> bool:
    """Chooses between two ways for the calls of a property."""
    return zlib.crc32(str(call).encode()) % 2 == 1


def or_zigzag(call: Call, kind: str | None) -> str | None:
    """`kind`, or for some calls over two ranks (more need longer sequences) "zigzag"."""
    return "zigzag" if RANKS[call.ranks].two and odd(call) else kind
