"""The benchmark's own arithmetic: cases are the board's, its reference is right, errors are seen.

Its modules are imported in a process of their own, so that what they set in jax stays there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from benchmark_scripts import script
from paths import BENCHMARKS, COMPARE, SUPPORT

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


def test_odd_cases_and_head_dims_run_and_are_tabled(tmp_path):
    """On the CPU, where cuDNN is absent: it is said so, packax is timed and compared all the
    same."""
    shown = script("""
import dataclasses
import jax.numpy as jnp
import attention
from lib.cases import CASES, Case, select
from lib.tables import deterministic_table, odd_table

for case in CASES:
    assert sum(case.lengths) == case.seq and len(case.lengths) == case.documents, case.name
assert {case.group for case in select(None)} == {"board", "dims", "large"}
assert [case.name for case in select("heads1_8k_d64,causal_16k_d64")] == ["causal_16k_d64",
    "heads1_8k_d64"]

small = [
    Case("ones", 1, 32, 2, 1, 16, 32, split=(1,) * 32, group="odd"),
    Case("rows", 8, 1, 2, 1, 16, 1, group="odd"),
    Case("many", 1, 256, 2, 1, 16, 128, split=(2,) * 128, group="odd"),
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
print(odd_table(results, small))
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


def test_flash_attention_3_gets_documents_and_rows():
    """Its package is not here: one with its names, which is right, is compared and timed; another
    is said to be wrong."""
    script("""
import sys, types
import jax, jax.numpy as jnp
import attention
from lib.cases import Case
from lib.tables import odd_table

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
plain = Case("plain", 2, 64, 4, 2, 128, 1, group="odd")
rows = attention.run_case(plain, 1, ("fa3",))
assert not rows["fa3"]["wrong"] and calls[-1] == ("mha", (2, 64, 4, 128))
shown = odd_table({"plain": rows}, [plain])
assert "FA3 ms" in shown and "cuDNN" not in shown
late = True
wrong = attention.run_case(documents, 1, ("fa3",))["fa3"]
assert wrong["wrong"] and not wrong["times"]
other = attention.run_case(Case("d64", 1, 64, 4, 2, 64, 1), 1, ("fa3",))["fa3"]
assert other["failed"]["fwd"] == "its wheels have head dim 128 alone" and not other["times"]
""")


def test_compiling_ahead_leaves_nothing_to_compile(tmp_path):
    """Every program of a case is in jax's cache before the benchmark runs it."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    commands = (
        [COMPARE / "compile_ahead.py", "--cases", "causal_2x96_d24"],
        [
            "-c",
            "import attention as a; a.run_case(a.select('causal_2x96_d24')[0], 1)",
        ],
    )
    kept = []
    for command in commands:
        result = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            cwd=BENCHMARKS,
            timeout=300,
            env=environment,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        kept.append({path.name for path in tmp_path.glob("*-cache")})
    ahead, then = kept
    assert any(name.startswith("jit_with_residuals-") for name in ahead), ahead
    passes = ("jit_both-", "jit_with_residuals-", "jit_backward-", "jit_sampled_rows-")
    assert not [name for name in then - ahead if name.startswith(passes)], then - ahead


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


def test_a_short_pass_is_timed_in_a_loop():
    """By the worker of versus_wheel.py, whose times are of one pass either way."""
    script("""
import jax_worker

state, loops = jax_worker.State(), {}
for short in (0.0, 1e9):
    jax_worker.SHORT = short
    row = state.prepare_packax("docs3_200_d16", 5.0)
    loops[short] = row["in_a_loop"]
    jax_worker.burst = lambda function, finish, launches: (finish(function()), 40.0)[1]
    expected = 40.0 / jax_worker.LOOP if short else 40.0
    assert state.time("packax", "fwd", 2) == state.time("packax", "bwd", 2) == expected
assert loops == {0.0: [], 1e9: ["bwd", "fwd"]}
""")


def test_power_and_clock_of_a_burst():
    """By a library in NVML's place: 700 W, a clock that falls, held by power in half of the
    samples."""
    script("""
import itertools, time
from lib.power import Meter, line, medians

class Library:
    NVML_CLOCK_SM = 1
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    clocks = itertools.cycle([1900, 1500])
    reasons = itertools.cycle([0, 4 | 1])
    start = time.perf_counter()
    nvmlInit = lambda self: None
    nvmlDeviceGetHandleByIndex = lambda self, i: ("device", i)

    def nvmlDeviceGetClockInfo(self, device, kind):
        assert device == ("device", 0) and kind == 1
        return next(self.clocks)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        return next(self.reasons)

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        return (time.perf_counter() - self.start) * 700e3

result, found = Meter(Library()).during(lambda: (time.sleep(0.3), 7)[1])
assert result == 7 and abs(found["watts"] - 700) < 35, found
assert found["mhz"] in (1500, 1700, 1900) and 0.4 < found["held_by_power"] < 0.6
assert found["held_by_heat"] == 0
whole = medians([found, found, found | {"watts": 1.0}], 10.0)
assert whole["watts"] == found["watts"] and abs(whole["joules"] - 7) < 0.4
assert abs(whole["mcycles"] - found["mhz"] / 100) < 0.01
assert "held by power" in line("packax", "bwd", whole)

def fails():
    raise ValueError("of the burst")

try:
    Meter(Library()).during(fails)
except ValueError as error:
    assert str(error) == "of the burst"
else:
    raise AssertionError
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


def test_options_are_said_alike():
    """Pair by pair, as packax has it: the predicate that FlexAttention and the reference take."""
    script("""
import dataclasses
import numpy as np
from lib.mask_cases import CASES, select

assert select("causal_16k_d64")[0].name == "causal_16k_d64" and len(select(None)) == len(CASES)
done = set()
for case in CASES:
    if case.mask in done:
        continue
    done.add(case.mask)
    case = dataclasses.replace(case, seq=9216, selection=None)
    i, j = np.ogrid[:9216, :9216]
    tables = case.tables()
    allowed = case.allows(0, i, j, tables)
    assert np.array_equal(np.squeeze(case.expression(tables).as_array(9216, 9216)),
        allowed), case.name
assert 0 < allowed.mean() < 1
""")


def test_the_reference_of_options():
    """packax on the CPU, whatever option: every result within the limits, and not with another
    option."""
    script("""
import dataclasses
import jax
import masks
from lib.mask_cases import CASES

jax.config.update("jax_platforms", "cpu")
wrong = {}
for case in CASES:
    if case.name not in ("window1k_32k_d64", "spans_32k_d128", "softcap_16k_d128", "alibi_16k_d128",
        "sinks_16k_d64"):
        continue
    case = dataclasses.replace(case, seq=1536, heads=4, kv_heads=2, dim=16)
    inputs = [4 * x for x in masks.inputs_of(case)[:2]] + list(masks.inputs_of(case)[2:])
    tables = case.tables()
    reference = masks.Reference(case, inputs, tables)
    function, mask, area = masks.packax_function(case, tables)
    assert area == case.expression(tables).as_array(1536, 1536).sum()
    row = masks.usable(function, mask, inputs, reference, 1.0)
    assert not row["wrong"] and not row["failed"], (case.name, row)
    assert set(row["errors"]) == {"out", "dq", "dk", "dv"} and set(row["launches"]) == {"fwd",
        "bwd"}
    plain = dataclasses.replace(case, soft_cap=None, sinks=False, alibi=False, mask=CASES[-1].mask)
    function, mask, _ = masks.packax_function(plain, tables)
    row = masks.usable(function, mask, inputs, reference, 1.0)
    assert row["wrong"] and not row["passes"], (case.name, row)
shown = masks.table({"x": {"packax": {"times": {"fwd": {"ms": 1.0, "tflops": 5.0}},
    "errors": {"out": 1e-3},
                                       "failed": {"bwd": "no kernel"}, "wrong": []}}})
assert "x packax bwd did not run: no kernel" in shown and "1.0e-03" in shown
""")


def test_selections_of_options():
    """Maps of blocks: as many as asked for and none behind the row, said alike by every way,
    counted, and compared."""
    script("""
import dataclasses
import jax
import numpy as np
import masks
from lib import selections
from lib.mask_cases import select

jax.config.update("jax_platforms", "cpu")
selections.CHUNK = 100
sizes = {"moba": (1, 64, 3), "moba_own": (1, 64, 3), "indexer": (1, 1, 90),
    "indexer_blocks": (64, 64, 4)}
cases = {case.name.removesuffix("_32k_d128"): case for case in select("selections")}
assert set(cases) == set(sizes)
S, N = 768, 4
i, j = np.arange(S)[:, None], np.arange(S)
blocks = {}
for name, case in cases.items():
    rows, keys, top = sizes[name]
    assert (case.selection.rows, case.selection.keys) == (rows, 512 if keys == 64
        and rows == 1 else keys)
    of = dataclasses.replace(case.selection, keys=keys, top=top)
    case = dataclasses.replace(case, seq=S, heads=N, kv_heads=2, dim=16, selection=of)
    tables = selections.tables(case)
    chosen = tables["chosen"]
    first_row, first_key = np.arange(0, S, rows)[:, None], np.arange(0, S, keys)
    before = first_key < first_row + rows
    assert not (chosen & ~before).any()
    assert np.array_equal(chosen.sum(-1),
        np.minimum(before.sum(-1), top)[None].repeat(len(chosen), 0))
    assert not of.own or chosen[:, before & (first_key + keys > first_row)].all()
    allowed = case.allows(np.arange(N)[:, None, None], i, j, tables)
    assert np.array_equal(np.broadcast_to(allowed, (N, S, S))[None],
        np.broadcast_to(case.expression(tables).as_array(S, S), (1, N, S, S)))
    assert len(chosen) == (N if of.by_head else 1) and (len(chosen) == 1
        or (chosen[0] != chosen[1]).any())
    function, mask, area = masks.packax_function(case, tables)
    assert area == allowed.sum() / len(allowed if allowed.ndim == 3 else [0])
    shares = selections.shares(case, mask, area)
    tiles = np.broadcast_to(allowed, (N, S, S)).reshape(N, S // 128, 128, S // 64, 64).any((2, 4))
    assert np.isclose(shares["blocks"], tiles.sum() / N / 42) and np.isclose(shares["pairs"],
        area / (S * (S + 1) / 2))
    blocks[name] = shares["blocks"]
    if name not in ("moba", "indexer"):
        continue
    inputs = masks.inputs_of(case)
    reference = masks.Reference(case, inputs, tables)
    row = masks.usable(function, mask, inputs, reference, 1.0)
    assert not row["wrong"] and not row["failed"] and set(row["errors"]) == {"out", "dq", "dk",
        "dv"}, (name, row)
    other = tables | {"chosen": np.roll(chosen, 1, axis=1)}  # the row before's choice
    function, mask, _ = masks.packax_function(case, other)
    assert masks.usable(function, mask, inputs, reference, 1.0)["wrong"], name
assert blocks["moba"] < 0.8 * blocks["moba_own"], blocks

rows = masks.run_case(case, None, 1, 1.0)
shown = masks.table({case.name: rows})
assert set(rows) == {"packax", "dense"} and "WRONG" not in shown and "did not run" not in shown
assert f"has {shares['pairs']:.1%} of causal's pairs" in shown
assert " of its blocks; time: fwd " in shown and ", bwd " in shown
""")


def test_counters_of_kernels(tmp_path):
    """counters.py with a stand-in for ncu: the last launches, numbers with commas, ranks,
    failures."""
    tool = tmp_path / "ncu"
    tool.write_text(
        """#!/bin/bash
echo "==PROF== Connected to process 1"
cat <<'CSV'
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","backward_sm90(int, TensorMap)","SpeedOfLight","Elapsed Cycles","cycle","9,999"
"0","backward_sm90(int, TensorMap)","SpeedOfLight","SM Busy","%","11.00"
"1","backward_sm90(int, TensorMap)","SpeedOfLight","Elapsed Cycles","cycle","17,123,456"
"1","backward_sm90(int, TensorMap)","LaunchStats","Cache Configuration","","CachePreferNone"
"1","backward_sm90(int, TensorMap)","WarpStateStats","Stall Barrier","inst","1.50"
"1","backward_sm90(int, TensorMap)","WarpStateStats","Stall GMMA","inst","2.50"
CSV
echo "$@" >&2
[ "${!#}" != causal_1k_d64 ]
"""
    )
    tool.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    program = [
        sys.executable,
        BENCHMARKS / "tune" / "counters.py",
        "--who",
        "packax",
        "--out",
        tmp_path,
    ]

    def counted(case):
        return subprocess.run(
            [*program, "--cases", case], env=environment, capture_output=True, text=True
        )

    done = counted("causal_16k_d128")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines == [
        ["==", "packax,", "causal_16k_d128"],
        ["backward_sm90"],
        ["Elapsed", "Cycles", "17,123,456.00", "cycle"],
        ["Stall", "GMMA", "2.50", "inst"],
        ["Stall", "Barrier", "1.50", "inst"],
    ]
    assert "9,999" in (tmp_path / "counters_packax_causal_16k_d128.csv").read_text()
    done = counted("causal_1k_d64")
    assert done.returncode == 1
    assert "FAILED (1)" in done.stdout and "--run packax causal_1k_d64" in done.stdout


def test_kernels_of_a_trace():
    """traces.py: by GPU, in order, from its first kernel on; neither the host's events nor
    memsets."""
    shown = script(
        """
import gzip, json, pathlib, tempfile
from lib.traces import listing
name = lambda pid, kind, name, tid=0: {"ph": "M", "pid": pid, "tid": tid, "name": kind,
    "args": {"name": name}}
ran = lambda pid, tid, ts, dur, name: {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur,
    "name": name}
events = [
    name(1, "process_name", "/device:GPU:1"), name(2, "process_name", "/host:CPU"),
    name(1, "thread_name", "Stream #7(Compute)", 3), name(1, "thread_name", "XLA Ops", 4),
    name(2, "thread_name", "Stream #1", 5),
    ran(1, 3, 3500.0, 250.0, "nccl(args<4>)"), ran(1, 3, 2000.0, 1000.0, "forward_sm90"),
    ran(1, 3, 1000.0, 1.0, "Memset 3"),
    ran(1, 4, 1.0, 1.0, "an op"), ran(2, 5, 1.0, 1.0, "host"), {"name": "no process"},
]
with tempfile.TemporaryDirectory() as folder:
    below = pathlib.Path(folder, "plugins")
    below.mkdir()
    with gzip.open(below / "vm.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    print(listing(pathlib.Path(folder)))
"""
    )
    assert [line.split() for line in shown.splitlines()] == [
        ["device:GPU:1"],
        ["0.000", "1.000", "Stream", "#7", "forward_sm90"],
        ["1.500", "0.250", "Stream", "#7", "nccl"],
    ]


def test_power_limit_says_what_each_burst_took():
    """By a meter that reads one thing: times are the functions' own, energy is power times time."""
    script("""
import time
import jax.numpy as jnp
from power_limit import measure, product, table

class Constant:
    def during(self, function):
        return function(), {"watts": 500.0, "mhz": 1000.0, "held_by_power": 1.0,
            "held_by_heat": 0.0}

def slow():
    time.sleep(0.02)
    return jnp.zeros(())

rows = measure({"slow, random": (slow, 1e9), "quick, zeros": (lambda: jnp.zeros(()), 1e6)}, 3, 50.0,
    Constant())
row = rows["slow, random"]
assert 20 <= row["ms"] < 40 and abs(row["tflops"] - 1 / row["ms"]) < 0.1, row
assert abs(row["joules"] - row["ms"] / 2) < 1e-2 and abs(row["mcycles"] - row["ms"]) < 0.02
assert rows["quick, zeros"]["ms"] < row["ms"]
assert [text.split("  ")[0] for text in table(rows).splitlines()] == list(rows)
assert product(64, True)().any() == False and product(64, False)().any()
""")
