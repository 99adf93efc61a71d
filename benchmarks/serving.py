"""Times steps of a server: prompt chunks over pages, and chunks mixed with decoding sequences.

    python benchmarks/serving.py [--out DIR] [--cases "chunk of 2k, pages of 16" ...] [--rounds 11]

In bfloat16, with 32 query and 8 key/value heads of 128. Results are first compared with blockwise
XLA in float32; wrong results are not timed, and the run fails. Each case also times other calls
that compute the same rows: a dense call of flash_attention for a chunk, decode_attention for
decoding, and for a mix the decoding sequences and the chunk in a call each. All take turns in one
process. Prints a table and writes serving.json into --out (default: $OUT, else
benchmarks/results).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax
from decode import FP8, LIMIT, compiled_of
from lib.implementations import LOOP
from lib.machine import machine
from lib.output import Report, arguments_of, picked
from lib.passes import usable
from lib.reference import relative
from lib.turns import as_row, interleaved


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]  # keys of each sequence, with the new ones
    tokens: tuple[int, ...]  # new tokens of each sequence
    page_size: int = 16  # 0: a dense cache
    room: int = 0  # tokens for which the step has room; 0: as many as there are
    fp8: bool = False
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


K = 1024
CASES = (
    *(Case(f"chunk of 2k, pages of {n}", (32 * K,), (2 * K,), n) for n in (16, 64)),
    Case("chunk of 2k, dense", (32 * K,), (2 * K,), 0),
    *(Case(f"chunk of 2k, pages of {n}", (32 * K,), (2 * K,), n) for n in (8, 1)),
    Case("63x8k and a chunk of 1k", (8 * K,) * 64, (*(1,) * 63, K)),
    Case("63x8k and a chunk of 1k, room for 2k", (8 * K,) * 64, (*(1,) * 63, K), room=2 * K),
    Case("8x32k", (32 * K,) * 8, (1,) * 8),
    Case("8x32k, room for 2k", (32 * K,) * 8, (1,) * 8, room=2 * K),
    Case("8x32k, FP8", (32 * K,) * 8, (1,) * 8, fp8=True),
    Case("64x8k", (8 * K,) * 64, (1,) * 64),
    Case("8x32k, 4 rows", (32 * K,) * 8, (4,) * 8),
)


def tensors(case: Case) -> dict[str, Any]:
    """The arguments of ragged_paged_attention."""
    keys = iter(jax.random.split(jax.random.key(0), 4))
    batch, longest, used = len(case.lengths), max(case.lengths), sum(case.tokens)
    cache = (batch, longest, case.kv_heads, case.dim)
    arrays: dict[str, Any] = {"page_indices": None}
    if case.page_size:
        blocks = -(-longest // case.page_size)
        cache = (batch * blocks, case.page_size, *cache[2:])
        order = jax.random.permutation(next(keys), batch * blocks).astype(jnp.int32)
        arrays["page_indices"] = order.reshape(batch, blocks)
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, "bfloat16"), static_argnums=1)
    arrays["query"] = draw(next(keys), (case.room or used, case.heads, case.dim))
    for name in ("key", "value"):
        arrays[name] = draw(next(keys), cache)
        if case.fp8:
            arrays[name], arrays[f"{name}_scale"] = (arrays[name] / 0.02).astype(FP8), 0.02
    arrays["kv_lens"] = jnp.asarray(case.lengths, jnp.int32)
    arrays["cu_q_lens"] = jnp.asarray(np.cumsum([0, *case.tokens]), jnp.int32)
    return arrays


def part_of(arrays: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The step of the sequences from `first` to `last` alone."""
    at = np.asarray(arrays["cu_q_lens"])[first : last + 1]
    part = arrays | {"query": arrays["query"][at[0] : at[-1]], "cu_q_lens": jnp.asarray(at - at[0])}
    part["kv_lens"] = arrays["kv_lens"][first:last]
    if arrays["page_indices"] is None:
        return part | {name: arrays[name][first:last] for name in ("key", "value")}
    return part | {"page_indices": arrays["page_indices"][first:last]}


def others(case: Case, arrays: dict[str, Any], implementation: str) -> dict[str, Any]:
    """Other calls of the same rows: name -> (function, operands)."""
    batch, step = len(case.lengths), functools.partial(attend, implementation=implementation)
    if max(case.tokens) == min(case.tokens) <= 16:

        def decode(query, kv_lens, page_indices, cu_q_lens, **x):
            del cu_q_lens
            rows = query[: sum(case.tokens)].reshape(batch, -1, *query.shape[1:])
            options = {"block_table": page_indices, "implementation": implementation}
            out = packax.decode_attention(rows, kv_lengths=kv_lens, **x, **options)
            return out.reshape(-1, *query.shape[1:])

        return {"decode_attention": (decode, arrays)}
    if batch > 1:
        return {
            "decoding alone": (step, part_of(arrays, 0, batch - 1)),
            "chunk alone": (step, part_of(arrays, batch - 1, batch)),
        }

    def dense(query, key, value):
        mask = packax.causal(offset=case.lengths[0] - case.tokens[0])
        return packax.flash_attention(query, key, value, mask, implementation=implementation)

    names, shape = ("query", "key", "value"), (1, -1, case.kv_heads, case.dim)
    flat = {n: arrays[n].reshape(shape if n != "query" else (1, *arrays[n].shape)) for n in names}
    return {"flash_attention": (dense, flat)}


def attend(page_indices, implementation="cuda", **x):
    return packax.ragged_paged_attention(
        page_indices=page_indices, implementation=implementation, **x
    )


def measure(case: Case, implementation: str, rounds: int) -> dict[str, Any]:
    arrays = tensors(case)
    step = functools.partial(attend, implementation=implementation)
    exact = jax.jit(functools.partial(attend, implementation="xla", precision="highest"))
    row: dict[str, Any] = {"errors": {}, "times": {}, "left_out": {}}
    functions = {}
    for name, (function, operands) in {
        "packax": (step, arrays), **others(case, arrays, implementation)
    }.items():  # fmt: skip
        want = exact(**operands) if "cu_q_lens" in operands else None  # else for its time alone

        def errors(out, _, want=want):
            used = sum(case.tokens)
            same = out.reshape(-1, *out.shape[-2:])
            return {} if want is None else {"out": relative(same[:used], want[:used], 0)}

        found = usable(
            compiled_of(name, function, operands), errors, passes=("fwd",), loops=LOOP,
            limit=LIMIT["bfloat16"],
        )  # fmt: skip
        row["errors"][name] = found["errors"].get("out")
        if found["failed"] or found["wrong"]:
            row["left_out"][name] = found["failed"].get("fwd", f"wrong: {row['errors'][name]}")
        else:
            functions[name] = found["passes"]["fwd"]
    for name, took in interleaved(functions, jax.block_until_ready, rounds).items():
        row["times"][name] = as_row([ms / LOOP for ms in took])
    if "packax" in row["times"] and len(row["times"]) > 1:
        total = sum(time["ms"] for name, time in row["times"].items() if name != "packax")
        row["ratio"] = round(row["times"]["packax"]["ms"] / total, 3)
    return row


def table(results: dict[str, Any]) -> str:
    lines = ["| case | packax us | compared with | us | ratio |", "|---" * 5 + "|"]
    for case, row in results.items():
        times = {name: f"{1e3 * t['ms']:.1f}" for name, t in row["times"].items()} if row else {}
        first = times.pop("packax", row["left_out"].get("packax", "") if row else "did not run")
        cells = [case, first, " + ".join(times), " + ".join(times.values())]
        lines.append("| " + " | ".join([*cells, str(row.get("ratio", "") if row else "")]) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None, cases: tuple[Case, ...] = CASES) -> int:
    parser = arguments_of(__doc__, rounds=11)
    parser.add_argument("--cases", nargs="*", help="names; default: all")
    parser.add_argument("--implementation", default="cuda", choices=("cuda", "xla"))
    options = parser.parse_args(arguments)
    report = Report(options.out, "serving", options.rounds, machine=machine())
    results = report.run(
        picked(cases, options.cases, lambda case: ""),
        lambda case: measure(case, options.implementation, options.rounds),
        table,
    )
    return report.end([name for name, row in results.items() if not row or row["left_out"]])


if __name__ == "__main__":
    sys.exit(main())
