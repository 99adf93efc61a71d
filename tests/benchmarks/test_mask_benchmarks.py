"""benchmarks/masks.py: every library gets the same masks, results are compared, selections are
counted."""

from __future__ import annotations

import pytest
from benchmark_scripts import script

pytestmark = pytest.mark.exhaustive  # they run whole benchmark programs


def test_predicates_equal_the_expressions():
    """The predicate for FlexAttention and the reference equals packax's mask, pair by pair."""
    script("""
import dataclasses
import numpy as np
from lib.mask_cases import CASES, select

assert select("causal_16k_d64")[0].name == "causal_16k_d64" and len(select(None)) == len(CASES)
done = set()
for case in CASES:
    if case.mask in done or case.tree is not None:
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
    """packax on the CPU is within the limits with every option, and outside them without it."""
    script("""
import dataclasses
import jax
import masks
from lib.implementations import Compiled
from lib.mask_cases import CASES
from lib.passes import usable

jax.config.update("jax_platforms", "cpu")
wrong = {}
for case in CASES:
    if case.name not in ("window1k_32k_d64", "spans_32k_d128", "softcap_16k_d128", "alibi_16k_d128",
        "sinks_16k_d64"):
        continue
    case = dataclasses.replace(case, seq=1536, heads=4, kv_heads=2, head_dim=16)
    inputs = [4 * x for x in masks.random_inputs(case)[:2]] + list(masks.random_inputs(case)[2:])
    tables = case.tables()
    reference = masks.Reference(case, inputs, tables)
    attention, area = masks.packax_function(case, tables)
    assert area == case.expression(tables).as_array(1536, 1536).sum()
    row = usable(Compiled(attention, inputs), reference.errors, round_ms=1.0)
    assert not row["wrong"] and not row["failed"], (case.name, row)
    assert set(row["errors"]) == {"out", "dq", "dk", "dv"} and set(row["launches"]) == {"fwd",
        "bwd"}
    plain = dataclasses.replace(case, soft_cap=None, sinks=False, alibi=False, mask=CASES[-1].mask)
    attention, _ = masks.packax_function(plain, tables)
    row = usable(Compiled(attention, inputs), reference.errors, round_ms=1.0)
    assert row["wrong"] and not row["passes"], (case.name, row)
shown = masks.table({"x": {"packax": {"times": {"fwd": {"ms": 1.0, "tflops": 5.0}},
    "errors": {"out": 1e-3},
                                       "failed": {"bwd": "no kernel"}, "wrong": []}}}, masks.ORDER)
assert "x packax bwd did not run: no kernel" in shown and "1.0e-03" in shown
""")


def test_selections_of_options():
    """Block masks have the number of blocks asked for and none after the row, are the same in every
    formulation, and are counted and compared."""
    script("""
import dataclasses
import jax
import numpy as np
import masks
from lib import selections
from lib.implementations import Compiled
from lib.mask_cases import select
from lib.passes import usable

jax.config.update("jax_platforms", "cpu")
selections.CHUNK = 100
sizes = {"moba": (1, 64, 3), "moba_own": (1, 64, 3), "indexer": (1, 1, 90),
    "indexer_blocks": (64, 64, 4)}
every = select("selections")
cases = {case.name.removesuffix("_32k_d128"): case for case in every if case.head_dim == 128}
assert set(cases) == set(sizes)
assert {(c.head_dim, c.value_dim) for c in every} == {(128, 128), (192, 128), (256, 256)}
S, N = 768, 4
i, j = np.arange(S)[:, None], np.arange(S)
blocks = {}
for name, case in cases.items():
    rows, keys, top = sizes[name]
    assert (case.selection.rows, case.selection.keys) == (rows, 512 if keys == 64
        and rows == 1 else keys)
    of = dataclasses.replace(case.selection, keys=keys, top=top)
    case = dataclasses.replace(case, seq=S, heads=N, kv_heads=2, head_dim=16, v_dim=8, selection=of)
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
    attention, area = masks.packax_function(case, tables)
    assert area == allowed.sum() / len(allowed if allowed.ndim == 3 else [0])
    shares = selections.shares(case, attention.operands, area)
    tiles = np.broadcast_to(allowed, (N, S, S)).reshape(N, S // 128, 128, S // 64, 64).any((2, 4))
    assert np.isclose(shares["blocks"], tiles.sum() / N / 42) and np.isclose(shares["pairs"],
        area / (S * (S + 1) / 2))
    blocks[name] = shares["blocks"]
    if name not in ("moba", "indexer"):
        continue
    inputs = masks.random_inputs(case)
    reference = masks.Reference(case, inputs, tables)
    row = usable(Compiled(attention, inputs), reference.errors, round_ms=1.0)
    assert not row["wrong"] and not row["failed"] and set(row["errors"]) == {"out", "dq", "dk",
        "dv"}, (name, row)
    other = tables | {"chosen": np.roll(chosen, 1, axis=1)}  # the row before's choice
    attention, _ = masks.packax_function(case, other)
    assert usable(Compiled(attention, inputs), reference.errors)["wrong"], name
assert blocks["moba"] < 0.8 * blocks["moba_own"], blocks

rows = masks.run_case(case, None, 1, 1.0)
shown = masks.table({case.name: rows}, masks.ORDER) + masks.of_dense({case.name: rows})
assert set(rows) == {"packax", "dense"} and "WRONG" not in shown and "did not run" not in shown
assert f"has {shares['pairs']:.1%} of causal's pairs" in shown and " of its blocks" in shown
assert "to dense" in shown
""")


def test_packed_trees():
    """All definitions agree. Trees are counted, compared, and timed with a document per path."""
    script("""
import dataclasses
import jax
import numpy as np
import masks
from lib import packed_trees
from lib.mask_cases import CASES, select

jax.config.update("jax_platforms", "cpu")
trees = {case.name: case.tree for case in select("trees")}
assert len(trees) == 12 and trees["tree_4k_16x2k_d64"].tokens == 4096 + 16 * 2048
assert trees["tree_16k_8x1k_d128"].paths() == 8 * [17408]
assert trees["tree_binary6_512_d128"].paths() == 32 * [6 * 512]
case = select("tree_4k_16x2k_d128")[0]
for tree in (packed_trees.prompt_and_answers(256, 3, 128), packed_trees.binary(3, 128),
             packed_trees.PackedTree((100, 60, 96, 0, 256), (-1, 0, 1, 0, -1))):
    small = dataclasses.replace(case, seq=tree.tokens, heads=4, kv_heads=2, head_dim=16, tree=tree)
    S, tables = small.seq, small.tables()
    allowed = small.allows(0, np.arange(S)[:, None], np.arange(S), tables)
    assert np.array_equal(small.expression(tables).as_array(S, S), allowed)
    _, area = masks.packax_function(small, tables)
    assert area == tree.pairs() == allowed.sum()
    apart = packed_trees.as_documents(small)
    _, pairs = masks.packax_function(apart, {})
    assert apart.seq == sum(tree.paths()) and pairs == sum(n * (n + 1) / 2 for n in tree.paths())
rows = masks.run_case(small, None, 1, 1.0)
assert set(rows) == {"packax", "dense", "documents"}
shown = masks.table({small.name: rows}, masks.ORDER) + masks.of_dense({small.name: rows})
assert "WRONG" not in shown and "did not run" not in shown, shown
assert f"has {area / pairs:.1%} of its documents' pairs" in shown and "to documents" in shown
""")
