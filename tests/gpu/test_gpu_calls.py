"""Calls of attention on a GPU, against dense attention in float64: one table. `pytest -m gpu`.

Each row of calls.txt is a call and the masks it runs with. A test checks all properties of values
of tests/table, which share the compiled program of the call, its results and their reference.
Memory for results is filled with NaN first, and 16-bit results have at most twice the error of
plain attention.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import dense
import jax
import numpy as np
import pytest
from calls import Arrays, Call
from gpu_runs import fixed, of, varying
from packax._src.ops import lowering
from properties import PROPERTIES
from properties.rows import differences
from properties.values import Program, compiled, first_run, unequal
from tiers import marked, once_each, some

pytestmark = pytest.mark.gpu

BLOCKS = (
    "1 512",
    "1 1",
    "1 64",
    "2 16",
    "64 64",
    "16 1",
    "512 2",
    "4096 128",
    "32 4096",
    "128 256",
)
MASKS = {
    "packed": "interval=causal,selector=packed,lengths=500x500",
    "full": "lengths=409x409",
    "causal": "interval=causal,lengths=1000x1000",
    "longer keys": "interval=causal,lengths=70x933",
    "longer queries": "interval=causal,lengths=933x70",
    "one row": "lengths=1x700,heads=8/2",
    "one key": "lengths=700x1",
    "offset": "interval=offset,lengths=190x310",
    "ids": "selector=documents,lengths=515x515",  # that come back, and padding
    "causal ids": "interval=causal,selector=documents,lengths=409x409",
    "even keys": "interval=causal,selector=documents,lengths=400x400",
    "ids of keys": "selector=kv ids,lengths=173x300",
    "one mask": "interval=causal,selector=packed,lengths=409x409,rows=one mask",
    "window": "interval=window 90 20,selector=packed,lengths=500x500",
    "long window": "interval=window 200 0,lengths=900x900",
    "chunks": "interval=chunked 100,selector=documents,lengths=409x409",
    "prefix": "interval=prefix,selector=packed,lengths=409x409",
    "spans": "interval=spans,selector=packed,lengths=409x409",
    "union": "interval=union 64 30,lengths=409x409",
    "positions": "interval=causal,selector=positions,lengths=409x409",
    "positions of keys": "interval=causal,selector=positions,lengths=101x261",
    "any positions": "interval=causal,selector=any positions,lengths=333x333",
    "two limits": "interval=window 60 25,selector=positions,lengths=700x700",
    "two limits in any order": "interval=window 15 10,selector=any positions,lengths=409x409",
    "ranges": "selector=ranges,lengths=190x310",
}
LISTS = {  # with lists of blocks
    "tree": "interval=causal,selector=tree,lengths=777x777",
    "whole tree": "selector=tree and documents,lengths=777x777",
    "window of a tree": "interval=window 150 40,selector=tree,lengths=777x777",
    "answers": "interval=causal,selector=shared prefix,lengths=300x300",
    "threes": "interval=window 70 9,selector=block mask,lengths=333x333",
    "short blocks": "selector=block mask 512 4096,lengths=63x65,heads=8/1",
    "a block": "selector=block mask 1 2,lengths=1x1,heads=8/8",
    "few rows of blocks": "selector=block mask 1 2,lengths=64x640,heads=8/1",
    "few keys of blocks": "selector=block mask 512 4096,lengths=129x1,heads=8/8",
}
JOINED = (
    "selector=block mask {}",
    "interval=offset,selector=block mask {}",
    "selector=blocks and documents {}",
    "interval=window 150 40,selector=blocks and positions {}",
)
for n, size in enumerate(BLOCKS):
    LISTS[f"blocks {size}"] = f"{JOINED[n % 4].format(size)},lengths=777x1301"
Cell = tuple[str, str, int]  # call, mask, column of calls.txt


def call_of(text: str, mask: str) -> Call:
    dims, dtype, *options = text.split()
    fields = f"dims={dims},dtype={dtype},{','.join(options)}"
    of_mask = (MASKS | LISTS).get(mask, mask)
    return of(f"{of_mask},{fields}")


def cells() -> list[Cell]:
    """The first mask of the first row of each section, then those of the second rows, and so on;
    then the second masks."""
    sections: list[dict[str, dict[str, int]]] = []  # by call and mask
    for line in Path(__file__).with_name("calls.txt").read_text().splitlines():
        if line.startswith("#"):
            sections.append({})
        elif line:
            text, *columns = (x.strip() for x in line.split("|"))
            found = sections[-1].setdefault(text, {})
            for n, names in enumerate(columns):
                every = {"every": [*MASKS], "lists": [*LISTS]}
                for mask in itertools.chain(*(every.get(x, [x]) for x in names.split(", ") if x)):
                    found.setdefault(mask, n)
    rows = by_turns([[*section.items()] for section in sections])
    return by_turns([[(text, mask, n) for mask, n in found.items()] for text, found in rows])


def by_turns(lists: list[list[Any]]) -> list[Any]:
    """The first of each, the second of each, and so on."""
    return [x for turn in itertools.zip_longest(*lists) for x in turn if x is not None]


VALUES = [name for name, row in PROPERTIES.items() if row.group == "values"]


def check(text: str, names: list[str]) -> Arrays:
    """Returns the operands."""
    call = call_of(*text.split(" | "))
    assert not call.invalid(), call.invalid()
    with jax.default_matmul_precision("highest" if call.dtype == "float32" else None):
        checks = {n: PROPERTIES[n].check if n in PROPERTIES else MORE[n] for n in names}
        wrong = [f"{name}: {line}" for name in names for line in checks[name](call)]
    assert not wrong, "; ".join(wrong)
    return call.arrays(1)


@pytest.mark.parametrize("cell", [marked([f"{x} | {y}"], n == 0) for x, y, n in cells()])
def test_values(cell: str) -> None:
    check(cell, VALUES)


@pytest.mark.parametrize("cell", [f"{x} | {y}" for x, y, n in cells() if n == 1])
def test_results(cell: str) -> None:
    """Of calls that have all properties of values with `-m exhaustive`."""
    check(cell, VALUES[:1])


# --- Properties that compile further programs


def only_some_gradients(call: Call) -> list[str]:
    """The numbers of a call for all, and the same bits where these do not vary."""
    a, want, references = first_run(call)
    wrong: list[str] = []
    for frozen in ("key+value", "query", "query+value"):
        fewer = dataclasses.replace(call, frozen=frozen)
        got = compiled(fewer)(a)
        wrong += differences(fewer, got, a, f"without {frozen}: ", references)
        if not varying(call):
            wrong += unequal(got, {name: want[name] for name in got}, f"without {frozen}, bits: ")
    return wrong


def nan_of_other_documents(call: Call) -> list[str]:
    """NaN stays in the documents, or blocks, that share no tile of 128 with other tokens."""
    a = call.arrays(1)
    if "ids" in a:
        a["ids"] = np.repeat(np.int32([[1, 2, -1, 3]] * len(a["ids"])), (384, 300, 84, 128), 1)
    else:
        early = np.arange(7) < 3  # blocks of 128
        a["blocks"][:] = early[:, None] == early
    broken = np.arange(896) >= 384
    bad = {n: np.where(broken[:, None, None], np.nan, a[n]).astype(a[n].dtype)
           for n in ("query", "key", "value", "dout")}  # fmt: skip
    bad["dlse"] = np.where(broken, np.nan, a["dlse"]).astype(np.float32)
    want, got = compiled(call)(a), compiled(call)(a | bad)
    parts = [
        {n: np.asarray(x).swapaxes(1, 2 if n == "lse" else 1)[:, :384] for n, x in y.items()}
        for y in (got, fixed(call, want))
    ]
    wrong = unequal(*parts, "NaN reaches ")
    some = [name for name, x in got.items() if np.isnan(np.asarray(x, np.float32)).any()]
    return wrong + [f"no NaN in {name}" for name in {*got} - {*some}]


MORE = {"only some gradients": only_some_gradients, "NaN of documents": nan_of_other_documents}
WHOLE = "interval=causal,selector=packed,lengths=896x896"
COMPILING = [
    ("64x64 bfloat16", "packed"),
    ("128x128 float16 order=deterministic", "ids"),
    ("256x256 bfloat16 cap=50", "packed"),
    ("128x128 bfloat16 bias=shared cap=2", "even keys"),
    ("128x128 bfloat16", "blocks 1 64"),
    ("192x128 bfloat16", "tree"),
    ("512x512 bfloat16", "packed"),
    ("64x64 bfloat16 bias=alibi sinks=sinks", "window"),
]
ROWS = ["vmap", "gradients in scan, with remat", "export of symbolic sizes"]
OF_NAN = [
    ("64x64 bfloat16 order=deterministic", WHOLE, True),
    ("128x128 float16 order=deterministic", WHOLE, False),
    ("192x128 bfloat16", WHOLE, False),
    ("256x256 float16", WHOLE, False),
    ("512x512 bfloat16", WHOLE, True),
    ("64x64 bfloat16 cap=50 order=deterministic", WHOLE, False),
    ("256x256 bfloat16 cap=50 order=deterministic", WHOLE, False),
    ("128x128 bfloat16", "selector=block mask 128 128,lengths=896x896", True),
]


def compiling() -> list[Any]:
    """Each time, the gradients of every second call and one of the other properties of each."""
    found = [(("NaN of documents", *cell), n) for *cell, n in OF_NAN]
    for n, cell in enumerate(COMPILING):
        found += [((name, *cell), n % len(ROWS) == k) for k, name in enumerate(ROWS)]
        found.append((("only some gradients", *cell), n % 2 == 0))
    return [marked([f"{name}: {x} | {y}"], each_time) for (name, x, y), each_time in found]


@pytest.mark.parametrize("cell", compiling())
def test_more(cell: str) -> None:
    name, text = cell.split(": ")
    check(text, [name])


FLOAT32 = [
    "64x64 float32 results=out+lse+top | packed",
    "128x128 float32 results=out+lse+top cap=2 | causal",
    "192x128 float32 heads=8/2 scale=array | packed",
    "256x256 float32 results=out+lse+top bias=alibi | packed",
    "40x72 float32 sinks=sinks | ids",
    "64x64 float32 bias=shared | packed",
    "64x64 float32 bias=rows dropout=dropout | packed",
    "64x64 float32 dropout=dropout | ids",
]


@pytest.mark.parametrize(
    "text,precision",
    some(itertools.product(FLOAT32, ("highest", "tensorfloat32")), 0, 3, 5, 7, 8, 13),
)
def test_float32(text: str, precision: str) -> None:
    """At most twice the error of XLA at the same precision. Few numbers may be exact by luck: the
    yardstick of sums over queries is plain attention in float32, or in float16, as exact as TF32.
    """
    call = call_of(*text.split(" | "))
    a = call.arrays(1)
    with jax.default_matmul_precision(precision):
        got, plain = (
            {name: np.asarray(x) for name, x in Program(x)(a).items()}
            for x in (call, dataclasses.replace(call, implementation="xla"))
        )
    dtype = "float32" if precision == "highest" else "float16"
    true, rounded = dense.true_and_plain(
        call.operands(a), call.allowed(a), dtype, **call.options(a)
    )
    plain |= {name: rounded[name] for name in ("dscale", "dsinks", "dslopes") if name in plain}
    if "top" in got:
        close = 1e-5 if precision == "highest" else 1e-2
        np.testing.assert_allclose(got.pop("top"), true["top"], rtol=close, atol=close)
    wrong = dense.close(got, true, plain)
    assert not wrong, "; ".join(wrong)


# --- Calls with few properties: of more tiles than multiprocessors, and those that are rewritten

SOME = ["equals the reference", "same bits twice"]
KINDS = ("64x64 bfloat16", "128x128 float16", "192x128 float16", "256x256 bfloat16",
    "512x512 float16")  # fmt: skip
MANY = [f"{kind} heads=16/4 batch=3 | packed" for kind in KINDS]
MANY += ["64x64 float16 heads=36/9 | any positions", "64x64 float16 heads=8/1 batch=3 | packed"]
ROW = "interval=causal,selector=documents,lengths=1100x1100"
SHORT = ("selector=documents,lengths=49x49", "interval=causal,lengths=1x1",
    "interval=causal,lengths=7x100", "selector=kv ids,lengths=7x100")  # fmt: skip


@pytest.mark.parametrize("cell", some(MANY, 0, 1, 5))
def test_more_tiles_than_multiprocessors(cell: str) -> None:
    check(cell, SOME)


@pytest.mark.parametrize("kind", some(KINDS, 0, 1))
def test_few_programs(kind: str) -> None:
    """The backward splits groups of heads."""
    a = check(f"{kind} heads=8/1 batch=1 | {ROW}", SOME)
    assert lowering.parts_of_group(a["query"], a["key"]) > 1


@pytest.mark.parametrize("kind,mask", once_each(KINDS, SHORT))
def test_many_short_rows_of_a_batch(kind: str, mask: str) -> None:
    """The kernels get them as one row of documents."""
    a = check(f"{kind} batch=257 | {mask}", SOME)
    assert lowering.worth_packing(a["query"], a["key"])
