"""Documents dealt by C++ (csrc/plan/deal.cc) get the owners that numpy and jax find."""

from __future__ import annotations

import numpy as np
import pytest
from packax._src.context import local_search
from packax._src.context.array_ops import HostOps
from packax._src.context.local_search import Base, Documents, Search, deal
from packax._src.ops.ffi import ext

needs_extension = pytest.mark.skipif(ext is None, reason="the extension is not built")


def documents_of(rng: np.random.Generator, number: int, length: int) -> Documents:
    """A few long documents and many short ones, the heaviest first, with empty ones behind."""
    cuts = rng.choice(np.arange(1, length), number - 1, replace=False)
    lengths = np.diff(np.sort(cuts), prepend=0, append=length)
    lengths = np.where(rng.random(number) < 0.1, 0, lengths)
    areas = lengths * (lengths + 1) // 2
    areas = areas >> max(0, int(areas.sum()).bit_length() - 26)
    order = np.argsort(-areas, kind="stable")
    none = np.zeros(0, np.int32)
    x = [value[order].astype(np.int32) for value in (lengths, areas)]
    return Documents(*x, none, none, none, np.int32(0))


def dealt(documents: Documents, base: Base, length: int) -> Search:
    mean = (documents.areas.sum() + base.areas.sum()) // len(base.tokens)
    limit = np.int32(mean + mean // 34)
    return deal(HostOps(), documents, base, length, limit)


@needs_extension
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("number", [1, 2, 9, 200, 1500])
def test_the_same_as_numpy(monkeypatch: pytest.MonkeyPatch, ranks: int, number: int) -> None:
    rng = np.random.default_rng([ranks, number])
    length = 128 * ranks * 32
    for held in (False, True):
        documents = documents_of(rng, number, length)
        most = (length // ranks // 4, int(documents.areas.sum()) // ranks // 2 + 1)
        base = Base(*(rng.integers(0, x * held + 1, ranks).astype(np.int32) for x in most))
        found = dealt(documents, base, length)
        with monkeypatch.context() as patch:
            patch.setattr(local_search, "ext", None)
            expected = dealt(documents, base, length)
        assert (found.owner[:, :number] == expected.owner[:, :number]).all()
        assert (found.tokens == expected.tokens).all()
        assert (found.areas == expected.areas).all()
        # Behind the last document numpy stops where all ways have, and C++ goes on.
        ends = [np.minimum(x.end, number) for x in (found, expected)]
        assert (ends[0] == ends[1]).all()
        assert not np.shares_memory(found.tokens, base.tokens)


@needs_extension
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("areas", np.zeros(3, np.int32)),
        ("light", np.zeros(3, np.int32)),
        ("weight", np.zeros(3, np.int32)),
        ("held_areas", np.zeros((2, 3), np.int32)),
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
    """8 documents, 2 ways, 4 ranks, 2 rounds."""
    per_document, per_way, held = (np.ones(n, np.int32) for n in (8, 2, (2, 4)))
    return {
        "lengths": per_document,
        "areas": per_document,
        "light": per_document,
        "weight": per_way,
        "most_tokens": 9,
        "most_area": 9,
        "rounds": 2,
        "end": np.zeros(2, np.int32),
        "held_tokens": held,
        "held_areas": held.copy(),
        "owner": np.zeros((2, 8), np.int32),
    }
