"""How busy different orders of programs keep the multiprocessors, by calculation: needs no GPU, and
ignores caches.

    python benchmarks/tune/program_order.py [--cases board,shard,causal_4k_d128]
        [--multiprocessors 132]

A program takes one step for every block that its tile visits, 64 rows in the backward and 128 keys
in the forward, and some for its beginning and end; each multiprocessor takes the next program when
it has finished one. The orders of key/value heads and tiles, with tiles by work (of keys: the
longest document first), are: heads one after another; alternating from tile to tile; alternating
over the second half of the tiles; and the shipped one, the phases of
csrc/kernels/portable/kv_ranges.py. The last column is the backward with the query heads of a group
divided as in python/packax/_src/ops/lowering.py, if it divides them.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from lib.cases import Case, select
from lib.output import arguments_of
from packax._src.ops import lowering

TILE = 128
BOUNDS = 2.0, 0.5  # steps for the beginning and the end of a program: backward, forward
Order = Callable[
    [int, int], Iterator[tuple[int, int]]
]  # tiles, heads of all batch rows -> (tile, head)
End = Callable[[int, int], int]  # tiles, heads of all batch rows -> tiles


def by_head(tiles: int, heads: int) -> Iterator[tuple[int, int]]:
    return ((tile, head) for head in range(heads) for tile in range(tiles))


def phases(*ends: End) -> Order:
    """The tiles up to each end of every head, one head after another; after the last end heads
    alternate."""

    def order(tiles: int, heads: int) -> Iterator[tuple[int, int]]:
        cuts = [0, *(end(tiles, heads) for end in ends)]
        for begin, end in itertools.pairwise(cuts):
            yield from ((tile, head) for head in range(heads) for tile in range(begin, end))
        yield from ((tile, head) for tile in range(cuts[-1], tiles) for head in range(heads))

    return order


def half(tiles: int, heads: int) -> int:
    return tiles - tiles // 2


def last(tiles: int, heads: int) -> int:
    return tiles - min(tiles // 2, max(tiles // 4, 256 // heads))


ORDERS: dict[str, Order] = {
    "by head": by_head,
    "alternate": phases(),
    "half": phases(half),
    "phases": phases(half, last),
}


def busy(steps: list[float], multiprocessors: int) -> float:
    """The fraction of the multiprocessors' time in which they have a program."""
    free = [0.0] * multiprocessors
    for n in steps:
        heapq.heapreplace(free, free[0] + n)
    return sum(steps) / (multiprocessors * max(free))


def key_tiles(case: Case) -> np.ndarray:
    """Blocks of 64 rows that each tile of keys visits, for one query head, in the order of
    kv_order."""
    lengths = np.array(case.lengths)
    ends = np.cumsum(lengths)
    first = np.arange(0, case.seq, TILE)
    document = np.searchsorted(ends, np.minimum(first + TILE, case.seq) - 1, side="right")
    blocks = -(-ends[document] // 64) - first // 64
    return blocks[np.lexsort((-blocks, document, -lengths[document]))].astype(float)


def row_tiles(case: Case) -> np.ndarray:
    """Blocks of 128 keys that each tile of rows visits, most first."""
    lengths = np.array(case.lengths)
    ends = np.cumsum(lengths)
    first = np.arange(0, case.seq, TILE)
    begins = (ends - lengths)[np.searchsorted(ends, first, side="right")]
    return -np.sort(-(np.minimum(first + TILE, case.seq) - begins) / TILE)


def backward(case: Case, order: Order, multiprocessors: int, parts: int = 1) -> float:
    group = case.heads // case.kv_heads // parts
    steps = key_tiles(case) * group + BOUNDS[0]
    each = order(len(steps), case.batch * case.kv_heads * parts)
    return busy([steps[tile] for tile, _ in each], multiprocessors)


def forward(case: Case, order: Order, multiprocessors: int) -> float:
    steps = row_tiles(case) + BOUNDS[1]
    members = case.heads // case.kv_heads
    each = order(len(steps), case.batch * case.kv_heads)
    return busy([steps[tile] for tile, _ in each for _ in range(members)], multiprocessors)


def parts_of(case: Case) -> int:
    shapes = ((case.batch, case.seq, n, case.head_dim) for n in (case.heads, case.kv_heads))
    return lowering.parts_of_group(*(SimpleNamespace(shape=shape) for shape in shapes))


def main() -> None:
    parser = arguments_of(
        __doc__, "names and groups of cases.py", default="board,shard,causal_4k_d128"
    )
    parser.add_argument("--multiprocessors", type=int, default=132, help="of an H100 or H200")
    arguments = parser.parse_args()
    n = arguments.multiprocessors
    names = "".join(f"{name:>11}" for name in ORDERS)
    print(f"{'case':<24}{'heads':<7}{'pass':<5}{names}{'divided':>12}")
    for case in select(arguments.cases):
        heads = f"{case.heads}/{case.kv_heads}"
        for title, share in (("fwd", forward), ("bwd", backward)):
            cells = "".join(f"{share(case, order, n):>11.1%}" for order in ORDERS.values())
            parts = parts_of(case) if title == "bwd" else 1
            divided = (
                f"{backward(case, ORDERS['phases'], n, parts):.1%} in {parts}" if parts > 1 else ""
            )
            print(f"{case.name:<24}{heads:<7}{title:<5}{cells}{divided:>12}", flush=True)


if __name__ == "__main__":
    main()
