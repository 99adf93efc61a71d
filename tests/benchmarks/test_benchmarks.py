"""The attention benchmark: it counts operations, its reference is right, and it detects errors.

Its modules are imported in a separate process, so that their jax settings do not reach the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmark_scripts import script
from paths import BENCHMARKS, SUPPORT

ORACLE = SUPPORT / "oracle.py"


def test_cases_and_flops():
    """Per attended pair and element of the head dim: four operations forward, ten backward."""
    script("""
from lib.cases import CASES, document_lengths, select

for case in CASES:
    assert sum(case.lengths) == case.seq and len(case.lengths) == case.documents, case.name
(case,) = select("causal_16k_d128")
assert case.forward_flops == 4 * 32 * 128 * 16384 * 16385 / 2
assert case.backward_flops == 2.5 * case.forward_flops
(case,) = select("docs12_32k_d64")
assert case.area == sum(n * (n + 1) // 2 for n in case.lengths)
window = select("docs12_32k_window1k_d128")[0]
assert window.area == sum(min(i + 1, 1024) for n in window.lengths for i in range(n))
assert document_lengths(1000, 1) == [1000]
assert [case.name for case in select("heads1_8k_d64,causal_16k_d64")] == ["causal_16k_d64",
    "heads1_8k_d64"]
try:
    select("board,bord")
except SystemExit as error:
    assert "no case or group named bord; there are board, dims" in str(error)
else:
    raise AssertionError
""")


@pytest.mark.exhaustive
def test_the_reference_against_the_oracle():
    script(f"""
import sys
import importlib.util
import jax.numpy as jnp, numpy as np
from lib.cases import Case
from lib import reference
from lib.implementations import random_inputs
spec = importlib.util.spec_from_file_location("oracle", {str(ORACLE)!r})
oracle = importlib.util.module_from_spec(spec)
sys.path.append({str(SUPPORT)!r})  # what it imports
spec.loader.exec_module(oracle)

case = Case("small", 1, 640, 4, 2, 64, 4)
inputs = random_inputs(case)
ids = case.segment_ids()[0]
allowed = (ids[:, None] == ids[None]) & np.tri(640, dtype=bool)
query, key, value, dout = inputs
true = oracle.exact(query, key, value, allowed, 64**-0.5, dout)
out, dq, dk, dv = (jnp.asarray(x, jnp.float32) for x in (true.out, true.dq, true.dk, true.dv))
for whole_row in (131072, 100):  # the second: over one document
    reference.WHOLE_ROW = whole_row
    judge = reference.Reference(case, inputs)
    errors = judge.errors(out, (dq, dk, dv))
    assert set(errors) == {{"out", "dq", "dk", "dv"}} and max(errors.values()) < 1e-5, errors
    assert reference.wrong(errors) == []
    start = judge.window.start
    moved = dk.at[0, start, judge.head].add(3.0)
    assert reference.wrong(judge.errors(out, (dq, moved, dv))) == ["dk"]
    assert reference.wrong(judge.errors(out * jnp.nan, None)) == ["out"]
""")


@pytest.mark.exhaustive
def test_short_cases_and_head_dims_run_and_are_tabled():
    """On the CPU, without cuDNN: its absence is reported, and packax is timed and compared."""
    shown = script("""
import attention
from compare.jax_worker import Jax
from lib.cases import Case

small = [
    Case("ones", 1, 32, 2, 1, 16, 32, split=(1,) * 32, group="short"),
    Case("rows", 8, 1, 2, 1, 16, 1, group="short"),
    Case("many", 1, 256, 2, 1, 16, 128, split=(2,) * 128, group="short"),
    Case("unequal", 1, 64, 2, 1, 24, 1, v_dim=16, group="dims"),
]
assert small[3].forward_flops == 2 * 2 * (24 + 16) * 65 * 32
assert small[3].backward_flops == 2 * 2 * (3 * 24 + 2 * 16) * 65 * 32
jax = Jax()
peers = ("cudnn", "deterministic")
results = {case.name: attention.run_case(case, {"jax": jax}, 1, 1.0, peers) for case in small}
for name, rows in results.items():
    for who in ("packax", "deterministic"):
        assert not rows[who]["failed"] and not rows[who]["wrong"], (name, rows[who])
    assert rows["cudnn"]["failed"]["fwd"]
assert results["many"]["cudnn"]["failed"]["bwd"].startswith("not tried with 128 documents")
assert set(results["unequal"]["deterministic"]["times"]) == {"fwd", "bwd"}
assert jax.loops == 1
print(attention.table(results, attention.ORDER))
print(attention.bandwidths(results, small))
""")
    lines = [line.split() for line in shown.splitlines()]
    assert any(line[:2] == ["many", "bwd"] and len(line) == 4 for line in lines)
    said = "many cudnn bwd did not run: not tried with 128 documents, for its workspace"
    assert said in shown


@pytest.mark.exhaustive
def test_padded_head_dims_are_compared_before_they_are_timed():
    """They are compared with an unpadded call. A wrong result is found and not timed."""
    script("""
import attention
from compare import jax_worker
from lib.cases import Case
from lib.implementations import unpadded
from packax._src.ops import lowering

case = Case("small", 1, 96, 4, 2, 24, 1)
rows = attention.run_case(case, {"jax": jax_worker.Jax()}, 1, 1.0, ("fallback",))
assert set(rows) == {"packax", "fallback"}
assert set(rows["packax"]["times"]) == set(rows["fallback"]["times"]) == {"fwd", "bwd"}
padded = lowering.padded_dims
with unpadded():
    assert lowering.padded_dims("forward", None, None, False) is None
assert lowering.padded_dims is padded

right = jax_worker.packax_attention
def wrong(case, **options):
    made = right(case, **options)
    return type(made)("packax", lambda *x: 1.1 * made.function(*x), made.operands)
jax_worker.packax_attention = wrong
rows = attention.run_case(case, {"jax": jax_worker.Jax()}, 1, 1.0)
assert rows["packax"]["wrong"] and not rows["packax"]["times"]
assert attention.bad_cases({"small": rows}) == ["small"]
assert "small packax WRONG: out" in attention.table({"small": rows}, attention.ORDER)
""")


def test_a_loop_runs_every_pass():
    """XLA may neither hoist the pass out of the loop nor run it fewer times."""
    script("""
import jax
import numpy as np
from lib.cases import Case
from lib.implementations import Compiled, Implementation, random_inputs

case = Case("small", 1, 128, 2, 1, 32, 1)
calls = []

def attention(query, key, value, _):
    # NumPy's zero: to return the jax array x, the callback would wait for a thread of XLA's pool.
    zero = lambda x: (calls.append(1), np.zeros((), query.dtype))[1]
    return query + jax.pure_callback(zero, query[0, 0, 0, 0], query[0, 0, 0, 0])

compiled = Compiled(Implementation("counted", attention, ()), random_inputs(case))
jax.block_until_ready(compiled.function("fwd", 5)())
assert len(calls) == 5, calls
""")


@pytest.mark.exhaustive
def test_decoding_is_timed_in_a_loop():
    """A call runs LOOP passes, none of which is hoisted out of the loop."""
    script("""
import jax, packax
import numpy as np
from decode import Case, compiled_of, tensors
from lib.implementations import LOOP

case = Case("small", (700, 300), heads=4, kv_heads=2, dim=64)
arrays = tensors(case, "float32")
calls = []

def counted(**arrays):
    query = arrays["query"]
    zero = lambda x: (calls.append(1), np.zeros((), query.dtype))[1]
    counting = jax.pure_callback(zero, query[0, 0, 0, 0], query[0, 0, 0, 0])
    return counting + packax.decode_attention(**arrays)

jax.block_until_ready(compiled_of("counted", counted, arrays).function("fwd", LOOP)())
assert len(calls) == LOOP, calls
""")


@pytest.mark.exhaustive
def test_the_program_that_times_kvax_traces():
    result = subprocess.run(
        [sys.executable, "compare/versus_kvax.py", "--trace"],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "packax.kvax: traced, results as inputs" in result.stdout
    assert "OTHER" not in result.stdout


@pytest.mark.exhaustive
def test_plans_and_windows_of_context_parallelism_on_tiny_rows(tmp_path):
    """On two fake devices, every plan is right, and the local plan fetches less."""
    shown = script(
        """
import os, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import context
from lib.context_cases import CASES

assert len(CASES) == 16 and {case.seq for case in CASES} == {131072, 524288}
for case in CASES:
    assert sum(case.lengths) == case.seq and len(case.lengths) == case.documents
out = sys.argv[1]
for more in (["mean40_2k"], ["window100_1k", "--only", "zigzag", "--out", out + "/windows"]):
    sys.argv[1:] = ["--quick", "--rounds", "1", "--out", out, "--cases", *more]
    assert context.main() == 0
""",
        str(tmp_path),
    )
    assert "WRONG" not in shown
    report = json.loads((tmp_path / "context_cases.json").read_text())
    found = report["cases"]["mean40_2k"]
    assert found["schemes"].keys() == {"none", "zigzag", "balanced", "local"}
    for row in (*found["schemes"].values(), found["one_gpu"], found["slowest"]):
        assert {cell["ms"] > 0 for cell in row["times"].values()} == {True}
        assert row["times"].keys() == {"fwd", "bwd"}
    fetched = {name: row["fetched"] for name, row in found["schemes"].items()}
    assert fetched["none"] == fetched["balanced"] == 1024 * 2 * 8 * 16 * 2 / 2**20
    assert 0 < fetched["local"] < fetched["balanced"]
    report = json.loads((tmp_path / "windows" / "context_cases.json").read_text())
    (row,) = report["cases"]["window100_1k"]["schemes"].values()
    halos = 2 * 128 * 2 * 8 * 16 * 2  # bytes of two tiles
    assert row["fetched"] == round(halos / 2**20, 1)


def test_rows_of_plans_are_filled_greedily():
    script("""
from context_plans import fit

assert fit([60, 50, 40, 30, 10, 10], 100) == [[0, 2], [1, 3, 4, 5]]
try:
    fit([101], 100)
except ValueError as error:
    assert "a document of 101 tokens does not fit in a row of 100" in str(error)
""")


def test_every_round_has_a_different_order():
    """The orders are the same in every run, and no name always follows the same other name."""
    script("""
from lib import turns

names = [f"scheme {n}" for n in range(10)]
orders = [turns.shuffled(names, turn) for turn in range(5)]
assert orders == [turns.shuffled(reversed(names), turn) for turn in range(5)]
assert all(sorted(order) == sorted(names) for order in orders)
for name in names:
    before = {order[order.index(name) - 1] for order in orders if order.index(name) > 0}
    assert len(before) > 1, name
ran = []
bursts = {name: lambda name=name: ran.append(name) or 1.0 for name in names}
assert turns.in_turns(bursts, 2) == {name: [1.0, 1.0] for name in names}
assert ran == orders[0] + orders[1]
""")
