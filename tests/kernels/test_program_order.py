"""Which tile a program takes: every tile is taken once, and at the end no few multiprocessors are
left with long tiles.

Guards against an order of tiles and heads in which the last head's long tiles run alone, and
against a difference between the order in Gluon (common/kv_ranges.place_of_tile) and that of the
portable kernels.
"""

from __future__ import annotations

import ast
import heapq
import importlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import triton_interpreter as interpreter
from paths import BENCHMARKS, KERNEL_DIR
from tiers import once_each


def functions_of_sm90():
    """common.kv_ranges.tiles_are_near and place_of_tile as Python functions, because Gluon has no
    interpreter."""
    source = (KERNEL_DIR / "common/kv_ranges.py").read_text()
    module = ast.parse(source)
    names = ("tiles_are_near", "scheduler_phases", "place_of_tile")
    parts = [x for x in module.body if getattr(x, "name", "") in names]
    for part in parts:
        part.decorator_list = []
    constants = [x for x in module.body if ast.unparse(x).startswith(("ALTERNATE =", "NEAR_"))]
    words = SimpleNamespace(
        minimum=min,
        maximum=max,
        where=lambda condition, a, b: a if condition else b,
        load=lambda at: int(at.base[at.offset]),
        constexpr=int,
    )
    space = {"gl": words}
    exec(compile(ast.Module([*constants, *parts], []), "common/kv_ranges.py", "exec"), space)
    return space["tiles_are_near"], space["place_of_tile"]


class Pointer(SimpleNamespace):
    def __add__(self, offset: int) -> Pointer:
        return Pointer(base=self.base, offset=self.offset + offset)


TILES_ARE_NEAR, WALK = functions_of_sm90()


def places(order, batch, mask_batch, group, kv_heads, block=128, near=False):
    """Head, key/value head, batch row, mask row and first row of every program."""
    tiles = order.shape[-1]
    parts = 128 // block
    at = Pointer(base=order.reshape(-1), offset=0)
    return np.array(
        [
            WALK(n, at, batch, mask_batch, tiles, group, kv_heads, block, parts, near)
            for n in range(tiles * batch * group * kv_heads * parts)
        ]
    )


@pytest.mark.parametrize(
    "tiles,heads,block",
    once_each((1, 2, 3, 21), ((1, 1), (1, 3), (4, 2), (3, 5)), (64, 128)),
    ids=str,
)
@pytest.mark.parametrize("batch,mask_batch", ((1, 1), (3, 1), (2, 2)))
def test_every_tile_once(tiles, heads, batch, mask_batch, block):
    group, kv_heads = heads
    rng = np.random.default_rng(tiles)
    order = np.stack([rng.permutation(tiles) for _ in range(mask_batch)]).astype(np.int32)
    found = places(order, batch, mask_batch, group, kv_heads, block)
    portable = interpreter.guarded((len(found), 4), np.int32)
    interpreter.launch(
        "places", (len(found),), order, portable, batch, mask_batch, tiles, group, kv_heads,
        BLOCK_SIZE=block
    )  # fmt: skip
    np.testing.assert_array_equal(portable, found[:, [0, 1, 2, 4]])
    every = itertools.product(range(group * kv_heads), range(batch), range(0, tiles * 128, block))
    assert sorted((h, b, row) for h, _, b, _, row in found.tolist()) == sorted(every)
    assert (found[:, 0] // group == found[:, 1]).all()
    assert (found[:, 3] == (found[:, 2] if mask_batch > 1 else 0)).all()


@pytest.mark.parametrize("tiles,block", ((2, 64), (8, 128)))
def test_heads_of_short_rows_follow_each_other(tiles, block):
    """Guards against phases, between which a GPU would forget a head's keys, and the cache lines
    that heads of a batch row share."""
    batch, group, kv_heads = 64, 2, 4
    assert TILES_ARE_NEAR(tiles, batch * kv_heads)
    order = np.arange(tiles, dtype=np.int32)[None]
    found = places(order, batch, 1, group, kv_heads, block, near=True)
    assert (np.diff(found[:, 2] * kv_heads + found[:, 1]) >= 0).all()
    every = itertools.product(range(group * kv_heads), range(batch), range(0, tiles * 128, block))
    assert sorted((h, b, row) for h, _, b, _, row in found.tolist()) == sorted(every)


@pytest.mark.parametrize("tiles,batch", ((1, 64), (9, 64), (2, 63)))
def test_other_rows_are_in_phases(tiles, batch):
    assert not TILES_ARE_NEAR(tiles, batch * 4)


def tiles_of_keys(lengths):
    """The number of blocks of 64 rows that each tile of keys visits for one query head, in the
    order of kv_order."""
    lengths = np.array(lengths)
    ends = np.cumsum(lengths)
    first = np.arange(0, ends[-1], 128)
    document = np.searchsorted(ends, np.minimum(first + 128, ends[-1]) - 1, side="right")
    blocks = -(-ends[document] // 64) - first // 64
    return blocks[np.lexsort((-blocks, document, -lengths[document]))].astype(float)


def tiles_of_rows(lengths):
    """The number of blocks of 128 keys that each tile of rows visits, largest first."""
    lengths = np.array(lengths)
    ends = np.cumsum(lengths)
    first = np.arange(0, ends[-1], 128)
    begins = (ends - lengths)[np.searchsorted(ends, first, side="right")]
    return -np.sort(-(np.minimum(first + 128, ends[-1]) - begins) / 128)


def busy(steps, multiprocessors=132):
    """The fraction of the multiprocessors' time in which a program runs. Each multiprocessor takes
    the next program when it finishes one; caches are ignored."""
    free = [0.0] * multiprocessors
    for n in steps:
        heapq.heapreplace(free, free[0] + n)
    return sum(steps) / (multiprocessors * max(free))


NAMES = (
    *("causal_16k_d128", "causal_4k_d128", "docs12_32k_d128", "docs64_32k_d128"),
    *("mha8_causal_8k_d128", "mha8_docs64_32k_d128"),
)


@pytest.mark.parametrize("name", NAMES)
def test_multiprocessors_stay_busy(name, monkeypatch):
    """The multiprocessors stay busy in both passes, and no less than when heads run one after
    another, which costs one case a sixth of the time, and rows of 4k a third.

    A program takes one step for every block that its tile visits, and some for its start and end.
    """
    monkeypatch.syspath_prepend(BENCHMARKS)
    (case,) = importlib.import_module("lib.cases").select(name)
    group = case.heads // case.kv_heads
    order = np.arange(case.seq // 128, dtype=np.int32)[None]
    forward = tiles_of_rows(case.lengths) + 0.5
    backward = tiles_of_keys(case.lengths) * group + 2.0
    for steps, members in ((forward, group), (backward, 1)):
        tiles = places(order, 1, 1, members, case.kv_heads)[:, 4] // 128
        by_head = busy([n for _ in range(case.kv_heads) for n in steps for _ in range(members)])
        assert busy(steps[tiles]) > max(0.98, by_head - 0.01)
    least = {"docs64_32k_d128": 0.85, "causal_4k_d128": 0.67}.get(name, 1.01)
    assert by_head < least  # in the backward
