"""The benchmark of biases and dropout on tiny cases: packax agrees with its reference, and wrong
results are detected."""

import pytest
from benchmark_scripts import script
from tiers import some

SMALL = """
import dataclasses
import jax, jax.numpy as jnp
import biases
from lib import bias_cases
from lib.bias_cases import BiasCase, CASES
from lib.bias_reference import Reference
from lib.reference import wrong
"""


@pytest.mark.exhaustive
def test_small_cases_run_and_are_tabled():
    shown = script(
        SMALL
        + """
small = [
    BiasCase("pair", 2, 64, 4, 4, 16, "array"),
    BiasCase("t5", 2, 256, 4, 2, 16, "table", causal=True),
    BiasCase("t5_both", 1, 256, 4, 2, 16, "table"),
    BiasCase("dropout", 1, 256, 4, 2, 64, causal=True, dropout=0.1),
    BiasCase("both", 2, 64, 4, 2, 64, "array", dropout=0.3),
]
results = {case.name: biases.run_case(case, 1) for case in small}
for name, rows in results.items():
    assert not rows["packax"]["failed"] and not rows["packax"]["wrong"], (name, rows["packax"])
    assert not rows["xla"]["failed"] and not rows["xla"]["wrong"], (name, rows["xla"])
    assert rows["cudnn"]["failed"]["fwd"]
    assert set(rows["plain"]["times"]) == {"fwd", "bwd"}
assert "dbias" in results["pair"]["packax"]["errors"]
assert "dtable" in results["t5"]["packax"]["errors"]
assert set(results["dropout"]["xla"]["errors"]) == {"mean"}
print(biases.table(results, biases.ORDER))
"""
    )
    (row,) = (x for x in map(str.split, shown.splitlines()) if x[:2] == ["both", "fwd"])
    assert float(row[2]) > 0 and row[-1] == "-"  # the column of cuDNN's error


ALL_WRONG = ("right", "no bias", "no gradient", "other heads", "no dropout", "halved")


@pytest.mark.parametrize("names", some([(("right", "no gradient"),), (ALL_WRONG,)]))
def test_wrong_results_are_detected(names):
    script(
        SMALL
        + f"names = {names}"
        + """
case = BiasCase("both", 2, 64, 4, 2, 64, "array", causal=True, dropout=0.3)
inputs, operand = biases.random_inputs(case), case.operand()
reference = Reference(case, inputs, operand)
right = bias_cases.packax_function(case)
others = {
    "no bias": lambda q, k, v, bias: right(q, k, v, bias * 0),
    "no gradient": lambda q, k, v, bias: right(q, k, v, jax.lax.stop_gradient(bias)),
    "other heads": lambda q, k, v, bias: right(q, k, v, bias[:, ::-1]),
    "no dropout": bias_cases.packax_function(dataclasses.replace(case, dropout=0.0)),
}
for name, function in {"right": right, **others}.items():
    if name not in names:
        continue
    row = biases.checked("packax", function, case, inputs, operand, reference)
    assert bool(row["wrong"]) == (name != "right"), (name, row)
    assert not row["failed"] and ("dbias" in row["wrong"] or name != "no gradient"), row
halved = lambda *x: 0.7 * bias_cases.jax_function(case)(*x)
for name, function in {"right": bias_cases.jax_function(case), "halved": halved}.items():
    if "halved" not in names:
        continue
    row = biases.checked("xla", function, case, inputs, operand, reference)
    assert bool(row["wrong"]) == (name != "right"), (name, row)
assert wrong({"out": float("nan")}) == ["out"]
"""
    )


@pytest.mark.exhaustive
def test_the_cases():
    script(
        SMALL
        + """
assert len({case.name for case in CASES}) == len(CASES)
assert {case.bias for case in CASES} == {"array", "table", "none"}
for case in CASES:
    assert case.seq % 256 == 0 and case.head_dim % 8 == 0 and case.heads % case.kv_heads == 0
case = BiasCase("t5", 1, 300, 1, 1, 16, "table", causal=True)
assert CASES[3].operand().dtype == jnp.float32 and CASES[0].bias == "array"
buckets = case.bias_of(jnp.arange(32.0)[:, None])[0, 0, 299]
assert [int(buckets[299 - far]) for far in (0, 15, 16, 64, 128, 299)] == [0, 15, 16, 26, 31, 31]
both = dataclasses.replace(case, causal=False).bias_of(jnp.arange(32.0)[:, None])[0, 0, 150]
assert [int(both[150 - far]) for far in (7, 8, 150, -1, -149)] == [7, 8, 15, 17, 31]
assert case.flops("fwd") == 4 * 16 * 300 * 301 / 2
"""
    )
