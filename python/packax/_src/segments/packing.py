"""Packs documents into rows, and checks a packed batch, in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from packax._src.core.arguments import ArrayLike, as_int32, described, numpy_array
from packax._src.core.spec import PADDING_SEGMENT_ID
from packax._src.segments.ids import checked_size, is_left_padded_mask, returning, same_shape
from packax._src.segments.ids import positions as positions_of

# Padding values of other formats: 0 if ids start at 1, -100 in labels.
_LIKE_PADDING = (0, -100)


class Packed(NamedTuple):
    """What `pack` returns: arrays of (rows, length).

    Attributes:
        tokens: padding is `padding_token`.
        segment_ids: 0, 1, 2, ... in each row; padding is -1.
        positions: from 0 in each document; padding is 0.
        source: the index of each token in `np.concatenate(documents)`; padding is -1.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    source: np.ndarray


class PackingReport(NamedTuple):
    """What `check_packing` returns. Printing it shows everything.

    Attributes:
        summary: rows, documents and padding.
        problems: one sentence for each kind of mistake.
    """

    summary: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        found = [f"- {problem}" for problem in self.problems] or ["No problem found."]
        return "\n".join([self.summary, *found])


def pack(
    documents: Sequence[np.ndarray | Sequence[int]], length: int, padding_token: int = 0
) -> Packed:
    """Pack documents into rows: the longest first, each into the first row that has room for it.

    Use it if your pipeline has no packer: grain's `FirstFitPackIterDataset` packs a stream, and
    `from_one_based` converts its ids. Documents of equal length keep their order. A document that
    is longer than a row is cut into pieces, and each piece becomes a document; empty documents are
    left out.

    Args:
        documents: arrays of tokens, (tokens,) each.
        length: the length of a row.
        padding_token: the value of padding in `tokens`.

    Returns:
        Packed. Use `source` to pack other per-token arrays, such as weights:
        `np.where(packed.source < 0, 0, np.concatenate(weights)[packed.source])`.

    Raises:
        ValueError: documents that are not a sequence, a document that is not an array of integers
            (tokens,), a padding_token that is not an integer, or a length below 1.

    Examples:
        >>> packed = packax.segments.pack([[1, 2], [3, 4, 5], [6]], length=4)
        >>> packed.tokens
        array([[3, 4, 5, 6],
               [1, 2, 0, 0]], dtype=int32)
        >>> packed.segment_ids
        array([[ 0,  0,  0,  1],
               [ 0,  0, -1, -1]], dtype=int32)
    """
    length = checked_size("length", length, 1)
    padding = as_int32("padding_token", padding_token, ranks=(0,), shapes="()")
    if not isinstance(documents, Iterable):
        raise ValueError(f"documents must be a sequence of arrays, but is {described(documents)}")
    arrays = [_tokens(f"documents[{n}]", x) for n, x in enumerate(documents)]
    ends = np.cumsum([len(x) for x in arrays], dtype=np.int64)
    pieces = [
        range(i, min(i + length, end))
        for end, x in zip(ends.tolist(), arrays, strict=True)
        for i in range(end - len(x), end, length)
    ]
    # A binary tree over rows: each node stores the maximum room of its rows. Node 1 is the root.
    leaves = 1 << max(0, len(pieces) - 1).bit_length()
    room = [length] * (2 * leaves)
    rows: list[list[range]] = []
    for piece in sorted(pieces, key=len, reverse=True):
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < len(piece))
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(piece)
        room[node] -= len(piece)
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    source = np.full((len(rows), length), -1, np.int64)
    segment_ids = np.full((len(rows), length), PADDING_SEGMENT_ID, np.int32)
    positions = np.zeros((len(rows), length), np.int32)
    for row, members in enumerate(rows):
        sizes = [len(piece) for piece in members]
        source[row, : sum(sizes)] = np.concatenate([np.arange(x.start, x.stop) for x in members])
        positions[row, : sum(sizes)] = np.concatenate([np.arange(n) for n in sizes])
        segment_ids[row, : sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    flat = np.concatenate([*arrays, np.atleast_1d(padding)])  # source -1 is the last element
    return Packed(flat[source], segment_ids, positions, source)


def _tokens(name: str, document: Any) -> np.ndarray:
    tokens = numpy_array(name, document)
    if tokens.shape == (0,):  # numpy makes an empty list an array of floats
        tokens = tokens.astype(np.int32)
    shapes = "(tokens,)"
    if tokens.ndim > 1:
        shapes += (
            " (for arrays with features, pack np.arange(len(x)) for each array x, and take "
            "np.concatenate(arrays)[packed.source]; where source is -1, it is padding)"
        )
    return np.asarray(as_int32(name, tokens, ranks=(1,), shapes=shapes))


def check_packing(
    segment_ids: ArrayLike,
    positions: ArrayLike | None = None,
    targets: ArrayLike | None = None,
    *,
    tokens: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> PackingReport:
    """Checks a packed batch: describes what it contains and what looks wrong.

    Args:
        segment_ids: (B, S) or (S,), as for `documents`.
        positions: the positions for RoPE. None: not checked.
        targets: the target of each token's loss. None: not checked.
        tokens: if given, checks that targets are the next tokens.
        weights: the weights of the losses. None: every target that is not negative counts (-100 is
            a common negative one).

    Returns:
        PackingReport: `summary` counts documents and padding; `problems` says what looks like a
        mistake, and where. It is empty if nothing does.

    Raises:
        ValueError: wrong rank, dtype or shape, or traced arrays.

    Examples:
        >>> print(packax.segments.check_packing([[0, 0, 0, 1, 1, -1]], [[0, 1, 2, 3, 4, 0]]))
        1 row of 6 tokens: 2 documents, 16.7 % padding
        - 1 document does not start at position 0: first row 0, token 3, position 3
    """
    ids = np.atleast_2d(_on_host("segment_ids", segment_ids))
    given: dict[str, Any] = {"positions": positions, "targets": targets}
    given |= {"tokens": tokens, "weights": weights}
    arrays = {name: None if x is None else _on_host(name, x, ids) for name, x in given.items()}
    return _report(ids, arrays)


def _on_host(name: str, x: ArrayLike, ids: np.ndarray | None = None) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise ValueError(f"{name} is traced: check a batch outside of jit")
    array = np.asarray(x) if name == "weights" else np.asarray(as_int32(name, numpy_array(name, x)))
    if ids is None:
        return array
    same_shape(name, np.atleast_2d(array), "segment_ids", ids.shape)
    return np.atleast_2d(array)


def _report(ids: np.ndarray, given: dict[str, Any]) -> PackingReport:
    """The report for arrays of shape (B, S)."""
    real = ids != PADDING_SEGMENT_ID
    problems = _of_ids(ids, real)
    if given["positions"] is not None:
        problems += _of_positions(given["positions"], ids, real)
    if given["targets"] is not None:
        problems += _of_targets(given["targets"], ids, real, given["tokens"], given["weights"])
    return PackingReport(_summary(ids, real), tuple(problems))


def _summary(ids: np.ndarray, real: np.ndarray) -> str:
    each = [len(np.unique(row[kept])) for row, kept in zip(ids, real, strict=True)]
    total, few, most = sum(each), min(each, default=0), max(each, default=0)
    rows, length = ids.shape
    documents = _count(total, "document")
    if rows > 1:
        a_row = f"{few}" if few == most else f"{few} to {most}"
        documents += f" ({a_row} a row)"
    padding = f"{100 * np.mean(~real):.1f} % padding" if ids.size else "no token"
    return f"{_count(rows, 'row')} of {_count(length, 'token')}: {documents}, {padding}"


def _of_ids(ids: np.ndarray, real: np.ndarray) -> list[str]:
    found = []
    empty = np.flatnonzero(~real.any(1))
    if len(empty):
        found.append(f"{_count(len(empty), 'row')} of padding alone: first row {empty[0]}")
    for padding in _LIKE_PADDING:
        tail = ids == padding
        packed = real.all() and tail.any() and not tail[:, :1].any() and ids[~tail].min() > 0
        if packed and not (tail[:, :-1] & ~tail[:, 1:]).any():
            found.append(
                f"rows end with id {padding} after ids from 1 on, as if it were padding: only "
                f"{PADDING_SEGMENT_ID} is (packax.segments.from_one_based turns 0 into -1)"
            )
    if is_left_padded_mask(ids):
        found.append(
            "ids are 0, then 1, in every row, as in an attention mask with padding on the left, "
            "but 0 is a document: packax.segments.from_attention_mask turns such a mask into ids"
        )
    back = [(row, returning(x)) for row, x in enumerate(ids)]
    back = [(row, which) for row, which in back if which]
    if back:
        row, which = back[0]
        found.append(
            f"ids that reappear after others in {_count(len(back), 'row')}: first row {row}, id "
            f"{which[0]}. Its pieces are one document and attend to each other"
        )
    return found


def _of_positions(at_token: np.ndarray, ids: np.ndarray, real: np.ndarray) -> list[str]:
    found = []
    first = real & (positions_of(ids) == 0)
    bad = first & (at_token != 0)
    if bad.any():
        row, at = np.argwhere(bad)[0]
        verb = "does" if bad.sum() == 1 else "do"
        found.append(
            f"{_count(int(bad.sum()), 'document')} {verb} not start at position 0: first row "
            f"{row}, token {at}, position {at_token[row, at]}"
        )
    bad = np.zeros_like(real)
    bad[:, 1:] = real[:, 1:] & (ids[:, 1:] == ids[:, :-1]) & (np.diff(at_token) != 1)
    again = bad & (at_token == 0)
    if again.any() and (again == bad).all():
        row, at = np.argwhere(bad)[0]
        found.append(
            f"positions start again at 0 inside documents, at {_count(int(bad.sum()), 'token')}: "
            f"first row {row}, token {at}. Documents were joined, as from_attention_mask joins "
            "those of a mask that numbers them 1, 2, 3 (use from_one_based), or they are pieces "
            "with one id"
        )
    elif bad.any():
        row, at = np.argwhere(bad)[0]
        found.append(
            f"positions do not count by 1 inside documents, at {_count(int(bad.sum()), 'token')}"
            f": first row {row}, token {at}, position {at_token[row, at]}"
        )
    return found


def _of_targets(
    targets: np.ndarray, ids: np.ndarray, real: np.ndarray, tokens: Any, weights: Any
) -> list[str]:
    counts = targets >= 0 if weights is None else weights != 0
    inside = np.zeros_like(real)
    inside[:, :-1] = real[:, :-1] & (ids[:, 1:] == ids[:, :-1])
    found = []
    cases = (
        (real & ~inside, "the last token of a document; its next token is in another document"),
        (~real, "padding"),
    )
    for where, what in cases:
        bad = counts & where
        if bad.any():
            row, at = np.argwhere(bad)[0]
            verb = "counts" if bad.sum() == 1 else "count"
            found.append(
                f"{_count(int(bad.sum()), 'target')} {verb} at {what}: first row {row}, token {at}"
            )
    if tokens is not None:
        following = np.zeros_like(tokens)
        following[:, :-1] = tokens[:, 1:]
        bad = counts & inside & (targets != following)
        if bad.any():
            row, at = np.argwhere(bad)[0]
            same = (targets == tokens)[counts & inside].all()
            why = "they are the tokens themselves" if same else "are they shifted twice?"
            found.append(
                f"{_count(int(bad.sum()), 'target')} that count are not the next token: first row "
                f"{row}, token {at}; {why}"
            )
    return found


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
