"""Times the attention of public models in packax and in cuDNN through jax.nn, in turns.

    python benchmarks/models.py [--cases GROUP,NAME,...] [--peers cudnn,fa3] [--rounds 5]
                                [--round-ms 40] [--out DIR]
    python benchmarks/models.py --draw DIR/models.json

Cases and groups: lib/model_cases.py. Masks are built before. Every output and gradient is first
compared with one float32 reference; wrong results are not timed, and the exit status is 1. The
backward pass is timed separately. Passes that take less than about 0.3 ms run LOOP times in one
jitted call (lib/implementations.py). cuDNN has no sinks in jax.nn, so its rows are without them. If
jax.nn cannot express a case (packed documents, values of another head dim), cuDNN runs through
jax's private function; masks that cuDNN does not know (prefill on a cache, windows on both sides)
are passed as arrays, as a user of jax.nn would. FlashAttention-3 (compare/pack.sh) takes rows of
head dim 128 with full or causal masks.

A ratio is cuDNN's time divided by packax's: below 1, packax is slower. Prints a table of all cases,
then what falls short, worst first. Writes models.json and a picture of the sorted ratios,
models.svg, into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for cuDNN

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib.implementations import (
    FA3_HEAD_DIM,
    LOOP,
    Compiled,
    Implementation,
    fa3_attention,
    random_inputs,
)
from lib.machine import machine
from lib.model_cases import ModelCase, select
from lib.output import Report, arguments_of, require_gpu, say
from lib.passes import usable
from lib.ratios import draw, ratios, summary
from lib.reference import Reference
from lib.turns import PASSES, bad_cases, burst, launches_of, table, time_rows

ORDER = ("packax", "cudnn", "fa3")
# Cases are compiled side by side, then timed one after another. cuDNN compiles by capturing
# streams, during which nothing else may run.
AT_ONCE = 12
SHORT = 1e11  # operations of a forward pass that is shorter than about 0.3 ms


def bias_of(case: ModelCase) -> Any:
    if not case.bias:
        return None
    shape = (1, case.heads, case.seq, case.kv_len)
    return jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)


def packax_function(case: ModelCase) -> Implementation:
    build = jax.jit(packax.create_attention_mask, static_argnames=("q_len", "kv_len"))
    mask = build(case.expression(), q_len=case.seq, kv_len=case.kv_len)
    options = {"sinks": jnp.asarray(case.sink_logits())} if case.sinks else {}

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, operands: Any) -> jax.Array:
        mask, bias = operands
        return packax.flash_attention(q, k, v, mask, bias=bias, **options)

    return Implementation("packax", attention, (mask, bias_of(case)))


def cudnn_function(case: ModelCase) -> Implementation:
    """cuDNN, without the case's sinks. Arrays are operands, as those of a model are."""
    if case.split or case.value_dim != case.head_dim:
        return _private_cudnn(case)
    options: dict[str, Any] = {"scale": case.head_dim**-0.5, "implementation": "cudnn"}
    arrays: dict[str, Any] = {"bias": bias_of(case)} if case.bias else {}
    if case.shortest:
        arrays["key_value_seq_lengths"] = jnp.asarray(case.key_lengths())
    if case.offset or case.kind == "both_sides":
        lo, hi = (x[0][:, None] for x in case.row_ranges())
        keys = np.arange(case.kv_len)
        arrays["mask"] = jnp.asarray((keys >= lo) & (keys < hi))[None, None]
    elif case.kind != "full":
        options["is_causal"] = True
    if case.kind == "window":
        options["local_window_size"] = (case.window - 1, 0)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, arrays: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, **arrays, **options)

    return Implementation("cudnn", attention, arrays)


def _private_cudnn(case: ModelCase) -> Implementation:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    causal = case.kind == "causal"
    arrays: dict[str, Any] = {}
    if case.split:
        lengths = jnp.asarray(np.tile(case.lengths, (case.batch, 1)), jnp.int32)
        edges = np.concatenate([[0], np.cumsum(case.lengths)])
        offsets = jnp.asarray(np.tile(edges, (case.batch, 1)), jnp.int32)
        arrays = {"q_seqlen": lengths, "kv_seqlen": lengths}
        arrays |= {"q_offsets": offsets, "kv_offsets": offsets}
        kind = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    else:
        kind = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, arrays: Any) -> jax.Array:
        scale = case.head_dim**-0.5
        return cudnn.dot_product_attention(q, k, v, **arrays, scale=scale, mask_type=kind)

    return Implementation("cudnn", attention, arrays)


def fa3_function(case: ModelCase) -> Implementation | None:
    """FlashAttention-3, or None if it does not take the case."""
    others = (case.offset, case.keys, case.shortest, case.sinks, case.bias)
    if {case.head_dim, case.value_dim} != {FA3_HEAD_DIM} or any(others):
        return None
    return fa3_attention(case, case.kind == "causal") if case.kind in ("full", "causal") else None


def reference_of(case: ModelCase) -> Reference:
    inputs, tables = random_inputs(case), case.tables()
    if case.bias:
        tables["bias"] = np.asarray(bias_of(case))
    return Reference(case, inputs, tables)


def prepare(case: ModelCase, made: Implementation, reference: Reference) -> dict[str, Any]:
    """Compiles the passes of an implementation, and compares their results."""
    compiled = Compiled(made, random_inputs(case))
    return usable(compiled, reference.errors, loops=loops_of(case))


def packax_alone(case: ModelCase) -> tuple[dict[str, Any], Reference]:
    reference = reference_of(case)
    return prepare(case, packax_function(case), reference), reference


def run_case(
    case: ModelCase,
    row: dict[str, Any],
    reference: Reference,
    rounds: int,
    round_ms: float,
    peers: Sequence[str] = ("cudnn",),
) -> dict[str, Any]:
    """Prepares the peers, and times them and packax's row."""
    if case.sinks:
        reference = reference_of(dataclasses.replace(case, sinks=False))
    made = {"cudnn": cudnn_function(case), "fa3": fa3_function(case)}
    rows = {"packax": row}
    rows |= {name: prepare(case, x, reference) for name in peers if (x := made[name]) is not None}
    finish = jax.block_until_ready
    for row in rows.values():  # counted again, since other cases were compiling before
        row["launches"] = {
            what: launches_of(f, finish, round_ms) for what, f in row["passes"].items()
        }

    def ask(name: str, what: str, launches: int) -> float:
        return burst(rows[name]["passes"][what], finish, launches) / loops_of(case)

    time_rows(rows, ask, {what: case.flops(what) for what in PASSES}, rounds)
    for row in rows.values():
        del row["passes"]
    return rows


def loops_of(case: ModelCase) -> int:
    return LOOP if case.flops("fwd") < SHORT else 1


def shown(results: dict[str, Any]) -> str:
    """The table of some cases; of several, the ratios and what falls short come last."""
    return table(results, ORDER) + (f"\n\n{summary(results)}" if len(results) > 1 else "")


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_of(__doc__, "names and groups of lib/model_cases.py", rounds=5)
    parser.add_argument("--round-ms", type=float, default=40.0, help="length of a burst")
    parser.add_argument("--peers", default="cudnn", help="cudnn, or cudnn,fa3")
    parser.add_argument("--draw", type=Path, help="only draw the picture of this report")
    options = parser.parse_args(arguments)
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.draw.with_suffix(".svg"))
        return 0
    cases, peers = select(options.cases), options.peers.split(",")
    if wrong := {*peers} - {*ORDER[1:]}:
        parser.error(f"--peers {options.peers}: {', '.join(wrong)} is not one of {ORDER[1:]}")
    require_gpu()
    report = Report(options.out, "models", options.rounds, machine=machine())
    say(str(report["machine"]))
    for first in range(0, len(cases), AT_ONCE):
        group = cases[first : first + AT_ONCE]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            ready = {case.name: pool.submit(packax_alone, case) for case in group}
        say(f"compiled {', '.join(ready)}")

        def timed(case: ModelCase, ready: Any = ready) -> dict[str, Any]:
            made = ready.pop(case.name).result()
            return run_case(case, *made, options.rounds, options.round_ms, peers)

        results = report.run(group, timed, shown)
    if ratios(results):
        draw(report, report.path.with_suffix(".svg"))
    return report.end(bad_cases(results))


if __name__ == "__main__":
    sys.exit(main())
