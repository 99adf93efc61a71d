"""The benchmark's own arithmetic: cases are the board's, its reference is right, errors are seen.

Its modules are imported in a separate process, so that what they set in jax stays there.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmark_scripts import script
from paths import BENCHMARKS, SUPPORT

ORACLE = SUPPORT / "oracle.py"


def test_cases_and_flops_are_the_boards():
    """Milliseconds times TFLOP/s of every peer give our count of operations."""
    script("""
import json
from lib.cases import CASES, document_lengths

board = json.load(open("compare/peers.json"))["cases"]
cases = {case.name: case for case in CASES}
assert set(board) <= set(cases)
for name, peers in board.items():
    case = cases[name]
    assert sum(case.lengths) == case.seq and len(case.lengths) == case.documents
    flops = {"fwd": case.forward_flops, "bwd": case.backward_flops}
    flops["fwd+bwd"] = sum(flops.values())
    for peer, passes in peers.items():
        for what, row in passes.items():
            counted = row["ms"] * row["tflops"] * 1e9
            assert abs(counted / flops[what] - 1) < 2e-3, (name, peer, what, counted, flops[what])
assert document_lengths(1000, 1) == [1000]
""")


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


def test_table_and_chart(tmp_path):
    pytest.importorskip("matplotlib")
    shown = script(
        """
import json, pathlib, sys
from lib.tables import table
from lib.chart import bar_chart

peers = json.load(open("compare/peers.json"))
cell = {"ms": 2.0, "tflops": 321.0}
rows = {
    "packax": {"times": {"fwd": cell}, "errors": {"out": 1e-3}},
    "cudnn": {"times": {}, "errors": {}, "failed": {"fwd": "out of memory"}},
    "ratio": {},
}
report = {
    "machine": {"gpu": "G", "driver": "1", "jax": "2", "cudnn": "3", "date": "4"},
    "commit": "abcdef",
    "cases": {"docs12_32k_d128": rows, "docs12_1m_d64": {"failed": "why"}},
}
print(table(report["cases"], peers))
bar_chart(report, peers, pathlib.Path(sys.argv[1]))
rows["fa4"] = {"times": {"bwd": cell}}
bar_chart(report, peers, pathlib.Path(sys.argv[2]))
""",
        str(tmp_path / "chart.png"),
        str(tmp_path / "beside_fa4.png"),
    )
    (line,) = (line for line in shown.splitlines() if line.startswith("docs12_32k_d128     fwd "))
    assert line.split()[2:6] == ["2.000", "321.0", "-", "-"]
    drawn = [(tmp_path / name).read_bytes() for name in ("chart.png", "beside_fa4.png")]
    assert all(picture.startswith(b"\x89PNG") for picture in drawn) and drawn[0] != drawn[1]


@pytest.mark.exhaustive
def test_short_cases_and_head_dims_run_and_are_tabled(tmp_path):
    """On the CPU, where cuDNN is absent: it is said so, packax is timed and compared all the
    same."""
    shown = script("""
import dataclasses
import jax.numpy as jnp
import attention
from lib.cases import CASES, Case, select
from lib.tables import deterministic_table, short_table

for case in CASES:
    assert sum(case.lengths) == case.seq and len(case.lengths) == case.documents, case.name
assert {case.group for case in select(None)} == {"board", "dims", "large"}
assert [case.name for case in select("heads1_8k_d64,causal_16k_d64")] == ["causal_16k_d64",
    "heads1_8k_d64"]

small = [
    Case("ones", 1, 32, 2, 1, 16, 32, split=(1,) * 32, group="short"),
    Case("rows", 8, 1, 2, 1, 16, 1, group="short"),
    Case("many", 1, 256, 2, 1, 16, 128, split=(2,) * 128, group="short"),
    Case("unequal", 1, 64, 2, 1, 24, 1, v_dim=16, group="dims"),
]
assert small[3].forward_flops == 2 * 2 * (24 + 16) * 65 * 32
assert small[3].backward_flops == 2 * 2 * (3 * 24 + 2 * 16) * 65 * 32
results = {case.name: attention.run_case(case, 1) for case in small}
for rows in results.values():
    assert not rows["packax"]["failed"] and not rows["packax"]["wrong"], rows["packax"]
    assert rows["cudnn"]["failed"]["fwd"]
assert results["many"]["cudnn"]["failed"]["bwd"].startswith("not tried with 128 documents")
assert results["unequal"]["deterministic"]["bit_identical"]
assert results["ones"]["packax"]["times"]["fwd"]["launches"] >= 2 * attention.LOOP
print(short_table(results, small))
print(deterministic_table({"unequal": results["unequal"]}))
""")
    lines = [line.split() for line in shown.splitlines()]
    (row,) = (line for line in lines if line[:2] == ["many", "bwd"])
    assert " ".join(row).endswith("cuDNN: not tried with 128 documents, for its workspace")
    assert any(line[:1] == ["unequal"] and line[-2:] == ["the", "same"] for line in lines)


def test_drawn_lengths_are_a_rows():
    script("""
from lib.cases import drawn_lengths, select

for case, mean in zip(select("lengths"), (500, 1500, 4000), strict=True):
    assert case.lengths == list(drawn_lengths(131072, mean)) and sum(case.lengths) == 131072
    assert 0.6 < 131072 / case.documents / mean < 1.5 and min(case.lengths) > 0
    assert any(n % 64 for n in case.lengths) and max(case.lengths) > 4 * min(case.lengths)
assert drawn_lengths(10, 1000) == (10,)
""")


@pytest.mark.exhaustive
def test_flash_attention_3_gets_documents_and_rows():
    """Its package is not here: one with its names, which is right, is compared and timed; another
    is said to be wrong."""
    script("""
import sys, types
import jax, jax.numpy as jnp
import attention
from lib.cases import Case
from lib.tables import short_table

calls = []

def flash_mha(q, k, v, softmax_scale, is_causal):
    calls.append(("mha", q.shape))
    return jax.nn.dot_product_attention(q, k, v, scale=softmax_scale, is_causal=is_causal)

def flash_mha_varlen(q, k, v, edges, *, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal):
    calls.append(("varlen", q.shape, edges.shape, max_seqlen_q, max_seqlen_k))
    ids = jnp.searchsorted(edges, jnp.arange(q.shape[0]), side="right")
    same = ids[:, None] == ids
    if late:
        same = same.at[-1].set(True)
    options = {"mask": same[None, None], "scale": softmax_scale, "is_causal": is_causal}
    return jax.nn.dot_product_attention(q[None], k[None], v[None], **options)[0]

both = {"flash_mha": flash_mha, "flash_mha_varlen": flash_mha_varlen}
sys.modules["flash_attn3_jax"] = types.SimpleNamespace(**both)
late = False
documents = Case("documents", 1, 300, 4, 2, 128, 3, split=(100, 7, 193))
rows = attention.run_case(documents, 1, ("fa3",))
assert set(rows["ratio"]) == {"fa3"} and rows["ratio"]["fa3"]["bwd"] > 0
assert not rows["fa3"]["wrong"]
assert calls[0] == ("varlen", (300, 4, 128), (4,), 193, 193)
plain = Case("plain", 2, 64, 4, 2, 128, 1, group="short")
rows = attention.run_case(plain, 1, ("fa3",))
assert not rows["fa3"]["wrong"] and calls[-1] == ("mha", (2, 64, 4, 128))
shown = short_table({"plain": rows}, [plain])
assert "FA3 ms" in shown and "cuDNN" not in shown
late = True
wrong = attention.run_case(documents, 1, ("fa3",))["fa3"]
assert wrong["wrong"] and not wrong["times"]
other = attention.run_case(Case("d64", 1, 64, 4, 2, 64, 1), 1, ("fa3",))["fa3"]
assert other["failed"]["fwd"] == "its wheels have head dim 128 alone" and not other["times"]
""")


def test_a_loop_runs_every_pass():
    """XLA may not hoist it out of the loop, nor run it fewer times."""
    script("""
import jax
from lib.cases import Case
from lib.implementations import Compiled, Implementation, random_inputs

case = Case("small", 1, 128, 2, 1, 32, 1)
calls = []

def attention(query, key, value, _):
    return jax.pure_callback(lambda x: (calls.append(1), x)[1], query, query)

compiled = Compiled(Implementation("counted", attention, ()), random_inputs(case))
jax.block_until_ready(compiled.forward_loop(5)())
assert len(calls) == 5, calls
""")


def test_decoding_is_timed_in_a_loop():
    """LOOP passes in a call, none hoisted out of the loop."""
    script("""
import jax, packax
from decode import looped, tensors
from lib.decode_cases import Case
from lib.implementations import LOOP

case = Case("small", (700, 300), heads=4, kv_heads=2, dim=64)
arrays = tensors(case, "float32")
calls = []

def counted(**arrays):
    seen = lambda x: (calls.append(1), x)[1]
    query = arrays["query"]
    return jax.pure_callback(seen, query, query) + packax.decode_attention(**arrays)

jax.block_until_ready(looped(counted, arrays)())
assert len(calls) == LOOP, calls
""")


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
def test_plans_of_context_parallelism_on_tiny_rows(tmp_path):
    """On two fake devices: every plan is right, and a local one fetches less."""
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
sys.argv[1:] = ["--quick", "--cases", "mean40_2k", "--rounds", "1", "--out", sys.argv[1]]
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


@pytest.mark.exhaustive
def test_windows_of_context_parallelism_on_tiny_rows(tmp_path):
    shown = script(
        """
import os, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import context

case = ["--cases", "window100_1k", "--only", "zigzag"]
sys.argv[1:] = ["--quick", *case, "--rounds", "1", "--out", sys.argv[1]]
assert context.main() == 0
""",
        str(tmp_path),
    )
    assert "WRONG" not in shown
    report = json.loads((tmp_path / "context_cases.json").read_text())
    (row,) = report["cases"]["window100_1k"]["schemes"].values()
    halos = 2 * 128 * 2 * 8 * 16 * 2  # bytes of two tiles
    assert row["fetched"] == round(halos / 2**20, 1)


@pytest.mark.exhaustive
def test_padded_head_dims_are_compared_before_they_are_timed():
    """A padding that is wrong is found, and not timed."""
    shown = script("""
import jax.numpy as jnp
import head_dims as program
from lib.cases import Case
from packax._src.ops import lowering

case = Case("small", 1, 96, 4, 2, 24, 1)
report = program.run(case, rounds=1)
assert not report["wrong"] and set(report["times"]["fwd"]) == {"fallback", "packax"}
print(program.line(case.name, report))
padded = lowering.padded_dims
with program.unpadded():
    assert lowering.padded_dims("forward", None, None, False) is None
assert lowering.padded_dims is padded

attention = program.packax_attention
calls = []
def wrong(case):
    made = attention(case)
    calls.append(case)
    if len(calls) == 1:
        return made
    return type(made)("packax", lambda *x: 1.1 * made.function(*x), made.operands)
program.packax_attention = wrong
report = program.run(case, rounds=1)
assert report["wrong"] and not report["times"]
assert "WRONG" in program.line(case.name, report)
""")
    assert "fallback" in shown


def test_rows_of_plans_are_filled_greedily():
    script("""
from context_plans import fit

assert fit([60, 50, 40, 30, 10, 10], 100) == [[0, 2], [1, 3, 4, 5]]
try:
    fit([101], 100)
except ValueError as error:
    assert "a document of 101 tokens does not fit in a row of 100" in str(error)
""")
