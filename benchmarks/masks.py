"""Masks and options of current models: packax, cuDNN if jax.nn has the mask, and FlexAttention
in torch, taking turns on one GPU.

    python benchmarks/masks.py [--cases NAME,NAME] [--rounds 5] [--without-flex] [--out DIR]

Cases: lib/mask_cases.py; `--cases selections`: block masks that depend on data (lib/selections.py),
compared with packax's causal attention of all keys; `--cases trees`: packed trees
(lib/packed_trees.py), also compared with their paths as packed documents. FLOPs are those of
attended pairs, 4 * H * D per pair forward, 2.5 times that backward; ratios are of medians, over 1:
packax is faster. Every output and gradient is first compared with one float32 reference; a wrong
one is not timed. torch runs in another process, which compiles FlexAttention for each case. Writes
masks.json into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other process wants memory

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib import selections
from lib.exchange import folders, load, save
from lib.implementations import Compiled, Implementation
from lib.machine import machine
from lib.mask_cases import OptionCase, causal_mask, select
from lib.output import Report, arguments_of, require_gpu, say
from lib.packed_trees import as_documents
from lib.passes import usable
from lib.reference import Sampled, einsum, wrong
from lib.turns import (
    Failed,
    Worker,
    bad_cases,
    burst,
    cells,
    not_run,
    ratio,
    time_rows,
    troubles,
    worst_error,
)

HERE = Path(__file__).parent
SHOWN = ("packax", "cudnn", "flex")
# packax's causal attention, for cases that select some of its pairs; for trees, packed documents
ORDER = (*SHOWN, "dense", "documents")
PASSES = ("fwd", "bwd")
BLOCK = 256


def inputs_of(case: OptionCase) -> tuple[jax.Array, ...]:
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(
        jax.random.normal(key, (1, case.seq, n, case.dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )


# --- The reference: float32, by the predicate, some rows of all heads and all rows of one.


def dense_rows(case: OptionCase, tables, q, k, v, i, h, slopes, sinks):
    """(rows, G, D) of rows `i` of one key/value head's group. q (rows, G, D), k and v (S, D), h,
    slopes and sinks (G,)."""
    j = jnp.arange(k.shape[0])
    s = einsum("rgd,kd->rgk", q, k) * case.dim**-0.5
    if case.soft_cap is not None:
        s = case.soft_cap * jnp.tanh(s / case.soft_cap)
    if case.alibi:
        s -= slopes[:, None] * jnp.abs(i[:, None] - j)[:, None]
    s = jnp.where(case.allows(h[:, None], i[:, None, None], j, tables), s, -jnp.inf)
    sink = jnp.broadcast_to(sinks[:, None], (*s.shape[:2], 1)) if case.sinks else s[..., :0]
    p = jax.nn.softmax(jnp.concatenate([s, sink], -1), -1)[..., : k.shape[0]]
    return einsum("rgk,kd->rgd", p, v)


class Reference(Sampled):
    def __init__(
        self, case: OptionCase, inputs: tuple[jax.Array, ...], tables: dict[str, np.ndarray]
    ) -> None:
        super().__init__(case)
        group = case.heads // case.kv_heads
        query, key, value, cotangent = (x[0].astype(jnp.float32) for x in inputs)
        slopes = jnp.asarray(case.slopes()).reshape(-1, group)
        sinks = jnp.asarray(case.sink_logits()).reshape(-1, group)
        heads = jnp.arange(case.heads).reshape(-1, group)
        on_device = {name: jnp.asarray(x) for name, x in tables.items()}
        grouped = [x.reshape(case.seq, case.kv_heads, group, case.dim) for x in (query, cotangent)]

        @jax.jit
        def some_rows(tables, q, do, k, v, rows):
            def of_head(q, do, k, v, *of_h):
                function = functools.partial(dense_rows, case, tables)
                out, back = jax.vjp(lambda q: function(q, k, v, rows, *of_h), q[rows])
                return out, back(do[rows])[0]

            of_h = heads, slopes, sinks
            out, dq = jax.vmap(of_head, (1, 1, 1, 1, 0, 0, 0), 1)(q, do, k, v, *of_h)
            return out.reshape(len(rows), -1, case.dim), dq.reshape(len(rows), -1, case.dim)

        @jax.jit
        def one_head(tables, q, do, k, v, *of_h):
            def step(sums, block):
                q, do, i = block
                _, back = jax.vjp(lambda k, v: dense_rows(case, tables, q, k, v, i, *of_h), k, v)
                return jax.tree.map(jnp.add, sums, back(do)), None

            blocks = [x.reshape(-1, BLOCK, *x.shape[1:]) for x in (q, do, jnp.arange(case.seq))]
            return jax.lax.scan(step, (jnp.zeros_like(k), jnp.zeros_like(v)), tuple(blocks))[0]

        h = self.head
        out, dq = some_rows(on_device, *grouped, key, value, jnp.asarray(self.rows))
        of_h = [x[:, h] for x in (*grouped, key, value)]
        dk, dv = one_head(on_device, *of_h, heads[h], slopes[h], sinks[h])
        self.values = {"out": out, "dq": dq, "dk": dk, "dv": dv}


# --- What is timed in this process.


def packax_function(
    case: OptionCase, tables: dict[str, np.ndarray]
) -> tuple[Implementation, float]:
    """The attention with its mask, and the attended pairs of a head."""
    build = jax.jit(packax.create_attention_mask, static_argnames=("q_len", "kv_len"))
    mask = build(case.expression(tables), q_len=case.seq, kv_len=case.seq)
    area = float(np.sum(np.asarray(mask.q_hi, np.int64) - np.asarray(mask.q_lo, np.int64)))
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
                compared=reference.slices(), round_ms=round_ms,
            )  # fmt: skip
        except Failed as error:
            return not_run(error)
        errors = reference.slice_errors(load(results))
    bad = wrong(errors)
    return row | {"errors": errors, "wrong": bad} | ({"launches": {}} if bad else {})


def run_case(
    case: OptionCase, torch: Worker | None, rounds: int, round_ms: float
) -> dict[str, Any]:
    inputs, tables = inputs_of(case), selections.tables(case)
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
        rows["documents"] = checked(attention, inputs_of(apart)) | {"pairs": pairs}
        rows["packax"]["pairs"] = area
    if case.cudnn is not None:
        options = case.cudnn | {"scale": case.dim**-0.5, "implementation": "cudnn"}
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

    forward = 4.0 * case.heads * case.dim * area
    time_rows(rows, ask, {"fwd": forward, "bwd": 2.5 * forward}, rounds)
    for row in rows.values():
        row.pop("passes", None)
    return rows


def table(results: dict[str, Any]) -> str:
    head = f"{'case':<26}{'pass':<5}"
    head += "".join(f"{name + ' ms':>11}{'TFLOP/s':>9}" for name in SHOWN)
    lines, notes = [head + f"{'to cuDNN':>10}{'to Flex':>9}{'error':>9}"], []
    for name, rows in results.items():
        for what in PASSES:
            found, line = cells(rows, what, SHOWN)
            for who, width in (("cudnn", 10), ("flex", 9)):
                line += ratio(found[who], found["packax"], width)
            line += worst_error(rows.get("packax", {}), what, 9)
            lines.append(f"{name:<26}{what:<5}{line}")
        notes += of_dense(name, rows)
        for who, row in rows.items():
            notes += troubles(f"{name} {who}", row)
    return "\n".join(lines + notes)


def of_dense(name: str, rows: dict[str, Any]) -> list[str]:
    """What a selection or a tree keeps and costs, compared with causal attention of all keys and,
    for a tree, with packed documents of its paths."""
    shares = rows.get("packax", {}).get("shares")
    if shares is None:
        return []
    kept = f"{shares['pairs']:.1%} of causal's pairs, {shares['blocks']:.1%} of its blocks"
    lines = [f"{name} has {kept}; time: {times_beside(rows, 'dense')}"]
    if "documents" in rows:
        share = rows["packax"]["pairs"] / rows["documents"]["pairs"]
        beside = times_beside(rows, "documents")
        lines.append(f"{name} has {share:.1%} of its documents' pairs; time: {beside}")
    return lines


def times_beside(rows: dict[str, Any], other: str) -> str:
    times = [rows[who].get("times", {}) for who in ("packax", other)]
    ratios = [
        f"{what} {times[0][what]['ms'] / times[1][what]['ms']:.1%} of {times[1][what]['ms']:.3f} ms"
        for what in PASSES
        if all(what in x for x in times)
    ]
    return ", ".join(ratios) or "none"


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
        if not arguments.without_flex:  # without what keeps Triton from packax (.ci/gpu)
            command = [sys.executable, str(HERE / "compare" / "masks_torch.py")]
            torch = Worker("torch", command, os.environ | {"PYTHONPATH": str(HERE)})
            stack.callback(torch.end)
            report["torch"] = torch.ask(do="hello")
        say(f"{report['machine']}, {report.get('torch', 'without torch')}")
        for case in cases:
            rows = run_case(case, torch, arguments.rounds, arguments.round_ms)
            report.add(case.name, rows)
            gc.collect()
            say(f"{case.name}\n{table({case.name: rows})}")
    print(f"\n{table(report['cases'])}\n")
    return report.end(bad_cases(report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
