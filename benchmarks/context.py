"""Context parallelism on the GPUs of a host, and the same kernel on one GPU with as much work.

    python benchmarks/context.py [--devices 4] [--rounds 5] [--documents 12] [--groups "2,6 1,7"]
        [--profile] [--quick] [--out DIR]
    python benchmarks/context.py --cases all [--devices 8] [--hosts 2] [...]

12 documents in 128k tokens, 32/8 heads, head dim 128, bfloat16, the row over all devices. More
documents mean fewer pairs for the same bytes, as more GPUs do. "One GPU" is one rank's share: its
query rows of the balanced plan with all keys, already gathered. "slowest" is every rank's share on
its GPU at the same time, without communication, by the slowest GPU: no way of moving data can be
faster. TFLOP/s are those of attended pairs, per GPU; the backward is timed separately.
"kvax-like" moves data as kvax does, with packax's kernels and head-tail order: keys are gathered at
once and kept for the backward, and their gradients are all-reduced in float32. Memory is XLA's plan
for forward and backward in one program, per GPU, without arguments; "fetched" are the keys and
values of other ranks that a rank gathers in one pass (the backward also returns as much). Every
output and gradient is compared with one GPU's before it is timed; a wrong one is not timed and
makes the program exit 1.
--cases times every plan on other rows: 128k and 512k tokens, 12 documents, or lengths drawn from a
log-normal distribution with mean 500, 2000 or 8000, and windows of 128 to 4096 keys ("all", or
names such as "mean2000_128k" or "window512_128k"). If all have windows, they are also timed with
the balanced plan of a model's layers without a window.
--hosts times every plan, and local plans of two levels and of one, on a mesh of hosts and GPUs: it
divides the devices of this process, in order, among that many hosts.
--groups times the balanced plan with these groups of heads instead of the schemes; --profile lists
the kernels of two calls of each, with their times and streams, in a .txt file with the results.
Writes context.json (with another number of documents, that is in the name; with --cases
context_cases.json) into --out (default: $OUT, else benchmarks/results); the table is printed last.
To try the program on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=4 and --quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")  # rows of 512k tokens

import jax
import jax.numpy as jnp
import numpy as np
import packax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lib.cases import Case
from lib.context_cases import (
    BOARD,
    CASES,
    OF_HOSTS,
    OF_WINDOWS,
    PLANS,
    QUICK,
    QUICK_CASES,
    SCHEMES,
    Scheme,
)
from lib.implementations import random_inputs
from lib.kvax_scheme import Arrays, kvax_like
from lib.machine import machine
from lib.output import START, arguments_of, picked, say, write_json
from lib.reference import LIMIT, relative
from lib.traces import listing
from lib.turns import as_row, interleaved

HERE = Path(__file__).parent
HIDE = {"xla_gpu_enable_latency_hiding_scheduler": True}


def mesh_of(count: int, hosts: int) -> Any:
    """Of the first `count` devices; those of a host are taken to follow each other."""
    if count % hosts:
        raise SystemExit(f"--hosts must divide the {count} devices, but is {hosts}")
    sizes = {"context": count} if hosts == 1 else {"host": hosts, "gpu": count // hosts}
    devices, auto = jax.devices()[:count], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices, axis_types=auto)


def rows_of(mesh: Any) -> P:
    """The spec of query, key and value."""
    return P(None, mesh.axis_names)


def expression_of(case: Case) -> Any:
    interval = packax.sliding_window(case.window - 1) if case.window else packax.causal()
    return interval & packax.documents(case.segment_ids())


def plan_of(case: Case, name: str | None, ranks: Any) -> packax.context.ContextPlan | None:
    if name is None:
        return None
    return packax.context_plan(expression_of(case), ranks=ranks, kind=name)


class Distributed:
    """One scheme on a mesh: passes of inputs in its order, results back in the row's order.

    Inputs are on the host. A pass holds only what it needs, several gigabytes for 512k tokens.
    """

    def __init__(self, case: Case, scheme: Scheme, mesh: Any) -> None:
        local = scheme.plan == "local" and not scheme.one_level
        planned = dataclasses.replace(case, window=0) if scheme.of_causal else case
        self.plan = plan_of(
            planned, scheme.plan, tuple(mesh.shape.values()) if local else mesh.size
        )
        rows = rows_of(mesh)
        sharding = packax.AttentionSharding(query=rows, key_value=rows, mesh=mesh)
        self.mask = packax.create_attention_mask(
            expression_of(case), sharding=sharding, plan=self.plan
        )
        self.all_keys = scheme.kvax
        self.sharding = NamedSharding(mesh, rows)
        options = HIDE if scheme.scheduler and jax.default_backend() == "gpu" else None
        jit = functools.partial(jax.jit, compiler_options=options)
        if scheme.kvax:
            assert self.plan is not None

            def attention(query, key, value, mask):
                return kvax_like(mask, sharding, self.plan)(query, key, value)
        else:

            def attention(query, key, value, mask):
                groups = scheme.groups
                return packax.flash_attention(query, key, value, mask, gather_head_groups=groups)

        def with_residuals(query, key, value, mask):
            return jax.vjp(lambda *x: attention(*x, mask), query, key, value)[1]

        def both(query, key, value, mask, cotangent):
            out, pullback = jax.vjp(lambda *x: attention(*x, mask), query, key, value)
            return out, pullback(cotangent)

        self._forward, self._residuals, self._both = map(jit, (attention, with_residuals, both))
        self._backward = jit(lambda pullback, cotangent: pullback(cotangent))

    def placed(self, inputs: Arrays) -> Arrays:
        order = (lambda x: x) if self.plan is None else self.plan.permute
        return tuple(jax.device_put(order(jnp.asarray(x)), self.sharding) for x in inputs)

    def in_order(self, x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.devices()[0])
        return x if self.plan is None else self.plan.unpermute(x)

    def passes(self, what: str, inputs: Arrays) -> Callable[[], Any]:
        """Forward, or the backward alone."""
        query_key_value = self.placed(inputs[:3])
        if what == "fwd":
            return functools.partial(self._forward, *query_key_value, self.mask)
        pullback = jax.block_until_ready(self._residuals(*query_key_value, self.mask))
        return functools.partial(self._backward, pullback, *self.placed(inputs[3:]))

    def fetched(self, inputs: Arrays) -> float:
        """MiB of keys and values."""
        _, key, value, _ = inputs
        ranks = self.sharding.mesh.size
        rows = key.shape[1] // ranks * (ranks - 1) if self.all_keys else self.mask.fetched
        return round((key.nbytes + value.nbytes) / key.shape[1] * rows / 2**20, 1)

    def memory(self, inputs: Arrays) -> dict[str, float]:
        *x, cotangent = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding) for x in inputs
        )
        plan = self._both.lower(*x, self.mask, cotangent).compile().memory_analysis()
        names = ("temp", "output", "argument")
        return {name: round(getattr(plan, f"{name}_size_in_bytes") / 2**20, 1) for name in names}


class Share:
    """A rank's rows of the balanced plan against all keys, on its GPU."""

    def __init__(self, case: Case, ranks: int, rank: int) -> None:
        plan = plan_of(case, "balanced", ranks)
        assert plan is not None
        own = case.seq // ranks
        self.rows = np.asarray(plan.index())[0, rank * own : (rank + 1) * own]
        lo, hi = (x[self.rows] for x in case.row_ranges())
        self.area = float(np.sum(hi - lo))  # attended pairs
        self.device = jax.devices()[rank]
        mask = packax.create_attention_mask(packax.masks.ranges(lo, hi), kv_len=case.seq)
        self.mask = jax.device_put(mask, self.device)

    def passes(self, what: str, inputs: Arrays) -> Callable[[], Any]:
        query, key, value, dout = inputs
        query, key, value = jax.device_put((query[:, self.rows], key, value), self.device)
        forward = jax.jit(packax.flash_attention)
        if what == "fwd":
            return functools.partial(forward, query, key, value, self.mask)

        @jax.jit
        def residuals(query, key, value, mask):
            return jax.vjp(lambda *x: packax.flash_attention(*x, mask), query, key, value)[1]

        pullback = jax.block_until_ready(residuals(query, key, value, self.mask))
        backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))
        dout = jax.device_put(dout[:, self.rows], self.device)
        return functools.partial(backward, pullback, dout)


def collectives(mesh: Any, case: Case) -> dict[str, Callable[[], Any]]:
    """The gather of keys and values, and the reduce-scatter of their gradients, alone."""
    shape = (2, case.seq, case.kv_heads, case.head_dim)
    axes, rows = mesh.axis_names, rows_of(mesh)
    place = NamedSharding(mesh, rows)
    x = jax.device_put(jnp.zeros(shape, jnp.bfloat16), place)
    whole = jax.device_put(
        jnp.zeros((mesh.size, *shape), jnp.bfloat16), NamedSharding(mesh, P(axes))
    )
    gather = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True)[None],
            mesh=mesh,
            in_specs=rows,
            out_specs=P(axes),
        )
    )
    scatter = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum_scatter(x[0], axes, scatter_dimension=1, tiled=True),
            mesh=mesh,
            in_specs=P(axes),
            out_specs=rows,
        )
    )
    return {"gather": lambda: gather(x), "reduce-scatter": lambda: scatter(whole)}


def inputs_of(case: Case) -> Arrays:
    """On the host, whose memory is larger."""
    return tuple(map(np.asarray, random_inputs(case)))


def reference_of(case: Case, inputs: Arrays) -> dict[str, np.ndarray]:
    """Output and gradients of one GPU, copied to the host; benchmarks/attention.py compares them
    with float32."""
    mask = packax.create_attention_mask(expression_of(case))

    @jax.jit
    def both(query, key, value, dout, mask):
        out, pullback = jax.vjp(lambda *x: packax.flash_attention(*x, mask), query, key, value)
        return out, *pullback(dout)

    results = map(np.asarray, both(*inputs, mask))
    return dict(zip(("out", "dq", "dk", "dv"), results, strict=True))


def checked(
    scheme: Scheme, run: Distributed, inputs: Arrays, reference: dict[str, np.ndarray]
) -> dict[str, Any]:
    """{"errors", "memory", "fetched", "wrong"}."""
    errors = {}
    for what, names in (("fwd", ("out",)), ("bwd", ("dq", "dk", "dv"))):
        results = run.passes(what, inputs)()
        results = (results,) if what == "fwd" else results
        for name, x in zip(names, results, strict=True):
            errors[name] = relative(run.in_order(x), jnp.asarray(reference[name]), 0)
    wrong = [name for name, error in errors.items() if not error <= LIMIT]
    memory, fetched = run.memory(inputs), run.fetched(inputs)
    say(
        f"{scheme.name}: errors "
        + " ".join(f"{name} {error:.1e}" for name, error in errors.items())
        + f"; memory {memory}; fetched {fetched}"
        + (f"; WRONG: {', '.join(wrong)}" if wrong else "")
    )
    return {"errors": errors, "memory": memory, "fetched": fetched, "wrong": wrong}


def profile(functions: dict[str, Callable[[], Any]], what: str) -> str:
    """Which kernels overlapped in two calls of each."""
    found = []
    for name, function in functions.items():
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([function(), function()])
            found.append(f"== {what}, {name}\n{listing(Path(folder))}\n")
    return "".join(found)


def timed(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    if jax.default_backend() != "gpu":  # fake devices wait for each other: one program at a time
        functions = {
            name: lambda function=function: jax.block_until_ready(function())
            for name, function in functions.items()
        }
    return interleaved(functions, jax.block_until_ready, rounds)


def run_case(
    case: Case, schemes: tuple[Scheme, ...], mesh: Any, rounds: int, profiled: bool
) -> tuple[dict[str, Any], str]:
    """The measurements of one row on the mesh, and the kernels that ran, if requested."""
    window = f", windows of {case.window}" if case.window else ""
    say(f"{case.name}: {case.documents} documents in {case.seq} tokens{window}")
    report: dict[str, Any] = {"case": dataclasses.asdict(case) | {"split": ()}, "schemes": {}}
    inputs, count = inputs_of(case), mesh.size
    reference = reference_of(case, inputs)
    runs = {}
    for scheme in schemes:
        run = Distributed(case, scheme, mesh)
        row = checked(scheme, run, inputs, reference)
        if not row["wrong"]:  # wrong ones are not timed
            runs[scheme.name] = run
        report["schemes"][scheme.name] = row | {"times": {}}
    del reference
    shares = [Share(case, count, rank) for rank in range(count)]
    alone = {"one_gpu": shares[:1], "slowest": shares}
    for name, ranks in alone.items():
        part = sum(share.area for share in ranks) / len(ranks) / case.area * count
        report[name] = {"area_of_mean": round(part, 4), "times": {}}
    traces = ""
    for what, flops in (("fwd", case.forward_flops), ("bwd", case.backward_flops)):
        candidates = {name: run.passes(what, inputs) for name, run in runs.items()}
        of_ranks = [share.passes(what, inputs) for share in shares]
        for name, ranks in alone.items():
            own = of_ranks[: len(ranks)]
            candidates[name] = lambda own=own: [function() for function in own]
        for name, took in timed(candidates, rounds).items():
            row = report["schemes"].get(name) or report[name]
            row["times"][what] = as_row(took, flops / count * row.get("area_of_mean", 1))
        if profiled:
            traces += profile(candidates, f"{case.name}, {what}")
        del candidates, of_ranks  # the other pass needs the memory
    report["collectives"] = {
        name: as_row(took) for name, took in timed(collectives(mesh, case), rounds).items()
    }
    return report, traces


def table(report: dict[str, Any]) -> str:
    head = (
        f"{'':<44}{'fwd ms':>9}{'TFLOP/s':>9}{'of one':>8}{'bwd ms':>9}{'TFLOP/s':>9}{'of one':>8}"
    )
    lines = [head + f"{'MiB':>9}{'fetched':>9}{'error':>9}"]
    one = report["one_gpu"]
    rows = {"one GPU, one rank's share": one, "slowest GPU, its rank's share": report["slowest"]}
    for name, row in {**rows, **report["schemes"]}.items():
        line = f"{name:<44}"
        for what in ("fwd", "bwd"):
            cell = row["times"].get(what)
            if cell is None:
                line += f"{'-':>9}{'-':>9}{'-':>8}"
                continue
            share = cell["tflops"] / one["times"][what]["tflops"] if cell["tflops"] else 0.0
            line += f"{cell['ms']:>9.3f}{cell['tflops']:>9.1f}{share:>8.1%}"
        if "memory" in row:
            line += f"{row['memory']['temp'] + row['memory']['output']:>9.0f}"
            line += f"{row['fetched']:>9.1f}{max(row['errors'].values()):>9.1e}"
        lines.append(line)
    for name, cell in report["collectives"].items():
        lines.append(f"{name + ' of keys and values, alone':<44}{cell['ms']:>9.3f}")
    return "\n".join(lines)


def chosen(arguments: argparse.Namespace) -> tuple[list[Case], tuple[Scheme, ...]]:
    """The cases and schemes of --cases, --documents, --groups and --only."""
    cases, schemes = [QUICK if arguments.quick else BOARD], SCHEMES
    if arguments.documents != BOARD.documents and not arguments.quick:
        cases = [dataclasses.replace(BOARD, documents=arguments.documents)]
    if arguments.cases:
        there = QUICK_CASES if arguments.quick else CASES
        named = None if arguments.cases == "all" else arguments.cases
        cases = picked(there, named, lambda case: "")
        schemes = OF_WINDOWS if all(case.window for case in cases) else PLANS
    if arguments.hosts > 1:
        schemes = OF_HOSTS
    if arguments.groups:
        sizes = (tuple(map(int, group.split(","))) for group in arguments.groups.split())
        schemes = tuple(Scheme("balanced", 1 if len(group) == 1 else group) for group in sizes)
    return cases, tuple(scheme for scheme in schemes if arguments.only in scheme.name)


def main() -> int:
    parser = arguments_of(__doc__, rounds=5)
    parser.add_argument("--devices", type=int, help="of this host (default: all)")
    parser.add_argument("--hosts", type=int, default=1, help="over which the devices are divided")
    parser.add_argument("--documents", type=int, default=BOARD.documents)
    parser.add_argument("--cases", default="", help="other rows: all, or names with commas")
    parser.add_argument("--only", default="", help="schemes whose name holds this text")
    parser.add_argument("--groups", default="", help="sizes of groups of heads to try: '2,6 1,7'")
    parser.add_argument("--profile", action="store_true", help="list the kernels that ran, too")
    parser.add_argument("--quick", action="store_true", help="tiny rows: tries the program")
    arguments = parser.parse_args()
    count = arguments.devices or len(jax.devices())
    if not 2 <= count <= len(jax.devices()):
        raise SystemExit(f"--devices must be from 2 to {len(jax.devices())}, but is {count}")
    if jax.default_backend() != "gpu" and not arguments.quick:
        raise SystemExit("without GPUs only --quick: jax.devices() = " + str(jax.devices()))
    mesh = mesh_of(count, arguments.hosts)
    cases, schemes = chosen(arguments)
    suffix = "" if arguments.documents == BOARD.documents else f"_{arguments.documents}"
    name = "context_cases" if arguments.cases else f"context{suffix}"
    name += f"_{arguments.hosts}_hosts" if arguments.hosts > 1 else ""
    path = arguments.out / f"{name}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "machine": machine(),
        "commit": os.environ.get("PACKAX_COMMIT", "unknown"),
        "devices": count,
        "hosts": arguments.hosts,
        "rounds": arguments.rounds,
    }
    say(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    found: dict[str, Any] = {}
    traces = ""
    for case in cases:
        found[case.name], more = run_case(case, schemes, mesh, arguments.rounds, arguments.profile)
        traces += more
        report |= {"cases": found} if arguments.cases else found[case.name]
        report["seconds"] = round(time.perf_counter() - START, 1)
        write_json(path, report)  # after each: time may run out
    if arguments.profile:
        path.with_suffix(".txt").write_text(traces)
    print(f"\n{count} devices; {report['seconds']} s; wrote {path}")
    wrong = []
    for case in cases:
        window = f"windows of {case.window}, " if case.window else ""
        print(
            f"\n{window}{case.documents} documents in {case.seq} tokens, "
            f"{case.heads}/{case.kv_heads} heads, "
            f"head dim {case.head_dim}\n\n{table(found[case.name])}"
        )
        rows = found[case.name]["schemes"].items()
        wrong += [f"{case.name} {name}" for name, row in rows if row["wrong"]]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
