"""Which tile a program takes: every one of them once, and none left to a few multiprocessors at the end.

Guards against an order of tiles and heads in which the last head's long tiles run alone, and against Hopper's walk
(hopper.place_of_tile) being another than the portable kernels'.
"""

from __future__ import annotations

import ast
import heapq
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import triton_interpreter as interpreter

MULTIPROCESSORS = 132
LENGTHS = np.random.default_rng(3).dirichlet(np.ones(64)) * 32000


def walk_of_hopper():
    """hopper.place_of_tile as a Python function: Gluon has no interpreter."""
    source = (interpreter.ROOT / "csrc" / "kernels" / "hopper.py").read_text()
    module = ast.parse(source)
    names = ("windows", "place_of_tile")
    parts = [x for x in module.body if getattr(x, "name", "") in names]
    for part in parts:
        part.decorator_list = []
    constant = next(x for x in module.body if ast.unparse(x).startswith("ALTERNATE = "))
    words = SimpleNamespace(
        minimum=min,
        maximum=max,
        where=lambda condition, a, b: a if condition else b,
        load=lambda at: int(at.base[at.offset]),
        constexpr=int,
    )
    space = {"gl": words}
    exec(compile(ast.Module([constant, *parts], []), "hopper.py", "exec"), space)
    return space["place_of_tile"]


class Pointer(SimpleNamespace):
    def __add__(self, offset: int) -> Pointer:
        return Pointer(base=self.base, offset=self.offset + offset)


WALK = walk_of_hopper()


def places(order, batch, mask_batch, group, kv_heads, block=128):
    """Head, key/value head, batch row, mask row and first row of every program."""
    tiles = order.shape[-1]
    parts = 128 // block
    at = Pointer(base=order.reshape(-1), offset=0)
    return np.array(
        [
            WALK(n, at, batch, mask_batch, tiles, group, kv_heads, block, parts)
            for n in range(tiles * batch * group * kv_heads * parts)
        ]
    )


@pytest.mark.parametrize("tiles", (1, 2, 3, 21))
@pytest.mark.parametrize("group,kv_heads", ((1, 1), (1, 3), (4, 2), (3, 5)))
@pytest.mark.parametrize("batch,mask_batch", ((1, 1), (3, 1), (2, 2)))
@pytest.mark.parametrize("block", (128, 64))
def test_every_tile_once(tiles, group, kv_heads, batch, mask_batch, block):
    rng = np.random.default_rng(tiles)
    order = np.stack([rng.permutation(tiles) for _ in range(mask_batch)]).astype(np.int32)
    found = places(order, batch, mask_batch, group, kv_heads, block)
    portable = interpreter.guarded((len(found), 4), np.int32)
    interpreter.launch(
        "places", (len(found),), order, portable, batch, mask_batch, tiles, group, kv_heads, BLOCK_SIZE=block
    )  # fmt: skip
    np.testing.assert_array_equal(portable, found[:, [0, 1, 2, 4]])
    every = itertools.product(range(group * kv_heads), range(batch), range(0, tiles * 128, block))
    assert sorted((h, b, row) for h, _, b, _, row in found.tolist()) == sorted(every)
    assert (found[:, 0] // group == found[:, 1]).all()
    assert (found[:, 3] == (found[:, 2] if mask_batch > 1 else 0)).all()


def idle(steps) -> float:
    """The share of the time that multiprocessors wait, if each takes the next program when it is done with one."""
    free = [0.0] * MULTIPROCESSORS
    for n in steps:
        heapq.heapreplace(free, free[0] + n)
    return 1 - sum(steps) / (MULTIPROCESSORS * max(free))


def tiles_of(lengths, ending: bool) -> np.ndarray:
    """Blocks of 64 that a tile of 128 meets in causal documents: of keys, rows up to the document's end; of rows, keys from its
    beginning."""
    ends = np.cumsum(lengths)
    first = np.arange(0, ends[-1], 128)
    document = np.searchsorted(ends, first, side="right")
    if ending:
        return np.ceil((ends[document] - first) / 64) + 1
    return np.ceil((first + 128 - ends[document] + lengths[document]) / 64) + 1


@pytest.mark.parametrize(
    "lengths,group,kv_heads,least",
    (
        ([16384], 4, 8, 0.02),
        ([4096], 4, 8, 0.05),
        ([8192], 1, 8, 0.03),
        (LENGTHS, 4, 8, 0.03),
        (LENGTHS, 1, 8, 0.03),
    ),
    ids=("causal 16k", "causal 4k", "causal 8k, 8 heads", "64 documents", "64 documents, 8 heads"),
)
def test_nobody_waits(lengths, group, kv_heads, least):
    lengths = np.asarray(lengths)
    for ending in (True, False):
        work = tiles_of(lengths, ending)
        order = np.argsort(-work, kind="stable").astype(np.int32)[None]
        members = 1 if ending else group  # of keys, a program has the whole group
        found = places(order, 1, 1, members, kv_heads)
        steps = work[found[:, 4] // 128] * (group if ending else 1)
        assert idle(steps.tolist()) < least


def test_what_the_last_head_alone_costs():
    """The measure above sees it: with the heads one after the other they wait for a twelfth of the time."""
    work = -np.sort(-tiles_of(np.asarray(LENGTHS), True))
    assert idle(np.tile(work, 8).tolist()) > 0.08
    assert idle(np.repeat(work, 8).tolist()) < 0.03


def test_the_benchmark_has_this_order():
    """In a process of its own: there is a cases.py in both folders."""
    sizes = ((1, 1), (5, 6), (50, 8), (300, 8))
    code = f"import json, program_order as p; print(json.dumps([list(p.ORDERS['windows'](*n)) for n in {sizes}]))"
    command = [sys.executable, "-c", code]
    made = subprocess.run(
        command, cwd=interpreter.ROOT / "benchmarks", capture_output=True, text=True, check=True
    )
    for (tiles, heads), order in zip(sizes, json.loads(made.stdout), strict=True):
        for batch in {1, max(heads // 4, 1)}:
            found = places(np.arange(tiles, dtype=np.int32)[None], batch, 1, 1, heads // batch)
            assert order == [[row // 128, k * batch + b] for _, k, b, _, row in found.tolist()]
