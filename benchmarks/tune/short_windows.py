"""Times windows and packed documents with the two Hopper forwards at head dim 64: tiles of 192
rows, and of 64 rows.

    python benchmarks/tune/short_windows.py [--cases NAME,...] [--rounds 7] [--out DIR]

The bound `row_keys` of a mask only chooses the kernel: 0 chooses forward_sm90 ("packax"), 1
chooses forward_sm90_short ("short"). Outputs are first compared with a float32 reference. The limit
of the library is kShortRowKeys in csrc/launch/select_attention.cc. Prints times in ms, and those of
"short" divided by those of "packax": below 1, short tiles are faster. Writes short_windows.json
into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import packax
from lib.implementations import LOOP, Compiled, Implementation, random_inputs
from lib.machine import machine
from lib.model_cases import ModelCase, select
from lib.output import Report, arguments_of, picked, require_gpu, say
from lib.passes import usable
from lib.reference import Reference
from lib.turns import bad_cases, burst, table, time_rows

KERNELS = {"packax": 0, "short": 1}  # name -> row_keys
SIZES = {"8k": (1, 8192), "32k": (1, 32768), "4x4k": (4, 4096)}
CASES = tuple(
    ModelCase(
        f"window_{window}_{size}{'_sinks' if sinks else ''}", size, batch, rows, 64, 8, 64,
        "window", window=window, sinks=sinks,
    )
    for size, (batch, rows) in SIZES.items()
    for window in (128, 256, 512, 768, 1024)
    for sinks in ((False, True) if window == 128 else (False,))
) + tuple(select("gpt2_packed_16k,llama3.2_1b_packed_16k"))  # fmt: skip


def packax_function(case: ModelCase, name: str) -> Implementation:
    mask = packax.create_attention_mask(case.expression(), q_len=case.seq, kv_len=case.kv_len)
    mask = dataclasses.replace(mask, row_keys=KERNELS[name])
    options = {"sinks": jnp.asarray(case.sink_logits())} if case.sinks else {}

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
        return packax.flash_attention(q, k, v, mask, **options)

    return Implementation(name, attention, mask)


def run_case(case: ModelCase, rounds: int) -> dict[str, Any]:
    inputs = random_inputs(case)
    reference = Reference(case, inputs, case.tables())
    rows = {}
    for name in KERNELS:
        compiled = Compiled(packax_function(case, name), inputs)
        rows[name] = usable(compiled, reference.errors, passes=("fwd",), loops=LOOP, round_ms=40.0)

    def ask(name: str, what: str, launches: int) -> float:
        return burst(rows[name]["passes"][what], jax.block_until_ready, launches) / LOOP

    time_rows(rows, ask, {"fwd": case.flops("fwd")}, rounds)
    for row in rows.values():
        del row["passes"]
    return rows


def shown(results: dict[str, Any]) -> str:
    return table(results, tuple(KERNELS))


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_of(__doc__, "names and groups (8k, 32k, 4x4k, packed)", rounds=7)
    options = parser.parse_args(arguments)
    cases = picked(CASES, options.cases, lambda case: case.group)
    require_gpu()
    report = Report(options.out, "short_windows", options.rounds, machine=machine())
    say(str(report["machine"]))
    results = report.run(cases, lambda case: run_case(case, options.rounds), shown)
    return report.end(bad_cases(results, KERNELS))


if __name__ == "__main__":
    sys.exit(main())
