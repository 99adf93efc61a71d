"""Times a training step of a Llama with packax, FlashAttention-3 and cuDNN, in turns.

    python benchmarks/train_step.py [--runs 32768:12:4,131072:12:4] [--who packax,names,fa3,cudnn]
                                    [--rounds 7] [--profile] [--tiny] [--out DIR]
    python benchmarks/train_step.py --window 512 [--runs 131072:12:6] [--rounds 5] [...]

A run is TOKENS:DOCUMENTS:LAYERS with Llama-3-8B's shapes (llama.py): one row, remat of every layer,
the mask built once per step, AdamW in float32. `names` is packax with a policy that saves the
results named `packax.CHECKPOINT_NAMES`, so the backward pass does not run the forward attention
again.

All variants share one state, which each step donates to the next, and take turns, one step each, in
a different order per round. Before that, each variant makes the first step from the same state. The
first moments of Wq, Wk and Wv, which then are 0.1 times their gradients, are compared with
packax's; a variant with a difference above LIMIT is not timed. attention.py checks packax's
attention. Peak memory is counted by the allocator in one step, including scratch memory of the
kernels; XLA's plan is listed, too. --profile: GPU time of a step, by kind of kernel.

--window: a model with windows of that many keys in five of six layers, with the row and the state
(FSDP) sharded over all GPUs, one zigzag plan for all layers, and 64 query and 8 key/value heads.
`halo`: layers with a window fetch only the keys that the window reaches. `gather`: the same windows
as ranges of keys, so that all keys are fetched. `global`: no windows.
--tiny: small shapes, to try the program on a CPU. Writes train_step.json, or train_windows.json,
into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Preallocates: a pool that grows has no contiguous 42 GiB for a step of 128k tokens.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")

import jax
import jax.numpy as jnp
import numpy as np
import packax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib import llama
from lib.cases import Case
from lib.implementations import JAX_PEERS, not_tried
from lib.machine import machine
from lib.output import Report, arguments_of, first_line, say
from lib.traces import totals
from lib.turns import as_row, in_turns, troubles

LIMIT = 5e-2  # ‖gradient - packax's‖ / ‖packax's‖: two bfloat16 programs of several layers
GIB = 2**30
WAYS = ("packax", "names", "fa3", "cudnn", "dense")
WINDOW_WAYS = ("halo", "gather", "global")
GLOBAL_EVERY = 6  # layers
TINY = {
    "dtype": jnp.float32,
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "hidden": 96,
    "vocabulary": 320,
}
KINDS = {  # kinds of kernels, by the first pattern that matches the name
    "attention forward": r"^forward|^fwd|flash.*[Ff]wd|sdpa.*fprop",
    "attention backward": r"^backward|^bwd|^dq_|flash.*[Bb]wd|sdpa.*bprop|dot_do_o|convert_dq",
    "mask": r"^(documents|blocks|segments?|block_bounds)_",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas",
    "copies and slices": r"[Mm]emcpy|[Mm]emset|copy|dynamic|slice|transpose|concatenate",
}


@dataclasses.dataclass(frozen=True)
class Run:
    length: int
    documents: int
    layers: int

    @classmethod
    def parse(cls, text: str) -> Run:
        try:
            return cls(*map(int, text.split(":")))
        except (ValueError, TypeError):
            raise SystemExit(f"--runs: {text!r} is not TOKENS:DOCUMENTS:LAYERS") from None

    @property
    def name(self) -> str:
        return f"docs{self.documents}_{self.length >> 10}k_{self.layers}layers"

    def case(self, config: llama.Config) -> Case:
        heads = (config.heads, config.kv_heads, config.head_dim)
        return Case(self.name, 1, self.length, *heads, self.documents)


@dataclasses.dataclass(frozen=True)
class Way:
    """A variant. `bind(operands)`, called once per step, returns (query, key, value) -> output, or
    one such function for each layer of a period."""

    name: str
    bind: Callable[[Any], llama.Attention | tuple[llama.Attention, ...]]
    operands: Any
    policy: Any = None
    cases: tuple[Case, ...] = ()  # the case of each layer of a period
    compared: bool = True  # whether its gradients must equal those of the first variant
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)  # added to the report


def way_of(name: str, case: Case) -> Way:
    return dataclasses.replace(_way_of(name, case), cases=(case,))


def _way_of(name: str, case: Case) -> Way:
    ids = jnp.asarray(case.segment_ids())
    if name in JAX_PEERS:
        peer = JAX_PEERS[name](case)
        return Way(name, lambda x: lambda q, k, v: peer.function(q, k, v, x), peer.operands)
    if name == "dense":

        def dense(ids: jax.Array) -> llama.Attention:
            same = (ids[:, None, :, None] == ids[:, None, None]) & jnp.tri(case.seq, dtype=bool)
            return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=same)

        return Way(name, dense, ids)

    def bind(ids: jax.Array) -> llama.Attention:
        mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
        return lambda q, k, v: packax.flash_attention(q, k, v, mask)

    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
    return Way(name, bind, ids, keep if name == "names" else None)


def window_way(name: str, case: Case, sharding: Any, plan: Any) -> Way:
    documents = packax.documents(case.segment_ids())
    whole = dataclasses.replace(case, window=0)
    windows = {
        "halo": packax.sliding_window(case.window - 1) & documents,
        "gather": packax.masks.ranges(*case.row_ranges()),
        "global": packax.causal() & documents,
    }
    masks = [
        packax.create_attention_mask(x, kv_len=case.seq, sharding=sharding, plan=plan)
        for x in (windows[name], windows["global"])
    ]

    def bind(masks: Any) -> tuple[llama.Attention, ...]:
        window, every = (functools.partial(packax.flash_attention, mask=mask) for mask in masks)
        return (window,) * (GLOBAL_EVERY - 1) + (every,)

    own = whole if name == "global" else case
    return Way(
        name,
        bind,
        masks,
        cases=(own,) * (GLOBAL_EVERY - 1) + (whole,),
        compared=name != "global",
        notes={"fetched": [mask.fetched for mask in masks]},
    )


def step_of(way: Way, config: llama.Config) -> Any:
    def step(state: Any, batch: Any, operands: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(llama.loss)(
            state["parameters"], batch, way.bind(operands), way.policy, config
        )
        return llama.updated(state, gradients), value

    return jax.jit(step, donate_argnums=0)


def batch_of(case: Case, config: llama.Config) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (1, case.seq + 1))
    positions = np.concatenate([np.arange(n) for n in case.lengths])[None]
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions}
    return {name: jnp.asarray(x, jnp.int32) for name, x in rows.items()}


def gradients_of_attention(state: Any, config: llama.Config) -> dict[str, jax.Array]:
    """The gradients of Wq, Wk and Wv, up to a factor: the first moments after one step."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    moments = jnp.split(state["mean"]["layers"]["query_key_value"], [queries, queries + keys], -1)
    return dict(zip(("query", "key", "value"), moments, strict=True))


@jax.jit
def differences(found: Any, expected: Any) -> Any:
    return jax.tree.map(
        lambda x, y: jnp.linalg.norm(x.ravel() - y.ravel()) / jnp.linalg.norm(y.ravel()),
        found,
        expected,
    )


def own_peak(
    function: Callable[[], Any], temporary: int, device: Any = None
) -> tuple[Any, int | None]:
    """The result and the allocator's peak of bytes in use during the call; None if not counted.

    The allocator reports only the peak of the whole process. So a filler array first takes the
    memory up to the previous peak, minus the program's planned memory: the program's peak is then a
    new peak of the process.
    """
    device = device or jax.devices()[0]
    before = device.memory_stats()
    if not before or "peak_bytes_in_use" not in before:
        return function(), None
    missing = max(before["peak_bytes_in_use"] - before["bytes_in_use"] - temporary, 0)
    filler = jax.block_until_ready(jnp.zeros(missing, jnp.uint8))
    result = jax.block_until_ready(function())
    peak = device.memory_stats()["peak_bytes_in_use"] - missing
    del filler
    return result, peak


class Stepper:
    """One training state that the variants update in turn."""

    def __init__(self, config: llama.Config, ways: dict[str, Way], batch: Any, mesh: Any) -> None:
        self.config, self.ways, self.batch = config, ways, batch
        initialize = functools.partial(llama.initialize, config)
        shapes = jax.eval_shape(initialize, jax.random.key(0))
        shardings = None if mesh is None else jax.tree.map(lambda x: fsdp(x, mesh), shapes)
        self.initialize = jax.jit(initialize, out_shardings=shardings)
        self.state = self.initialize(jax.random.key(0))
        self.programs: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}

    def compile(self, name: str) -> dict[str, Any]:
        start = time.perf_counter()
        way = self.ways[name]
        lowered = step_of(way, self.config).lower(self.state, self.batch, way.operands)
        self.programs[name] = lowered.compile()
        took = time.perf_counter() - start
        plan = self.programs[name].memory_analysis()
        sizes = {
            k: getattr(plan, f"{k}_size_in_bytes", 0)
            for k in ("temp", "argument", "output", "alias")
        }
        total = sizes["temp"] + sizes["argument"] + sizes["output"] - sizes["alias"]
        return {
            "compile_s": round(took, 1),
            "plan_gib": round(total / GIB, 3),
            "temp": sizes["temp"],
        }

    def step(self, name: str) -> jax.Array:
        self.state, value = self.programs[name](self.state, self.batch, self.ways[name].operands)
        return value

    def first_step(self, name: str, expected: Any) -> tuple[dict[str, Any], Any]:
        """Makes the first step of a variant and compares its gradients with `expected`. Returns a
        row of the report without times, and `expected`, which is this variant's if it was None."""
        way = self.ways[name]
        row: dict[str, Any] = {"failed": {}, "wrong": []} | way.notes
        self.rows[name] = row
        skipped = not_tried(name, way.cases[0])
        if skipped:
            row["failed"] = {"step": "; ".join(f"{k}: {v}" for k, v in skipped.items())}
            return row, expected
        try:
            row |= self.compile(name)
            self.state = None
            gc.collect()
            self.state = jax.block_until_ready(self.initialize(jax.random.key(0)))
            value, peak = own_peak(lambda: self.step(name), row["temp"])
            row["loss"] = round(float(value), 5)
            row["peak_gib"] = peak and round(peak / GIB, 3)
            found = gradients_of_attention(self.state, self.config)
            if expected is None:
                expected = jax.tree.map(jnp.copy, found)
            measured = jax.tree.map(float, differences(found, expected))
            row["differences"] = {k: float(f"{v:.2e}") for k, v in measured.items()}
            if way.compared:
                row["wrong"] = [x for x in ("query", "key", "value") if not measured[x] <= LIMIT]
        except Exception as error:  # the others must still run
            row["failed"] = {"step": first_line(error)}
        if row["failed"] or row["wrong"]:
            self.programs.pop(name, None)
        if self.state is None or any(x.is_deleted() for x in jax.tree.leaves(self.state)):
            self.state = self.initialize(jax.random.key(0))  # a failed call consumed it
        return row, expected

    def milliseconds(self, name: str) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self.step(name))
        return (time.perf_counter() - start) * 1e3

    def profile(self, name: str) -> dict[str, Any]:
        """The GPU milliseconds of a step by kind of kernel, and the kernels that take longest."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(self.step(name))
            return by_kind(totals(Path(folder)))


def fsdp(x: Any, mesh: Any) -> NamedSharding:
    """Shards the last axis of matrices if its size is a multiple of the number of GPUs."""
    split = x.ndim > 1 and x.shape[-1] % mesh.size == 0
    return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "context") if split else P())


def by_kind(kernels: dict[str, tuple[int, float]]) -> dict[str, Any]:
    kinds = dict.fromkeys((*KINDS, "other"), 0.0)
    for kernel, (_, ms) in kernels.items():
        kind = next((kind for kind, names in KINDS.items() if re.search(names, kernel)), "other")
        kinds[kind] += ms
    most = sorted(kernels.items(), key=lambda item: -item[1][1])[:60]
    return {
        "kinds": {kind: round(ms, 2) for kind, ms in kinds.items()},
        "all": round(sum(ms for _, ms in kernels.values()), 2),
        "kernels": {name: [count, round(ms, 3)] for name, (count, ms) in most},
    }


def flops_of(cases: Sequence[Case], config: llama.Config, layers: int) -> float:
    """The FLOPs of a step, without those repeated by remat: 6 per matrix element and token, plus
    attention."""
    layer, last = config.matrices()
    attention = sum(case.forward_flops + case.backward_flops for case in cases) / len(cases)
    return 6.0 * cases[0].seq * (layers * layer + last) + layers * attention


def stepper_of(
    run: Run, config: llama.Config, names: list[str], window: int = 0, mesh: Any = None
) -> Stepper:
    case = dataclasses.replace(run.case(config), window=window)
    batch = batch_of(case, config)
    if not window:
        return Stepper(config, {name: way_of(name, case) for name in names}, batch, None)
    rows = P(None, "context")
    sharding = packax.AttentionSharding(query=rows, key_value=rows, mesh=mesh)
    plan = packax.context_plan(
        packax.causal() & packax.documents(case.segment_ids()), ranks=mesh.size, kind="zigzag"
    )
    batch = jax.device_put(plan.permute(batch), NamedSharding(mesh, rows))
    ways = {name: window_way(name, case, sharding, plan) for name in names}
    return Stepper(config, ways, batch, mesh)


def timed(run: Run, stepper: Stepper, rounds: int, profile: bool) -> dict[str, Any]:
    expected = None
    for name in stepper.ways:
        row, expected = stepper.first_step(name, expected)
        say(f"{run.name} {name}: { ({k: v for k, v in row.items() if k != 'temp'}) }")
    del expected
    gc.collect()
    bursts = {name: functools.partial(stepper.milliseconds, name) for name in stepper.programs}
    for burst in bursts.values():
        burst()
    for name, took in in_turns(bursts, rounds).items():
        flops = flops_of(stepper.ways[name].cases, stepper.config, run.layers)
        row = stepper.rows[name] = stepper.rows[name] | as_row(took, flops)
        row["tokens_per_s"] = round(run.length / row["ms"] * 1e3)
        row["rounds_ms"] = [round(x, 2) for x in took]
    for name in bursts if profile else ():
        try:
            stepper.rows[name]["profile"] = stepper.profile(name)
        except Exception as error:  # keep the times if profiling fails
            say(f"{run.name} {name}: no profile: {first_line(error)}")
    return stepper.rows


def table(results: dict[str, Any]) -> str:
    head = f"{'run':<24}{'way':<8}{'ms':>9}{'low':>9}{'high':>9}{'tokens/s':>10}{'TFLOP/s':>9}"
    lines = [head + f"{'to first':>10}{'peak GiB':>10}{'plan':>8}{'difference':>12}"]
    notes: list[str] = []
    for run, rows in results.items():
        first = next(iter(rows.values()), {}).get("ms")
        for name, row in rows.items():
            notes += troubles(f"{run} {name}", row)
            if "ms" not in row:
                continue
            line = f"{run:<24}{name:<8}{row['ms']:>9.1f}{row['ms_low']:>9.1f}{row['ms_high']:>9.1f}"
            line += f"{row['tokens_per_s']:>10}{row['tflops']:>9.1f}"
            line += f"{row['ms'] / first:>10.4f}" if first else f"{'-':>10}"
            peak = row.get("peak_gib")
            line += f"{peak:>10.2f}" if peak else f"{'-':>10}"
            line += f"{row['plan_gib']:>8.2f}{max(row['differences'].values()):>12.1e}"
            lines.append(line)
    for run, rows in results.items():
        profiles = {name: row["profile"] for name, row in rows.items() if "profile" in row}
        if not profiles:
            continue
        lines.append(
            f"{run}: ms on the GPU in a step".ljust(52) + "".join(f"{x:>10}" for x in profiles)
        )
        for kind in (*KINDS, "other"):
            cells = "".join(f"{p['kinds'][kind]:>10.1f}" for p in profiles.values())
            lines.append(f"  {kind}".ljust(52) + cells)
        lines.append("  all".ljust(52) + "".join(f"{p['all']:>10.1f}" for p in profiles.values()))
    return "\n".join(lines + notes)


def main() -> int:
    parser = arguments_of(__doc__, rounds=7)
    parser.add_argument("--runs", help="TOKENS:DOCUMENTS:LAYERS, several with commas between")
    parser.add_argument("--who", help=f"of {', '.join(WAYS)}, or {', '.join(WINDOW_WAYS)}")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    known = WINDOW_WAYS if arguments.window else WAYS
    names = arguments.who.split(",") if arguments.who else list(known[:4])
    if unknown := sorted({*names} - {*known}):
        parser.error(f"--who: {', '.join(unknown)}: there are {', '.join(known)}")
    usual = "131072:12:6" if arguments.window else "32768:12:4,131072:12:4"
    small = "256:3:2" if arguments.tiny else usual
    runs = [Run.parse(text) for text in (arguments.runs or small).split(",")]
    shapes: dict[str, Any] = {"heads": 64, "vocabulary": 32768} if arguments.window else {}
    if arguments.tiny:
        shapes = TINY | {"chunk": 64}
    devices, mesh, entered = 1, None, contextlib.nullcontext()
    if arguments.window:
        devices = len(jax.devices())
        mesh = jax.make_mesh((devices,), ("context",), (jax.sharding.AxisType.Auto,))
        entered = jax.set_mesh(mesh)
    name = "train_windows" if arguments.window else "train_step"
    report = Report(arguments.out, name, arguments.rounds, machine=machine())
    with entered:
        for run in runs:
            config = llama.config_of(run.layers, shards=devices, **shapes)
            stepper = stepper_of(run, config, names, arguments.window, mesh)
            rows = timed(run, stepper, arguments.rounds, arguments.profile)
            report.add(run.name, rows)
            del stepper
            gc.collect()
            say(f"\n{table({run.name: rows})}")
    print(f"\n{table(report['cases'])}")
    ours = ("packax", "names", *WINDOW_WAYS)
    bad = [
        f"{run} {name}"
        for run, rows in report["cases"].items()
        for name, row in rows.items()
        if name in ours and "ms" not in row
    ]
    return report.end(bad)


if __name__ == "__main__":
    sys.exit(main())
