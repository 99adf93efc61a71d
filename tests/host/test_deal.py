"""How C++ (csrc/plan/deal.cc) deals documents to ranks."""

from __future__ import annotations

import numpy as np
import pytest
from packax._src.context.document_assignment import Strategies, analyze_row, sums_by_part
from packax._src.ops.ffi import ext

needs_extension = pytest.mark.skipif(ext is None, reason="the extension is not built")


def row_of(rng: np.random.Generator, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids of a few long documents and many short ones, and the keys of each row."""
    cuts = np.sort(rng.choice(np.arange(1, length), number - 1, replace=False))
    sizes = np.diff(cuts, prepend=0, append=length)
    ids = np.where(rng.random(number) < 0.1, -1, np.arange(number)).repeat(sizes)
    keys = np.arange(length) - np.append(0, cuts).repeat(sizes) + 1
    return ids.astype(np.int32), np.where(ids < 0, 0, keys).astype(np.int32)


@needs_extension
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("number", [1, 2, 9, 200, 1500])
def test_what_each_rank_holds(ranks: int, number: int) -> None:
    """No rank gets more than its room, each strategy deals the heaviest documents in order, and the
    sums are those of the documents."""
    rng = np.random.default_rng([ranks, number])
    own = 128 * 32
    for held in (False, True):
        ids, keys = row_of(rng, number, own * ranks)
        shift = max(0, int(keys.sum(dtype=np.int64)).bit_length() - 26)
        most = (own // 4, (int(keys.sum(dtype=np.int64)) >> shift) // ranks // 2 + 1)
        stats = analyze_row(
            ids, keys, own, *(rng.integers(0, x * held + 1, ranks) for x in most), shift
        )
        found = Strategies(stats)
        few = min(len(stats.lengths), found.owner.shape[1])
        for owner, tokens, areas in zip(found.owner, found.tokens, found.areas, strict=True):
            assert tokens.max() <= own
            dealt = owner != ranks
            assert not (dealt[1:] > dealt[:-1]).any()
            for sums, base, x in (
                (tokens, stats.sizes, stats.lengths), (areas, stats.base_areas, stats.areas),
            ):  # fmt: skip
                np.testing.assert_array_equal(
                    sums, base + sums_by_part(owner[:few], x[:few], ranks)
                )


@needs_extension
def test_each_document_goes_to_the_least_loaded_rank() -> None:
    assert ext is not None
    lengths = np.array([7, 5, 4, 3, 3, 2, 9, 1], np.int32)
    given = arguments() | {"lengths": lengths, "areas": lengths, "most_tokens": 13, "most_area": 99}
    given |= {"weight": np.zeros(1, np.int32), "end": np.zeros(1, np.int32), "rounds": 3}
    given |= {name: np.zeros((1, 2), np.int32) for name in ("rank_tokens", "rank_areas")}
    given |= {"density": np.zeros(8, np.int32), "owner": np.full((1, 8), 2, np.int32)}
    ext.deal(**given)
    np.testing.assert_array_equal(given["owner"], [[0, 1, 1, 0, 1, 0, 2, 2]])
    np.testing.assert_array_equal(given["rank_tokens"], [[12, 12]])


@needs_extension
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("areas", np.zeros(3, np.int32)),
        ("density", np.zeros(3, np.int32)),
        ("weight", np.zeros(3, np.int32)),
        ("rank_areas", np.zeros((2, 3), np.int32)),
        ("owner", np.zeros((2, 3), np.int32)),
    ],
)
def test_arrays_that_do_not_go_together(name: str, wrong: np.ndarray) -> None:
    assert ext is not None
    with pytest.raises(ValueError, match="do not go together"):
        ext.deal(**(arguments() | {name: wrong}))


@needs_extension
@pytest.mark.parametrize(("rounds", "begin"), [(3, 0), (2, 1), (-1, 0), (1, -1)])
def test_no_room_for_a_document_of_every_rank(rounds: int, begin: int) -> None:
    assert ext is not None
    ext.deal(**arguments())
    wrong = {"rounds": rounds, "end": np.full(2, begin, np.int32)}
    with pytest.raises(ValueError, match="needs a document for every rank"):
        ext.deal(**(arguments() | wrong))


@needs_extension
def test_what_is_changed_in_place_is_not_copied() -> None:
    assert ext is not None
    with pytest.raises(TypeError):
        ext.deal(**(arguments() | {"owner": np.zeros((2, 8), np.int64)}))


def arguments() -> dict[str, object]:
    """8 documents, 2 strategies, 4 ranks, 2 rounds."""
    per_document, per_strategy, held = (np.ones(n, np.int32) for n in (8, 2, (2, 4)))
    return {
        "lengths": per_document,
        "areas": per_document,
        "density": per_document,
        "weight": per_strategy,
        "most_tokens": 9,
        "most_area": 9,
        "rounds": 2,
        "end": np.zeros(2, np.int32),
        "rank_tokens": held,
        "rank_areas": held.copy(),
        "owner": np.zeros((2, 8), np.int32),
    }
