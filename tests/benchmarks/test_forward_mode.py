"""benchmarks/forward_mode.py compares tangents and gradients with float64, and lists times."""

from benchmark_scripts import script

CODE = """
import jax
import packax
import forward_mode as f

more = {"causal": True, "documents": 2, "dtype": "float32"}
case = f.ModeCase("small", 1, 192, 2, 1, 16, along=(0, 2), **more)
programs = f.programs
f.programs = lambda *x: {n: p for n, p in programs(*x).items() if n in ("forward", "jvp")}
assert all(ratio <= 2 for ratio in f.check(case).values())
f._packax = lambda q, k, v, mask, **options: packax.flash_attention(q, k, v, packax.full())
assert f.check(case)["jvp"] > 2
times = {f"packax {name}": {"ms": 2.0} for name in f.NAMES}
line = f.table({"small": times}).splitlines()[1]
assert line.split() == ["small", *["2.000"] * 5, "1.00", "1.00"]
"""


def test_a_small_case():
    script(CODE)
