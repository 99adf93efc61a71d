"""Segment ids from the formats of data pipelines, and next-token targets, in numpy or jax."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from packax._src.core.arguments import Array, ArrayLike, as_int32, numpy_array, numpy_of
from packax._src.core.debug import check_values
from packax._src.core.sharding import over_auto_axes, typed_axes
from packax._src.core.spec import PADDING_SEGMENT_ID

Function = TypeVar("Function", bound=Callable[..., Any])


def _on_rows(shards_rows: bool) -> Callable[[Function], Function]:
    """A decorator for functions whose arrays may be sharded over mesh axes of type Explicit.

    The results are (batch, length), sharded like the first sharded array; along the length only if
    `shards_rows`.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arrays: Any, **named: Any) -> Any:
            def run(*every: Any) -> Any:
                positional, others = every[: len(arrays)], every[len(arrays) :]
                return function(*positional, **dict(zip(named, others, strict=True)))

            every = (*arrays, *named.values())
            sharded = (typed_axes(x) for x in every if isinstance(x, jax.Array))
            dims = next((axes for axes in sharded if any(axes)), ())
            return over_auto_axes(run, every, dims if shards_rows else dims[:-1])

        return call  # type: ignore[return-value]

    return decorate


class NextTokens(NamedTuple):
    """What `next_tokens` returns.

    Attributes:
        targets: int32, the next token of the same document; 0 where there is no next token.
        weights: float32, 0 where there is no next token.
    """

    targets: Any
    weights: Any


@_on_rows(shards_rows=False)
def from_lengths(lengths: ArrayLike, length: int | None = None) -> Array:
    """Segment ids of documents of these lengths, one after another, then padding.

    Args:
        lengths: the number of tokens of each document, (N,) or (B, N). A document of length 0 has
            no tokens, so pad the `lengths` of a batch with 0.
        length: the length of a row. None: the length of the longest row. Required for jax arrays,
            where tokens beyond it are dropped.

    Returns:
        int32, (length,) or (B, length). Document n has id n.

    Raises:
        ValueError: wrong rank or dtype; for numpy arrays also a negative length,
            or documents that do not fit into `length`.

    Examples:
        >>> packax.segments.from_lengths([3, 2], length=8)
        array([ 0,  0,  0,  1,  1, -1, -1, -1], dtype=int32)
    """
    each = as_int32("lengths", lengths, shapes="(batch, documents) or (documents,)")
    length = None if length is None else static_size("length", length)
    xp = jnp if _is_symbolic(length) else numpy_of(each)
    if xp is np:
        ends: Array = np.cumsum(each, axis=-1, dtype=np.int64)
        if each.size and each.min() < 0:
            raise ValueError(f"lengths must not be negative, but holds {each.min()}")
        total = int(ends[..., -1].max(initial=0)) if each.shape[-1] else 0
        length = total if length is None else length
        if total > length:
            raise ValueError(f"lengths add up to {total} tokens, but length is {length}")
    elif length is None:
        raise ValueError("pass length=: it is a static size, which a jax array cannot determine")
    else:  # sums that wrap are beyond `length`, as are all later ones
        # jax adds up no symbolic size that may be 0: a last document has no token.
        each = jnp.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, 1)])
        most = jnp.asarray(length).astype(np.uint32)
        tokens: Any = jnp.minimum(jnp.maximum(each, 0).astype(np.uint32), most)
        sums = jnp.cumsum(tokens, axis=-1, dtype=np.uint32)
        wrapped = jax.lax.cummax((sums < tokens).astype(np.int32), axis=each.ndim - 1) != 0
        ends = jnp.where(wrapped, most, jnp.minimum(sums, most)).astype(np.int32)

    def of_row(ends: Any) -> Any:
        if xp is np:
            index = np.arange(length, dtype=np.int32)
            number: Any = np.searchsorted(ends, index, side="right").astype(np.int32)
        else:
            ending = jnp.zeros(length + 1, np.int32).at[ends].add(1)
            number = jnp.cumsum(ending, dtype=np.int32)[:-1]
        return xp.where(number < ends.shape[0], number, PADDING_SEGMENT_ID).astype(np.int32)

    if ends.ndim == 1:
        return of_row(ends)
    if xp is np:
        return np.array([of_row(x) for x in ends], np.int32).reshape(len(ends), length)
    return jax.vmap(of_row)(ends)


@_on_rows(shards_rows=False)
def from_cu_seqlens(cu_seqlens: ArrayLike, length: int | None = None) -> Array:
    """Segment ids from cumulative lengths, as flash-attention's varlen functions take them.

    Args:
        cu_seqlens: 0, then the end of each document: (N + 1,) or (B, N + 1). To pad the array to a
            static size, repeat the last end, or use -1, as the offsets of jax's cuDNN attention do.
        length: as in `from_lengths`. Tokens after the last end are padding.

    Returns:
        int32, (length,) or (B, length).

    Raises:
        ValueError: an error of `from_lengths`; for numpy arrays also a first entry other than 0.

    Examples:
        >>> packax.segments.from_cu_seqlens([0, 3, 5], length=8)
        array([ 0,  0,  0,  1,  1, -1, -1, -1], dtype=int32)
    """
    ends = as_int32("cu_seqlens", cu_seqlens, shapes="(batch, documents + 1) or (documents + 1,)")
    if ends.shape[-1] == 0:
        raise ValueError("cu_seqlens must begin with 0, but is empty")
    if isinstance(ends, np.ndarray):
        if (first := ends[..., :1]).any():
            wrong = first[first != 0][0]
            raise ValueError(f"cu_seqlens must begin with 0, but begins with {wrong}")
        ends = np.where(ends == -1, np.maximum.accumulate(ends, axis=-1), ends)
        if (ends[..., 1:] < ends[..., :-1]).any():
            raise ValueError("cu_seqlens must not decrease: they are cumulative lengths")
        return from_lengths(ends[..., 1:] - ends[..., :-1], length)
    ends = jax.lax.cummax(ends, axis=ends.ndim - 1)
    starts = jnp.concatenate([ends[..., :1], ends[..., :-1]], axis=-1)
    # Document 0 has no token, so that a symbolic number of documents is not 0.
    return jnp.maximum(from_lengths(ends - starts, length) - 1, PADDING_SEGMENT_ID)


def from_attention_mask(attention_mask: ArrayLike) -> Array:
    """Segment ids from an attention mask of 0 and 1, as Hugging Face tokenizers return it.

    Args:
        attention_mask: 1 for tokens, 0 for padding, which is on the right or on the left: (B, S) or
            (S,) integers or booleans.

    Returns:
        int32: 0 for tokens, so that each row is one document, and -1 for padding.

    Raises:
        ValueError: wrong rank or dtype; for numpy arrays, and under
            `packax.context.debug_checks`, also another value. For a mask that numbers packed
            documents 1, 2, 3, ... use `from_one_based`.

    Examples:
        >>> packax.segments.from_attention_mask([[1, 1, 1, 0], [1, 0, 0, 0]])
        array([[ 0,  0,  0, -1],
               [ 0, -1, -1, -1]], dtype=int32)
    """
    mask = _flags("attention_mask", attention_mask)
    xp = numpy_of(mask)
    check_values(_check_zeros_and_ones, mask)
    return xp.where(mask != 0, 0, PADDING_SEGMENT_ID).astype(np.int32)


def from_one_based(segment_ids: ArrayLike) -> Array:
    """Segment ids from packers that number documents from 1 and pad with 0.

    grain, tf.data with seqio, and MaxText do this.

    Args:
        segment_ids: (B, S) or (S,) of integers.

    Returns:
        int32: each id minus 1, so that padding is -1.

    Raises:
        ValueError: wrong rank or dtype; for numpy arrays, and under
            `packax.context.debug_checks`, also a negative id: such ids are already in packax's
            format.

    Examples:
        >>> packax.segments.from_one_based([1, 1, 2, 0])
        array([ 0,  0,  1, -1], dtype=int32)
    """
    ids = as_int32("segment_ids", segment_ids)
    check_values(_check_not_negative, ids)
    return ids - np.int32(1)


def _check_zeros_and_ones(mask: np.ndarray) -> None:
    if ((mask != 0) & (mask != 1)).any():
        raise ValueError(
            f"attention_mask must hold 0 and 1, but holds values from {mask.min()} to "
            f"{mask.max()}: if it numbers documents from 1, use from_one_based"
        )


def _check_not_negative(ids: np.ndarray) -> None:
    if ids.size and ids.min() < 0:
        raise ValueError(
            f"segment_ids must be 0 for padding and positive elsewhere, but holds {ids.min()}"
        )


@_on_rows(shards_rows=True)
def from_positions(positions: ArrayLike, valid: ArrayLike | None = None) -> Array:
    """Segment ids from position ids: a document starts where the position is 0, and at the first
    token of a row.

    Args:
        positions: (B, S) or (S,) of integers.
        valid: False or 0 for padding, shaped like positions. None: no padding. Pass it if padding
            has position 0: otherwise each padding token is a document.

    Returns:
        int32: 0, 1, 2, ... in each row. A row may begin inside a document.

    Raises:
        ValueError: wrong rank, dtype or shape.

    Examples:
        >>> packax.segments.from_positions([0, 1, 2, 0, 1, 0])
        array([0, 0, 0, 1, 1, 2], dtype=int32)
    """
    at = as_int32("positions", positions)
    real = None if valid is None else _flags("valid", valid, at.shape) != 0
    xp = numpy_of(at, real)
    starts = xp.concatenate([xp.ones_like(at[..., :1]), (at[..., 1:] == 0).astype(np.int32)], -1)
    if real is not None:  # a document may continue from an earlier row, at the first real token
        first = xp.cumsum(real, axis=-1, dtype=np.int32) == 1
        starts = xp.where(real, xp.where(first, 1, starts), 0)
    ids = xp.cumsum(starts, axis=-1, dtype=np.int32) - np.int32(1)
    return ids if real is None else xp.where(real, ids, PADDING_SEGMENT_ID)


@_on_rows(shards_rows=True)
def positions(segment_ids: ArrayLike) -> Array:
    """Positions that restart in every document, as RoPE needs: 0, 1, 2, ... for each id.

    Args:
        segment_ids: (B, S) or (S,) of integers. An id that reappears is the same document, and its
            positions continue.

    Returns:
        int32: how many earlier tokens of the row have the same id; 0 for padding.

    Raises:
        ValueError: wrong rank or dtype.

    Examples:
        >>> packax.segments.positions([0, 0, 0, 1, 1, -1])
        array([0, 1, 2, 0, 1, 0], dtype=int32)
    """
    ids = as_int32("segment_ids", segment_ids)
    xp = numpy_of(ids)
    order = xp.argsort(ids, axis=-1, stable=True)
    of_id = xp.take_along_axis(ids, order, axis=-1)
    index = xp.broadcast_to(xp.arange(ids.shape[-1], dtype=np.int32), ids.shape)
    begins = xp.where(of_id[..., 1:] != of_id[..., :-1], index[..., 1:], 0)
    begins = xp.concatenate([xp.zeros_like(index[..., :1]), begins], axis=-1)
    if xp is np:
        begins = np.maximum.accumulate(begins, axis=-1)
    else:
        begins = jax.lax.cummax(begins, axis=ids.ndim - 1)
    place = xp.take_along_axis(index - begins, xp.argsort(order, axis=-1), axis=-1)
    return xp.where(ids == PADDING_SEGMENT_ID, 0, place).astype(np.int32)


@_on_rows(shards_rows=True)
def next_tokens(
    tokens: ArrayLike, segment_ids: ArrayLike, token_weights: ArrayLike | None = None
) -> NextTokens:
    """Next-token targets that do not cross a document, and the weights of their losses.

    Args:
        tokens: (B, S) or (S,) of integers.
        segment_ids: the same shape.
        token_weights: how much the prediction of each token counts, such as 0 for prompts in
            fine-tuning; the same shape. None: 1.

    Returns:
        (targets, weights): both are 0 for the last token of a document and for padding. Divide the
        sum of weighted losses by the sum of the weights.

    Raises:
        ValueError: wrong rank, dtype or shape.

    Examples:
        >>> targets, weights = packax.segments.next_tokens([5, 6, 7, 8, 0], [0, 0, 1, 1, -1])
        >>> targets, weights
        (array([6, 0, 8, 0, 0], dtype=int32), array([1., 0., 1., 0., 0.], dtype=float32))
    """
    words, ids = as_int32("tokens", tokens), as_int32("segment_ids", segment_ids)
    same_shape("segment_ids", ids, "tokens", words.shape)
    xp = numpy_of(words, ids)
    inside = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != PADDING_SEGMENT_ID)
    weights = inside.astype(np.float32)
    if token_weights is not None:
        given = token_weights if isinstance(token_weights, jax.Array) else np.asarray(token_weights)
        same_shape("token_weights", given, "tokens", words.shape)
        xp = numpy_of(words, ids, given)
        weights = xp.where(inside, given[..., 1:].astype(np.float32), np.float32(0))
    last = [(0, 0)] * (words.ndim - 1) + [(0, min(1, words.shape[-1]))]
    return NextTokens(xp.pad(xp.where(inside, words[..., 1:], 0), last), xp.pad(weights, last))


def cu_seqlens(segment_ids: ArrayLike, max_documents: int | None = None) -> Array:
    """Cumulative lengths of the documents, as flash-attention's varlen functions take them.

    They count the tokens that are not padding, as in `tokens[segment_ids != -1]`, with the rows of
    a batch one after another.

    Args:
        segment_ids: (B, S) or (S,) of integers. A document is a run of equal ids in a row.
        max_documents: a static upper bound on the number of documents. The result has one more
            entry, and repeats its last value; under `jit`, further documents are left out. None:
            the number of documents, for numpy arrays only.

    Returns:
        int32, (documents + 1,).

    Raises:
        ValueError: wrong rank or dtype; missing max_documents for jax arrays; for
            numpy arrays also more documents than max_documents, or an id that reappears, which
            cumulative lengths cannot express.

    Examples:
        >>> packax.segments.cu_seqlens([4, 4, 4, 9, 9, -1])
        array([0, 3, 5], dtype=int32)
    """
    ids = as_int32("segment_ids", segment_ids)
    if _is_symbolic(max_documents):
        ids = jnp.asarray(ids)
    if max_documents is not None:
        max_documents = static_size("max_documents", max_documents)
    return over_auto_axes(_cu_seqlens, (ids, max_documents), ())


def _cu_seqlens(ids: Array, max_documents: int | None) -> Array:
    xp = numpy_of(ids)
    flat = ids.reshape(-1)
    real = flat != PADDING_SEGMENT_ID
    numbers = xp.arange(flat.shape[0], dtype=np.int32)  # the size may be symbolic
    rows = numbers if 0 in ids.shape else numbers // xp.asarray(ids.shape[-1]).astype(np.int32)
    index = xp.where(real, numbers, -1)
    seen = np.maximum.accumulate(index) if xp is np else jax.lax.cummax(index)
    before = xp.concatenate([xp.full_like(seen[:1], -1), seen[:-1]])
    at = xp.maximum(before, 0)
    starts = real & ((before < 0) | (flat[at] != flat) | (rows[at] != rows))
    ends = xp.cumsum(real, dtype=np.int32)
    begins = ends - real.astype(np.int32)
    if isinstance(ids, np.ndarray):
        for row, again in enumerate(map(returning, np.atleast_2d(ids))):
            if again:
                raise ValueError(
                    f"segment_ids has id {again[0]} twice in row {row}, with other ids between: "
                    "cumulative lengths would make it two documents"
                )
        count = int(starts.sum())
        most = count if max_documents is None else max_documents
        if count > most:
            raise ValueError(f"max_documents is {most}, but segment_ids has {count} documents")
        return np.append(begins[starts], [real.sum()] * (most - count + 1)).astype(np.int32)
    if max_documents is None:
        raise ValueError("pass max_documents=: it is a static size, and segment_ids is a jax array")
    total = real.sum(dtype=np.int32)
    number = jnp.cumsum(starts, dtype=np.int32) - 1
    number = jnp.where(starts & (number <= max_documents), number, max_documents + 1)
    return jnp.full(max_documents + 1, total).at[number].set(begins, mode="drop")


def returning(ids: np.ndarray) -> list[int]:
    """The ids of a row that reappear after other ids, ignoring padding."""
    ids = ids[ids != PADDING_SEGMENT_ID]
    runs = ids[np.append(True, ids[1:] != ids[:-1])] if len(ids) else ids
    found, counts = np.unique(runs, return_counts=True)
    return found[counts > 1].tolist()


def is_left_padded_mask(ids: np.ndarray) -> bool:
    """Whether ids (B, S) look like an attention mask with padding on the left: 0s, then 1s, in all
    rows, some of which have no padding."""
    if not ids.size or ids.min() != 0 or ids.max() != 1:
        return False
    return bool((ids[:, 1:] >= ids[:, :-1]).all() and (ids[:, 0] == 1).any())


def _flags(name: str, x: ArrayLike, shape: tuple[int, ...] | None = None) -> Array:
    array = x if isinstance(x, jax.Array) else numpy_array(name, x)
    flags = as_int32(name, array.astype(np.int32) if array.dtype == bool else array)
    if shape is not None:
        same_shape(name, flags, "positions", shape)
    return flags


def checked_size(name: str, size: Any, least: int) -> int:
    try:
        number = operator.index(size)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, but is {size!r}")
    return number


def _is_symbolic(size: Any) -> bool:
    return is_symbolic_dim(size)


def static_size(name: str, size: Any) -> Any:
    """A size of 0 or more, which may be a symbolic dimension of jax.export."""
    return size if _is_symbolic(size) else checked_size(name, size, 0)


def same_shape(name: str, x: Array, other: str, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have the shape of {other}, {shape}, but has {x.shape}")
