"""Times context parallelism on the GPUs of a host, and one rank's work on one GPU.

    python benchmarks/context.py [--devices 4] [--rounds 5] [--documents 12] [--quick] [--out DIR]
    python benchmarks/context.py --cases all [--devices 8] [...]

12 documents in 128k tokens, 32/8 heads, head dim 128, bfloat16, with the row sharded over all
devices. More documents give fewer pairs for the same bytes, as more GPUs do. "One GPU" is one
rank's share: its query rows of the balanced plan with all keys, already gathered. "slowest" runs
every rank's share on its GPU at the same time, without communication, and reports the slowest GPU:
a lower bound for every scheme. TFLOP/s count attended pairs, per GPU; the backward pass is timed
separately. "kvax-like" moves data as kvax does, with packax's kernels and head-tail order: keys are
gathered at once and kept for the backward pass, and their gradients are all-reduced in float32.
Memory is XLA's plan per GPU for forward and backward in one program, without arguments. "fetched"
are the keys and values that a rank gathers from other ranks in one pass (the backward pass also
returns as much). Every output and gradient is first compared with one GPU's. Wrong results are not
timed, and the exit status is 1.
--cases times every plan on other rows: 128k and 512k tokens, 12 documents, or lengths drawn from a
log-normal distribution with mean 500, 2000 or 8000, and windows of 128 to 4096 keys ("all", or
names such as "mean2000_128k" or "window512_128k"). If all cases have windows, they are also timed
with the balanced plan for a model's layers without a window.
Writes context.json (with a suffix for another number of documents; with --cases context_cases.json)
into --out (default: $OUT, else benchmarks/results); the table is printed last.
To try the program on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=4 and --quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
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
    OF_WINDOWS,
    PLANS,
    QUICK,
    QUICK_CASES,
    SCHEMES,
    Scheme,
)
from lib.implementations import Arrays, Compiled, Implementation, expression_of, random_inputs
from lib.kvax_scheme import ROWS, kvax_like
from lib.machine import machine
from lib.output import Report, arguments_of, picked, say
from lib.reference import LIMIT, relative
from lib.turns import PASSES, as_row, interleaved


def plan_of(case: Case, name: str | None, ranks: int) -> packax.context.ContextPlan | None:
    if name is None:
        return None
    return packax.context_plan(expression_of(case), ranks=ranks, kind=name)


class Distributed:
    """One scheme on a mesh. Inputs are permuted by its plan, and results restored.

    Inputs are on the host. A pass keeps only its operands on the devices, which are several
    gigabytes for 512k tokens.
    """

    def __init__(self, case: Case, scheme: Scheme, mesh: Any) -> None:
        planned = dataclasses.replace(case, window=0) if scheme.of_causal else case
        self.plan = plan_of(planned, scheme.plan, mesh.size)
        sharding = packax.AttentionSharding(query=ROWS, key_value=ROWS, mesh=mesh)
        self.mask = packax.create_attention_mask(
            expression_of(case), sharding=sharding, plan=self.plan
        )
        self.all_keys = scheme.kvax
        self.sharding = NamedSharding(mesh, ROWS)

        def attention(query, key, value, mask):
            if scheme.kvax:
                return kvax_like(mask, sharding, self.plan)(query, key, value)
            groups = scheme.groups
            return packax.flash_attention(query, key, value, mask, gather_head_groups=groups)

        def with_residuals(query, key, value, mask):
            return jax.vjp(lambda *x: attention(*x, mask), query, key, value)[1]

        def both(query, key, value, mask, cotangent):
            out, pullback = jax.vjp(lambda *x: attention(*x, mask), query, key, value)
            return out, pullback(cotangent)

        self._forward, self._residuals, self._both = map(jax.jit, (attention, with_residuals, both))
        self._backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))

    def placed(self, inputs: Arrays) -> Arrays:
        order = (lambda x: x) if self.plan is None else self.plan.permute
        return tuple(jax.device_put(order(jnp.asarray(x)), self.sharding) for x in inputs)

    def in_order(self, x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.devices()[0])
        return x if self.plan is None else self.plan.unpermute(x)

    def passes(self, what: str, inputs: Arrays) -> Callable[[], Any]:
        """The forward pass, or the backward pass without the forward."""
        query_key_value = self.placed(inputs[:3])
        if what == "fwd":
            return functools.partial(self._forward, *query_key_value, self.mask)
        pullback = jax.block_until_ready(self._residuals(*query_key_value, self.mask))
        return functools.partial(self._backward, pullback, *self.placed(inputs[3:]))

    def fetched(self, inputs: Arrays) -> float:
        """The MiB of keys and values that a rank fetches."""
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
    """The attention of one rank's rows of the balanced plan to all keys, on its GPU."""

    def __init__(self, case: Case, ranks: int, rank: int) -> None:
        plan = plan_of(case, "balanced", ranks)
        assert plan is not None
        own = case.seq // ranks
        self.rows = np.asarray(plan.index())[0, rank * own : (rank + 1) * own]
        lo, hi = (x[self.rows] for x in case.row_ranges())
        self.area = float(np.sum(hi - lo))  # attended pairs
        self.device = jax.devices()[rank]
        mask = packax.create_attention_mask(packax.masks.ranges(lo, hi), kv_len=case.seq)
        mask = jax.device_put(mask, self.device)
        self.attention = Implementation("share", packax.flash_attention, mask)

    def passes(self, what: str, inputs: Arrays) -> Callable[[], Any]:
        query, key, value, dout = inputs
        own = query[:, self.rows], key, value, dout[:, self.rows]
        return Compiled(self.attention, jax.device_put(own, self.device)).function(what)


def collectives(mesh: Any, case: Case) -> dict[str, Callable[[], Any]]:
    """Only the gather of keys and values, and only the reduce-scatter of their gradients."""

    def mapped(function: Callable[..., Any], in_specs: P, out_specs: P) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    gather = mapped(
        lambda x: jax.lax.all_gather(x, "context", axis=1, tiled=True)[None], ROWS, P("context")
    )
    scatter = mapped(
        lambda x: jax.lax.psum_scatter(x[0], "context", scatter_dimension=1, tiled=True),
        P("context"),
        ROWS,
    )
    shape = (2, case.seq, case.kv_heads, case.head_dim)
    x = jax.device_put(jnp.zeros(shape, jnp.bfloat16), NamedSharding(mesh, ROWS))
    whole = gather(x)
    return {"gather": lambda: gather(x), "reduce-scatter": lambda: scatter(whole)}


def reference_of(case: Case, inputs: Arrays) -> dict[str, np.ndarray]:
    """Output and gradients computed on one GPU, copied to the host. benchmarks/attention.py
    compares these with float32."""
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
    """The results' errors, memory and fetched keys, as a row of the report."""
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


def timed(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    if jax.default_backend() != "gpu":  # fake CPU devices must run one program at a time
        functions = {
            name: lambda function=function: jax.block_until_ready(function())
            for name, function in functions.items()
        }
    return interleaved(functions, jax.block_until_ready, rounds)


def run_case(case: Case, schemes: tuple[Scheme, ...], mesh: Any, rounds: int) -> dict[str, Any]:
    """The measurements of one row on the mesh."""
    report: dict[str, Any] = {"case": dataclasses.asdict(case) | {"split": ()}, "schemes": {}}
    inputs = tuple(map(np.asarray, random_inputs(case)))  # on the host, whose memory is larger
    reference, count = reference_of(case, inputs), mesh.size
    runs = {}
    for scheme in schemes:
        run = Distributed(case, scheme, mesh)
        row = checked(scheme, run, inputs, reference)
        if not row["wrong"]:
            runs[scheme.name] = run
        report["schemes"][scheme.name] = row | {"times": {}}
    del reference
    shares = [Share(case, count, rank) for rank in range(count)]
    alone = {"one_gpu": shares[:1], "slowest": shares}
    for name, ranks in alone.items():
        part = sum(share.area for share in ranks) / len(ranks) / case.area * count
        report[name] = {"area_of_mean": round(part, 4), "times": {}}
    for what, flops in (("fwd", case.forward_flops), ("bwd", case.backward_flops)):
        candidates = {name: run.passes(what, inputs) for name, run in runs.items()}
        of_ranks = [share.passes(what, inputs) for share in shares]
        for name, ranks in alone.items():
            own = of_ranks[: len(ranks)]
            candidates[name] = lambda own=own: [function() for function in own]
        for name, took in timed(candidates, rounds).items():
            row = report["schemes"].get(name) or report[name]
            row["times"][what] = as_row(took, flops / count * row.get("area_of_mean", 1))
        del candidates, of_ranks  # frees memory for the other pass
    report["collectives"] = {
        name: as_row(took) for name, took in timed(collectives(mesh, case), rounds).items()
    }
    return report


def table(results: dict[str, Any]) -> str:
    lines = []
    for case, report in results.items():
        if not report:
            continue
        of_pass = "".join(f"{f'{what} ms':>9}{'TFLOP/s':>9}{'of one':>8}" for what in PASSES)
        lines.append(f"{case:<44}{of_pass}{'MiB':>9}{'fetched':>9}{'error':>9}")
        one = report["one_gpu"]
        alone = {"one GPU, one rank's share": one, "slowest GPU, its share": report["slowest"]}
        for name, row in (alone | report["schemes"]).items():
            line = f"{name:<44}"
            for what in PASSES:
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
    """The cases and schemes of --cases, --documents and --only."""
    cases, schemes = [QUICK if arguments.quick else BOARD], SCHEMES
    if arguments.documents != BOARD.documents and not arguments.quick:
        cases = [dataclasses.replace(BOARD, documents=arguments.documents)]
    if arguments.cases:
        known = QUICK_CASES if arguments.quick else CASES
        named = None if arguments.cases == "all" else arguments.cases
        cases = picked(known, named, lambda case: "")
        schemes = OF_WINDOWS if all(case.window for case in cases) else PLANS
    return cases, tuple(scheme for scheme in schemes if arguments.only in scheme.name)


def main() -> int:
    parser = arguments_of(__doc__, rounds=5)
    parser.add_argument("--devices", type=int, help="of this host (default: all)")
    parser.add_argument("--documents", type=int, default=BOARD.documents)
    parser.add_argument("--cases", default="", help="other rows: all, or names with commas")
    parser.add_argument("--only", default="", help="schemes whose name holds this text")
    parser.add_argument("--quick", action="store_true", help="tiny rows: tries the program")
    arguments = parser.parse_args()
    count = arguments.devices or len(jax.devices())
    if not 2 <= count <= len(jax.devices()):
        raise SystemExit(f"--devices must be from 2 to {len(jax.devices())}, but is {count}")
    if jax.default_backend() != "gpu" and not arguments.quick:
        raise SystemExit("without GPUs only --quick: jax.devices() = " + str(jax.devices()))
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("context",), devices=devices, axis_types=(AxisType.Auto,))
    cases, schemes = chosen(arguments)
    suffix = "" if arguments.documents == BOARD.documents else f"_{arguments.documents}"
    name = "context_cases" if arguments.cases else f"context{suffix}"
    report = Report(arguments.out, name, arguments.rounds, machine=machine(), devices=count)
    results = report.run(cases, lambda case: run_case(case, schemes, mesh, arguments.rounds), table)
    bad = [name for name, rows in results.items() if not rows]
    for case, rows in results.items():
        schemes_of_case = rows.get("schemes", {}).items()
        bad += [f"{case} {name} WRONG" for name, row in schemes_of_case if row["wrong"]]
    return report.end(bad)


if __name__ == "__main__":
    sys.exit(main())
