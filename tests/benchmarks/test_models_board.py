"""benchmarks/models.py: its masks are those of the reference, results are compared, and what falls
short is listed and drawn."""

from __future__ import annotations

import pytest
from benchmark_scripts import script


def test_cases_and_summary(tmp_path):
    script(
        """
import dataclasses, pathlib, sys
import numpy as np
from lib.model_cases import CASES, select
from lib.ratios import draw, ratios, summary

assert len(CASES) >= 40 and len({case.name for case in CASES}) == len(CASES)
assert {case.head_dim for case in CASES} >= {64, 72, 80, 88, 96, 128, 192, 256}
assert [c.name for c in select("gpt2_1k,prefill")][0] == "gpt2_1k" and len(select("prefill")) == 3
for case in CASES:
    lo, hi = case.row_ranges()
    assert sum(case.lengths) == case.seq and (hi > lo).all(), case.name
    assert hi.max() == case.kv_len and lo.min() == 0, case.name
(case,) = select("llama3_8b_8k")
assert case.flops("fwd") == 4 * 32 * 128 * 8192 * 8193 / 2
assert case.flops("bwd") == 2.5 * case.flops("fwd")

small = {}  # the same expressions on fewer rows
for case in CASES:
    seq, keys = min(case.seq, 200), min(case.keys, 300)
    split = case.split and (70, 1, 129)
    case = dataclasses.replace(case, batch=2, seq=200 if split else seq, keys=keys, split=split,
        window=min(case.window, 33), shortest=case.shortest and 150)
    small[case.kind, case.window, case.split, case.shortest, case.seq, case.keys] = case
for case in small.values():
    lo, hi = (x[..., None] for x in case.row_ranges())
    j = np.arange(case.kv_len)
    pairs = np.asarray(case.expression().as_array(case.seq, case.kv_len))
    pairs = np.broadcast_to(pairs, (2, *pairs.shape[-2:]))
    assert np.array_equal(pairs, (j >= lo) & (j < hi)), case

def row(fwd, bwd):
    return {"times": {"fwd": {"ms": fwd}} | ({"bwd": {"ms": bwd}} if bwd else {})}

results = {"ahead": {"packax": row(1, 2), "cudnn": row(1.5, 2)}, "failed": {"packax": row(1, 1)},
    "behind": {"packax": row(1, 1), "cudnn": row(0.8, None)}}
assert ratios(results) == {"behind": {"fwd": 0.8}, "ahead": {"fwd": 1.5, "bwd": 1.0}}
said = summary(results)
assert "2 of 3 passes" in said and "behind" in said and "ahead" not in said
path = pathlib.Path(sys.argv[1])
draw({"cases": results, "machine": {"gpu": "a GPU"}}, path)
assert path.read_text().count("<rect") == 1 + 2 + 3 and "0.80 / -" in path.read_text()
""",
        str(tmp_path / "picture.svg"),
    )


@pytest.mark.exhaustive  # compiles a dozen references
def test_results_are_compared():
    """packax on the CPU is within the limits of the reference, and outside them with another mask;
    a case has rows for both implementations, though cuDNN does not run here."""
    script("""
import dataclasses
import jax
import models
from lib.model_cases import select

jax.config.update("jax_platforms", "cpu")
small = dict(batch=2, heads=4, kv_heads=2, head_dim=16)
for name, more in {
    "gpt_oss_window128_8k": {"seq": 160, "window": 40},
    "llama3_8b_prefill_512_on_8k": {"seq": 64, "keys": 160},
    "bert_large_padded_512": {"seq": 160, "shortest": 60},
    "t5_base_encoder_512": {"seq": 64},
    "sdxl_cross_1k_77": {"seq": 128},
}.items():
    (case,) = select(name)
    case = dataclasses.replace(case, **small, **more)
    rows = models.run_case(case, *models.packax_alone(case), 1, 1.0)
    ours = rows["packax"]
    assert not ours["wrong"] and not ours["failed"], (name, ours)
    assert set(ours["errors"]) == {"out", "dq", "dk", "dv"} and set(ours["times"]) == {"fwd", "bwd"}
    assert "fwd" in rows["cudnn"]["failed"]
assert "did not run" in models.shown({case.name: rows})
other = dataclasses.replace(case, keys=70)
models.packax_function, made = (lambda _: right), models.packax_function
right = made(dataclasses.replace(case, kind="causal"))
assert models.packax_alone(case)[0]["wrong"]
""")
