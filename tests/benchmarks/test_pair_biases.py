"""benchmarks/pair_biases.py compares results with a reference, and lists them."""

from benchmark_scripts import script

CODE = """
import dataclasses
import jax
import jax.numpy as jnp
import pair_biases

case = pair_biases.PairCase(3, 16, 2, 16, "float32")
inputs = case.inputs()
expected = jax.jit(pair_biases.reference)(*inputs)
row = pair_biases.prepared("packax", pair_biases.packax_function, inputs, expected)
assert not row["wrong"] and not row["failed"] and set(row["passes"]) == {"fwd", "bwd"}, row
assert set(row["errors"]) == {"out", "dq", "dk", "dv", "dbias"}

def without_bias(q, k, v, bias):
    return pair_biases.packax_function(q, k, v, jnp.zeros_like(bias))

bad = pair_biases.prepared("packax", without_bias, inputs, expected)
assert "dbias" in bad["wrong"] and not bad["passes"]
times = {what: {"ms": 1.25} for what in ("fwd", "bwd")}
(head, line) = pair_biases.short({case.name: {"packax": row | {"times": times}}}).splitlines()
assert "1.250 / 1.250" in line and line.startswith("3x16_h2_d16_f32")
two = dataclasses.replace(case, samples=2)
inputs = two.inputs()
expected = jax.jit(pair_biases.reference)(*inputs)
row = pair_biases.prepared("packax", pair_biases.packax_function, inputs, expected)
assert not row["wrong"] and not row["failed"], row
"""


def test_a_small_case():
    script(CODE)
