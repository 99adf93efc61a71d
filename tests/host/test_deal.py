"""C++ (csrc/plan/deal.cc) assigns documents to the same ranks as Python."""

from __future__ import annotations

import numpy as np
import pytest
from packax._src.context import document_assignment
from packax._src.context.document_assignment import Strategies, analyze_row
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
def test_the_same_as_python(monkeypatch: pytest.MonkeyPatch, ranks: int, number: int) -> None:
    rng = np.random.default_rng([ranks, number])
    own = 128 * 32
    for held in (False, True):
        ids, keys = row_of(rng, number, own * ranks)
        shift = max(0, int(keys.sum(dtype=np.int64)).bit_length() - 26)
        most = (own // 4, (int(keys.sum(dtype=np.int64)) >> shift) // ranks // 2 + 1)
        before = [rng.integers(0, x * held + 1, ranks) for x in most]
        stats = analyze_row(ids, keys, own, *before, shift)
        found = Strategies(stats)
        with monkeypatch.context() as patch:
            patch.setattr(document_assignment, "ext", None)
            expected = Strategies(stats)
        for name in ("owner", "tokens", "areas", "need"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        np.testing.assert_array_equal(stats.sizes, before[0])


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
