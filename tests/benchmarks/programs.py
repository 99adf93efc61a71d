"""Checks of the benchmarks' modules: `python tests/benchmarks/programs.py NAME OUT` runs one."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path


def numbers(out):
    """Counts of operations, selections of cases, masks and orders, without a measurement."""
    import jax
    import numpy as np
    import train_step
    from context_plans import fit
    from lib import cases, llama, turns
    from lib.model_cases import CASES as MODELS

    for case in cases.CASES:
        assert sum(case.lengths) == case.seq and len(case.lengths) == case.documents, case.name
    (case,) = cases.select("causal_16k_d128")
    assert case.forward_flops == 4 * 32 * 128 * 16384 * 16385 / 2
    assert case.backward_flops == 2.5 * case.forward_flops
    window = cases.select("docs12_32k_window1k_d128")[0]
    assert window.area == sum(min(i + 1, 1024) for n in window.lengths for i in range(n))
    chosen = [case.name for case in cases.select("heads1_8k_d64,causal_16k_d64")]
    assert chosen == ["causal_16k_d64", "heads1_8k_d64"]
    assert fit([60, 50, 40, 30, 10, 10], 100) == [[0, 2], [1, 3, 4, 5]]

    small = {}  # the expressions of models on fewer rows
    for case in MODELS:
        lo, hi = case.row_ranges()
        assert (hi > lo).all() and hi.max() == case.kv_len and lo.min() == 0, case.name
        split, seq = case.split and (70, 1, 129), min(case.seq, 200)
        sizes = {"seq": 200 if split else seq, "keys": min(case.keys, 300), "split": split}
        sizes |= {"window": min(case.window, 33), "shortest": case.shortest and 150, "batch": 2}
        case = dataclasses.replace(case, **sizes)
        small[case.kind, case.window, case.split, case.shortest, case.seq, case.keys] = case
    for case in small.values():
        lo, hi = (x[..., None] for x in case.row_ranges())
        pairs = np.asarray(case.expression().as_array(case.seq, case.kv_len))
        pairs = np.broadcast_to(pairs, (2, *pairs.shape[-2:]))
        j = np.arange(case.kv_len)
        assert np.array_equal(pairs, (j >= lo) & (j < hi)), case

    names = [f"scheme {n}" for n in range(10)]  # no name always follows the same other name
    orders = [turns.shuffled(names, turn) for turn in range(5)]
    assert orders == [turns.shuffled(reversed(names), turn) for turn in range(5)]
    for name in names:
        before = {order[order.index(name) - 1] for order in orders if order.index(name) > 0}
        assert len(before) > 1, name
    ran = []
    bursts = {name: lambda name=name: ran.append(name) or 1.0 for name in names}
    assert turns.in_turns(bursts, 2) == {name: [1.0, 1.0] for name in names}
    assert ran == orders[0] + orders[1]

    # Six operations per step, token and matrix element, besides attention.
    config = llama.config_of(3, **train_step.TINY)
    state = jax.eval_shape(lambda: llama.initialize(config, jax.random.key(0)))["parameters"]
    layer, last = config.matrices()
    assert 3 * layer == sum(x.size for x in state["layers"].values() if x.ndim == 3)
    case = train_step.Run(256, 3, 3).case(config)
    attention = 3 * (4 + 10) * case.heads * case.head_dim * case.area
    assert train_step.flops_of([case], config, 3) == 6 * 256 * (3 * layer + last) + attention


def reference(out):
    """That of long rows, for one document or for the whole row."""
    import dense
    import jax.numpy as jnp
    import numpy as np
    from lib import reference
    from lib.cases import Case
    from lib.implementations import random_inputs

    case = Case("small", 1, 640, 4, 2, 64, 4)
    inputs = random_inputs(case)
    ids = case.segment_ids()[0]
    allowed = (ids[:, None] == ids[None]) & np.tri(640, dtype=bool)
    arrays = dict(zip(("query", "key", "value", "dout"), inputs, strict=True))
    true = dense.dense(arrays | {"scale": 64**-0.5}, allowed)
    result, dq, dk, dv = (
        jnp.asarray(true[n], "float32") for n in ("out", "dquery", "dkey", "dvalue")
    )
    for longest in (131072, 100):
        reference.WHOLE_ROW = longest
        judge = reference.Reference(case, inputs)
        errors = judge.errors(result, (dq, dk, dv))
        assert set(errors) == {"out", "dq", "dk", "dv"} and max(errors.values()) < 1e-5, errors
        assert reference.wrong(errors) == []
        moved = dk.at[0, judge.window.start, judge.head].add(3.0)
        assert reference.wrong(judge.errors(result, (dq, moved, dv))) == ["dk"]
        assert reference.wrong(judge.errors(result * jnp.nan, None)) == ["out"]


def attention(out):
    """Without cuDNN: its absence is reported. A wrong result is found and not timed."""
    import attention
    from compare import jax_worker
    from lib.cases import Case

    small = [
        Case("ones", 1, 32, 2, 1, 16, 32, split=(1,) * 32, group="short"),
        Case("many", 1, 256, 2, 1, 16, 128, split=(2,) * 128, group="short"),
        Case("unequal", 1, 96, 2, 1, 24, 1, v_dim=16, group="dims"),
    ]
    assert small[2].forward_flops == 2 * 2 * (24 + 16) * 97 * 48
    assert small[2].backward_flops == 2 * 2 * (3 * 24 + 2 * 16) * 97 * 48
    worker = jax_worker.Jax()
    peers = ("cudnn", "deterministic", "fallback")
    results = {x.name: attention.run_case(x, {"jax": worker}, 1, 1.0, peers) for x in small}
    for name, rows in results.items():
        for who in {"packax", "deterministic", "fallback"} & rows.keys():
            assert not rows[who]["failed"] and not rows[who]["wrong"], (name, rows[who])
            assert set(rows[who]["times"]) == {"fwd", "bwd"}
        assert rows["cudnn"]["failed"]["fwd"]
    shown = attention.table(results, attention.ORDER) + attention.bandwidths(results, small)
    assert "many cudnn bwd did not run: not tried with 128 documents, for its workspace" in shown

    right = jax_worker.packax_attention

    def wrong(case, **options):
        made = right(case, **options)
        return type(made)("packax", lambda *x: 1.1 * made.function(*x), made.operands)

    jax_worker.packax_attention = wrong
    rows = {"unequal": attention.run_case(small[2], {"jax": worker}, 1, 1.0)}
    assert rows["unequal"]["packax"]["wrong"] and not rows["unequal"]["packax"]["times"]
    assert attention.bad_cases(rows) == ["unequal"]
    assert "unequal packax WRONG: out" in attention.table(rows, attention.ORDER)


def loops(out):
    """XLA may neither hoist a pass out of a loop nor run it fewer times, and decoding's neither."""
    import decode
    import jax
    import numpy as np
    import packax
    from lib.cases import Case
    from lib.implementations import LOOP, Compiled, Implementation, random_inputs

    calls = []

    def counted(query):
        # NumPy's zero: to return the jax array x, the callback would wait for a thread of XLA's.
        zero = lambda x: (calls.append(1), np.zeros((), query.dtype))[1]  # noqa: E731
        return jax.pure_callback(zero, query[0, 0, 0, 0], query[0, 0, 0, 0])

    case = Case("small", 1, 128, 2, 1, 32, 1)
    one = Implementation("counted", lambda query, *_: query + counted(query), ())
    jax.block_until_ready(Compiled(one, random_inputs(case)).function("fwd", 5)())
    assert len(calls) == 5, calls
    calls.clear()
    arrays = decode.tensors(
        decode.Case("small", (700, 300), heads=4, kv_heads=2, dim=64), "float32"
    )
    attend = lambda **x: counted(x["query"]) + packax.decode_attention(**x)  # noqa: E731
    jax.block_until_ready(decode.compiled_of("counted", attend, arrays).function("fwd", LOOP)())
    assert len(calls) == LOOP, calls


def cpu(out):
    import cpu

    for documents in (0, 4):
        row = cpu.measured(rows=2, length=64, heads=2, documents=documents, rounds=1)
        assert set(row) == {"forward", "both passes"}
        for found in row.values():
            ours, theirs = found["packax"], found["jax.nn"]
            for unit in cpu.UNITS:
                assert found[f"jax.nn / packax, {unit}"] == theirs[unit] / ours[unit] > 0


def forward_mode(out):
    import forward_mode as f
    import packax

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


def pair_biases(out):
    import jax
    import jax.numpy as jnp
    import pair_biases

    def row_of(case, function):
        inputs = case.inputs()
        expected = jax.jit(pair_biases.reference)(*inputs)
        return pair_biases.prepared("packax", function, inputs, expected)

    def no_bias(q, k, v, bias):
        return pair_biases.packax_function(q, k, v, jnp.zeros_like(bias))

    case = pair_biases.PairCase(3, 16, 2, 16, "float32", samples=2)
    row = row_of(case, pair_biases.packax_function)
    assert not row["wrong"] and not row["failed"] and set(row["passes"]) == {"fwd", "bwd"}, row
    assert set(row["errors"]) == {"out", "dq", "dk", "dv", "dbias"}
    bad = row_of(case, no_bias)
    assert "dbias" in bad["wrong"] and not bad["passes"]
    times = {what: {"ms": 1.25} for what in ("fwd", "bwd")}
    (_, line) = pair_biases.short({case.name: {"packax": row | {"times": times}}}).splitlines()
    assert "1.250 / 1.250" in line and "3x16_h2_d16_f32" in line


def decode(out):
    import decode

    decode.COPIED, decode.machine = 1 << 12, dict
    small = decode.Case("small", (64,), heads=2, kv_heads=1, dim=8, page_size=16)

    def run(status, case, *more):
        options = ["--out", out, "--implementation", "xla", "--rounds", "1", *more]
        assert decode.main(options, (case,)) == status
        (row,) = json.loads(Path(out, "decode.json").read_text())["cases"].values()
        return row

    row = run(0, small)
    assert row["bytes"] == 2 * 2 * 64 * 8 and set(row["times"]) == {"packax", "fp8", "copy"}
    assert 0 < row["fp8_from_16_bits"] < 0.1 and row["errors"]["fp8"] < 1e-2
    assert row["left_out"] == {"cudnn": "no pages"}
    decode.LIMIT = {"bfloat16": -1.0}
    row = run(1, decode.Case("dense", (64,), heads=2, kv_heads=1, dim=8))
    assert row["left_out"]["packax"].startswith("wrong") and "packax" not in row["times"]


def serving(out):
    import serving

    serving.machine = dict
    sizes = {"heads": 2, "kv_heads": 1, "dim": 8, "page_size": 4}
    cases = {
        "flash_attention": serving.Case("chunk", (64,), (20,), **sizes),
        "decoding alone, chunk alone": serving.Case("mix", (30, 30, 40), (1, 1, 17), **sizes),
        "decode_attention": serving.Case("decoding", (30, 40), (2, 2), room=9, fp8=True, **sizes),
    }
    options = ["--out", out, "--implementation", "xla", "--rounds", "1"]
    assert serving.main(options, tuple(cases.values())) == 0
    rows = json.loads(Path(out, "serving.json").read_text())["cases"].values()
    for row, others in zip(rows, cases, strict=True):
        assert [*row["times"]] == ["packax", *others.split(", ")] and row["ratio"] > 0
        assert row["errors"]["packax"] == 0


def biases(out):
    import biases
    import jax
    from lib import bias_cases
    from lib.bias_cases import BiasCase
    from lib.bias_reference import Reference

    small = [
        BiasCase("t5", 2, 256, 4, 2, 16, "table", causal=True),
        BiasCase("both", 2, 64, 4, 2, 64, "array", causal=True, dropout=0.3),
    ]
    results = {case.name: biases.run_case(case, 1) for case in small}
    for name, rows in results.items():
        for who in ("packax", "xla"):
            assert not rows[who]["failed"] and not rows[who]["wrong"], (name, rows[who])
        assert rows["cudnn"]["failed"]["fwd"] and set(rows["plain"]["times"]) == {"fwd", "bwd"}
    assert "dtable" in results["t5"]["packax"]["errors"]
    shown = biases.table(results, biases.ORDER)
    (row,) = (x for x in map(str.split, shown.splitlines()) if x[:2] == ["both", "fwd"])
    assert float(row[2]) > 0 and row[-1] == "-"  # the column of cuDNN's error

    case = small[1]
    inputs, operand = biases.random_inputs(case), case.operand()
    reference = Reference(case, inputs, operand)
    right = bias_cases.packax_function(case)
    functions = {
        "no gradient": lambda q, k, v, bias: right(q, k, v, jax.lax.stop_gradient(bias)),
        "other heads": lambda q, k, v, bias: right(q, k, v, bias[:, ::-1]),
        "no dropout": bias_cases.packax_function(dataclasses.replace(case, dropout=0.0)),
    }
    for name, function in functions.items():
        row = biases.checked("packax", function, case, inputs, operand, reference)
        assert row["wrong"] and not row["failed"], (name, row)


def masks(out):
    """The predicate of each mask, for the peers and the reference, equals packax's mask. An option
    and a selection are right, and another mask or choice is found."""
    import masks
    import numpy as np
    from lib import packed_trees, selections
    from lib.implementations import Compiled
    from lib.mask_cases import CASES, select
    from lib.passes import usable

    for case in {case.mask: case for case in CASES if case.tree is None}.values():
        case = dataclasses.replace(case, seq=9216, selection=None)
        i, j = np.ogrid[:9216, :9216]
        tables = case.tables()
        found = np.squeeze(case.expression(tables).as_array(9216, 9216))
        assert np.array_equal(found, case.allows(0, i, j, tables)), case.name

    selections.CHUNK = 100
    small = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    for name, top in (("softcap_16k_d128", 0), ("alibi_16k_d128", 0), ("moba_32k_d128", 3)):
        (case,) = (case for case in CASES if case.name == name)
        case = dataclasses.replace(case, seq=768, **small)
        if top:
            of = dataclasses.replace(case.selection, keys=64, top=top)
            case = dataclasses.replace(case, selection=of, v_dim=8)
        tables = case.tables() if not top else selections.tables(case)
        inputs = [4 * x for x in masks.random_inputs(case)[:2]] + [*masks.random_inputs(case)[2:]]
        reference = masks.Reference(case, inputs, tables)
        attention, area = masks.packax_function(case, tables)
        row = usable(Compiled(attention, inputs), reference.errors, round_ms=1.0)
        assert not row["wrong"] and not row["failed"], (name, row)
        assert set(row["errors"]) == {"out", "dq", "dk", "dv"}
        if top:
            shares = selections.shares(case, attention.operands, area)
            assert np.isclose(shares["pairs"], area / (768 * 769 / 2))
            other, of = tables | {"chosen": np.roll(tables["chosen"], 1, axis=1)}, case
        else:
            other, of = tables, dataclasses.replace(case, soft_cap=None, alibi=False)
        attention, _ = masks.packax_function(of, other)
        assert usable(Compiled(attention, inputs), reference.errors)["wrong"], name

    case = select("tree_4k_16x2k_d128")[0]
    tree = packed_trees.PackedTree((100, 60, 96, 0, 256), (-1, 0, 1, 0, -1))
    case = dataclasses.replace(case, seq=tree.tokens, tree=tree, **small)
    _, area = masks.packax_function(case, case.tables())
    assert area == tree.pairs()
    rows = {case.name: masks.run_case(case, None, 1, 1.0)}
    shown = masks.table(rows, masks.ORDER) + masks.of_dense(rows)
    assert set(rows[case.name]) == {"packax", "dense", "documents"}
    assert "WRONG" not in shown and "did not run" not in shown and "to documents" in shown


def models(out):
    """packax is within the limits of the reference, and outside them with another mask; what falls
    short is listed and drawn."""
    import models
    from lib.model_cases import CASES, select
    from lib.ratios import draw, ratios, summary

    small = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    for name, more in (
        ("gpt_oss_window128_8k", {"seq": 160, "window": 40}),
        ("bert_large_padded_512", {"seq": 160, "shortest": 60}),
        ("sdxl_cross_1k_77", {"seq": 128}),
    ):
        (case,) = select(name)
        case = dataclasses.replace(case, **small, **more)
        rows = models.run_case(case, *models.packax_alone(case), 1, 1.0)
        ours = rows["packax"]
        assert not ours["wrong"] and not ours["failed"], (name, ours)
        assert set(ours["errors"]) == {"out", "dq", "dk", "dv"}
        assert "fwd" in rows["cudnn"]["failed"]
    assert "did not run" in models.shown({case.name: rows})
    with_fa3 = [x.name for x in CASES if models.fa3_function(x) is not None]
    assert "llama3_8b_8k" in with_fa3 and "flux_1024" in with_fa3
    assert not {"gpt2_1k", "llama3_8b_prefill_2k_on_14k", "mistral_7b_window4k_16k"} & {*with_fa3}
    right = models.packax_function(dataclasses.replace(case, kind="causal"))
    models.packax_function = lambda _: right
    assert models.packax_alone(case)[0]["wrong"]

    def row(fwd, bwd):
        return {"times": {"fwd": {"ms": fwd}} | ({"bwd": {"ms": bwd}} if bwd else {})}

    ahead = {"packax": row(1, 2), "cudnn": row(1.5, 2)}
    behind = {"packax": row(1, 1), "cudnn": row(0.8, None)}
    results = {"ahead": ahead, "failed": {"packax": row(1, 1)}, "behind": behind}
    assert ratios(results) == {"behind": {"fwd": 0.8}, "ahead": {"fwd": 1.5, "bwd": 1.0}}
    said = summary(results)
    assert "2 of 3 passes" in said and "behind" in said and "ahead" not in said
    picture = Path(out, "picture.svg")
    draw({"cases": results, "machine": {"gpu": "a GPU"}}, picture)
    assert picture.read_text().count("<rect") == 1 + 2 + 3


def train_step(out):
    """Attention across documents, which stands in for a peer, is wrong and not timed."""
    import jax
    import train_step
    from lib import llama
    from lib.implementations import Implementation

    def across(case):
        causal = lambda q, k, v, _: jax.nn.dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        return Implementation("cudnn", causal, ())

    train_step.JAX_PEERS["cudnn"] = across
    config = llama.config_of(2, **train_step.TINY, chunk=64)
    stepper = train_step.stepper_of(train_step.Run.parse("512:5:2"), config, ["packax", "cudnn"])
    rows = train_step.timed(train_step.Run.parse("512:5:2"), stepper, 1, False)
    assert rows["cudnn"]["wrong"] == ["query", "key", "value"] and "ms" not in rows["cudnn"], rows
    assert rows["packax"]["ms"] > 0
    assert "cudnn WRONG: query, key, value" in train_step.table({"x": rows})


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
