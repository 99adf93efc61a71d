"""benchmarks/cpu.py compares results, and reports times, memory and ratios of both passes."""

from benchmark_scripts import script

CODE = """
import cpu

row = cpu.measured(length=64, documents=4, rounds=1)
assert set(row) == {"forward", "both passes"}
for found in row.values():
    ours, theirs = found["packax"], found["jax.nn"]
    assert found["jax.nn / packax, ms"] == theirs["ms"] / ours["ms"] > 0
    assert found["jax.nn / packax, MiB"] == theirs["MiB"] / ours["MiB"] > 0
"""


def test_a_small_case():
    script(CODE)
