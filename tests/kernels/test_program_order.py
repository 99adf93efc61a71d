"""Which tile a program takes: every one of them once, and none left to a few multiprocessors at the
end.

Guards against an order of tiles and heads in which the last head's long tiles run alone, and
against Hopper's walk (sm90/common.place_of_tile) being another than the portable kernels'.
"""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import triton_interpreter as interpreter
from paths import KERNEL_DIR, TUNE
from tiers import once_each


def walk_of_sm90():
    """sm90.common.place_of_tile as a Python function: Gluon has no interpreter."""
    source = (KERNEL_DIR / "sm90/common.py").read_text()
    module = ast.parse(source)
    names = ("scheduler_phases", "place_of_tile")
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
    exec(compile(ast.Module([constant, *parts], []), "sm90/common.py", "exec"), space)
    return space["place_of_tile"]


class Pointer(SimpleNamespace):
    def __add__(self, offset: int) -> Pointer:
        return Pointer(base=self.base, offset=self.offset + offset)


WALK = walk_of_sm90()


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


def benchmark(code: str):
    """What the expression is in benchmarks/tune/program_order.py."""
    command = [
        sys.executable,
        "-c",
        f"import json\nfrom program_order import *\nprint(json.dumps({code}))",
    ]
    made = subprocess.run(command, cwd=TUNE, capture_output=True, text=True, check=True)
    return json.loads(made.stdout)


def test_no_program_waits():
    """With key/value heads one after the other a case loses a sixth of the time, and rows of 4k a
    third."""
    shares = "{f'{c.name} {f.__name__}': [f(c, ORDERS[o], 132) for o in ('phases', 'by head')]"
    names = "causal_16k_d128,causal_4k_d128,docs12_32k_d128,docs64_32k_d128"
    names += ",mha8_causal_8k_d128,mha8_docs64_32k_d128"
    found = benchmark(f"{shares} for c in select('{names}') for f in (forward, backward)}}")
    assert len(found) == 12
    for name, (phases, by_head) in found.items():
        assert phases > 0.98, name
        assert phases > by_head - 0.01, name
    assert found["docs64_32k_d128 backward"][1] < 0.85
    assert found["causal_4k_d128 backward"][1] < 0.67


@pytest.mark.exhaustive
def test_the_benchmark_has_this_order():
    sizes = ((1, 1), (5, 6), (50, 8), (300, 8))
    orders = benchmark(f"[list(ORDERS['phases'](*n)) for n in {sizes}]")
    for (tiles, heads), order in zip(sizes, orders, strict=True):
        for batch in {1, max(heads // 4, 1)}:
            found = places(np.arange(tiles, dtype=np.int32)[None], batch, 1, 1, heads // batch)
            assert order == [[row // 128, k * batch + b] for _, k, b, _, row in found.tolist()]
