"""Times masks and options of current models in packax, cuDNN and torch's FlexAttention, in turns.

    python benchmarks/masks.py [--cases NAME,NAME] [--rounds 5] [--without-flex] [--out DIR]

cuDNN is timed if jax.nn supports the mask. Cases: lib/mask_cases.py; `--cases selections`: block
masks that depend on data (lib/selections.py), compared with packax's causal attention to all keys;
`--cases trees`: packed trees (lib/packed_trees.py), also compared with their paths as packed
documents. FLOPs count attended pairs: two products forward, five backward. Ratios are of medians;
above 1, packax is faster. Every output and gradient is first compared with one float32 reference;
wrong results are not timed. torch runs in another process, which compiles FlexAttention for each
case. Writes masks.json into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for torch

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib import selections
from lib.exchange import folders, load, save
from lib.implementations import Compiled, Implementation, random_inputs
from lib.machine import machine
from lib.mask_cases import OptionCase, causal_mask, select
from lib.output import Report, arguments_of, require_gpu, say
from lib.packed_trees import as_documents
from lib.passes import usable
from lib.reference import Reference, wrong
from lib.turns import Failed, Worker, bad_cases, burst, not_run, table, time_rows

HERE = Path(__file__).parent
# dense: packax's causal attention, for selections and trees; documents: paths of trees
ORDER = ("packax", "cudnn", "flex", "dense", "documents")


def packax_function(
    case: OptionCase, tables: dict[str, np.ndarray]
) -> tuple[Implementation, float]:
    """packax's attention with its mask, and the number of attended pairs per head."""
    build = jax.jit(packax.create_attention_mask, static_argnames=("q_len", "kv_len"))
    mask = build(case.expression(tables), q_len=case.seq, kv_len=case.seq)
    area = float(np.sum(np.asarray(mask.kv_end, np.int64) - np.asarray(mask.kv_start, np.int64)))
    if case.tree is not None:
        area = float(case.tree.pairs())
    if case.selection is not None:
        area = selections.pairs(case, case.selection, tables["chosen"])
    more: dict[str, Any] = {} if case.soft_cap is None else {"soft_cap": case.soft_cap}
    if case.sinks:
        more["sinks"] = jnp.asarray(case.sink_logits())
    if case.alibi:
        more["bias"] = packax.alibi(jnp.asarray(case.slopes()))
    attention = lambda q, k, v, mask: packax.flash_attention(q, k, v, mask, **more)  # noqa: E731
    return Implementation("packax", attention, mask), area


def flex(
    case: OptionCase, torch: Worker, inputs, tables, reference: Reference, round_ms: float
) -> Any:
    with folders() as (folder, results):
        save(folder, inputs)
        np.savez(folder / "tables.npz", **tables)
        try:
            row = torch.ask(
                do="prepare", case=case.name, folder=str(folder), results=str(results),
                compared=reference.slices(), round_ms=round_ms, peer="flex",
            )  # fmt: skip
        except Failed as error:
            return not_run(error)
        errors = reference.slice_errors(load(results))
    bad = wrong(errors)
    return row | {"errors": errors, "wrong": bad} | ({"launches": {}} if bad else {})


def run_case(
    case: OptionCase, torch: Worker | None, rounds: int, round_ms: float
) -> dict[str, Any]:
    inputs, tables = random_inputs(case), selections.tables(case)
    reference = Reference(case, inputs, tables)

    def checked(attention: Implementation, inputs=inputs, errors_of=None) -> dict[str, Any]:
        return usable(Compiled(attention, inputs), errors_of, round_ms=round_ms)

    attention, area = packax_function(case, tables)
    rows = {"packax": checked(attention, errors_of=reference.errors)}
    if case.selection is not None or case.tree is not None:
        rows["packax"]["shares"] = selections.shares(case, attention.operands, area)
        whole = dataclasses.replace(case, selection=None, tree=None, mask=causal_mask)
        rows["dense"] = checked(packax_function(whole, tables)[0])
    if case.tree is not None:
        apart = as_documents(case)
        attention, pairs = packax_function(apart, {})
        rows["documents"] = checked(attention, random_inputs(apart)) | {"pairs": pairs}
        rows["packax"]["pairs"] = area
    if case.cudnn is not None:
        options = case.cudnn | {"scale": case.head_dim**-0.5, "implementation": "cudnn"}
        cudnn = Implementation(
            "cudnn", lambda *x: jax.nn.dot_product_attention(*x[:3], **options), ()
        )
        rows["cudnn"] = checked(cudnn, errors_of=reference.errors)
    if torch is not None:
        rows["flex"] = flex(case, torch, inputs, tables, reference, round_ms)

    def ask(name: str, what: str, launches: int) -> float:
        if name == "flex" and torch is not None:
            return torch.ask(do="time", name=name, what=what, launches=launches)
        return burst(rows[name]["passes"][what], jax.block_until_ready, launches)

    products = 2.0 * case.heads * area
    flops = {
        "fwd": products * (case.head_dim + case.value_dim),
        "bwd": products * (3 * case.head_dim + 2 * case.value_dim),
    }
    time_rows(rows, ask, flops, rounds)
    for row in rows.values():
        row.pop("passes", None)
    return rows


def of_dense(results: dict[str, Any]) -> str:
    """Lines with the fraction of pairs and blocks of causal attention that selections and trees
    keep, and for trees the fraction of pairs of their paths as packed documents."""
    lines = [""]
    for name, rows in results.items():
        ours = rows.get("packax", {})
        if "shares" in ours:
            shares = ours["shares"]
            kept = f"{shares['pairs']:.1%} of causal's pairs, {shares['blocks']:.1%} of its blocks"
            lines.append(f"{name} has {kept}")
        if "documents" in rows:
            share = ours["pairs"] / rows["documents"]["pairs"]
            lines.append(f"{name} has {share:.1%} of its documents' pairs")
    return "\n".join(lines)


def main() -> int:
    parser = arguments_of(__doc__, "names of lib/mask_cases.py, selections or trees", rounds=5)
    parser.add_argument("--round-ms", type=float, default=80.0, help="length of a burst")
    parser.add_argument("--without-flex", action="store_true", help="no torch")
    arguments = parser.parse_args()
    cases = select(arguments.cases)
    require_gpu()
    report = Report(arguments.out, "masks", arguments.rounds, machine=machine())
    with contextlib.ExitStack() as stack:
        torch = None
        if not arguments.without_flex:  # PYTHONPATH without entries that hide Triton (.ci/gpu)
            command = [sys.executable, str(HERE / "compare" / "torch_worker.py")]
            torch = Worker("torch", command, os.environ | {"PYTHONPATH": str(HERE)})
            stack.callback(torch.end)
            report["torch"] = torch.ask(do="hello")
        say(f"{report['machine']}, {report.get('torch', 'without torch')}")
        results = report.run(
            cases,
            lambda case: run_case(case, torch, arguments.rounds, arguments.round_ms),
            lambda results: table(results, ORDER) + of_dense(results),
        )
    return report.end(bad_cases(results))


if __name__ == "__main__":
    sys.exit(main())
