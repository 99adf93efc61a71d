"""`ragged_paged_attention`: one step of a server, prompt chunks and decoding in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from packax._src.core.sharding import typed_as, typed_axes, vary_together
from packax._src.core.spec import INT_MAX, Operands, accumulator, is_symbolic
from packax._src.decode import (
    as_integers,
    check_sequences,
    check_tensors,
    checked_drafts,
    checked_scales,
    checked_spec,
    checked_window,
    row_ranges,
)
from packax._src.ops.draft_tokens import MAX_DRAFTS, Drafts, with_drafts
from packax._src.ops.packed_rows import PackedRows
from packax._src.ops.partitioning import require_device_info
from packax._src.ops.primitives import Implementation, decode_p
from packax._src.requests import as_array, as_arrays, checked_sinks, flag

_AXES = "(tokens, heads, dim)"


if TYPE_CHECKING:
    from packax._src.decode import Options

    class _Options(Options, total=False):
        num_drafts: ArrayLike | None


@overload
def ragged_paged_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, kv_lens: ArrayLike,
    page_indices: ArrayLike | None, cu_q_lens: ArrayLike, num_seqs: ArrayLike | None = None, *,
    return_lse: Literal[False] = False, **options: Unpack[_Options],
) -> jax.Array: ...  # fmt: skip
@overload
def ragged_paged_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, kv_lens: ArrayLike,
    page_indices: ArrayLike | None, cu_q_lens: ArrayLike, num_seqs: ArrayLike | None = None, *,
    return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
def ragged_paged_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike | None,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike | None = None,
    *,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    kv_starts: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    causal: bool = True,
    draft_mask: ArrayLike | None = None,
    num_drafts: ArrayLike | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention of the new tokens of all sequences of a server's step over their caches.

    Each sequence has any number of new tokens: one if it is decoding, hundreds if they are a chunk
    of its prompt. The new tokens of all sequences are packed: those of sequence n are the rows
    cu_q_lens[n] to cu_q_lens[n + 1] - 1 of `query`. Their keys and values are in the cache already.
    Row r of sequence n is at position p = kv_lens[n] - cu_q_lens[n + 1] + r, and attends to the
    keys j <= p of its sequence. Only sizes are static: a step with other numbers of tokens and
    sequences runs the same program. The arguments are in the order of JAX's
    `ragged_paged_attention` for TPUs, except that keys and values are two arrays. Like
    `decode_attention`, it reads no keys beyond a length, copies no cache, and has no gradient.

    Args:
        query: (T, H, Dqk), of a dtype of `decode_attention`. Rows that belong to no sequence are
            padding.
        key: the pages, (pages, page_size, Hkv, Dqk), or a dense cache (N, S, Hkv, Dqk), as in
            `decode_attention`. If a mesh shards pages or sequences, each device attends to its
            part.
        value: like key, with head dim Dv.
        kv_lens: the number of keys of each sequence, including its new ones: (N,) integers. If it
            is below the number of new tokens, the first ones are padding and attend to nothing.
        page_indices: the pages of each sequence, (N, max_blocks) integers, as `block_table` of
            `decode_attention`. None: the cache is dense.
        cu_q_lens: where the rows of each sequence begin, and where the last one's end: (N + 1,)
            integers that do not decrease.
        num_seqs: how many sequences there are: an integer of shape () or (1,). The rest of the N
            have no rows. None: N.
        key_scale, value_scale: scales of float8_e4m3fn caches, as in `decode_attention`.
        kv_starts: the first key to which each row attends, (T,) integers.
        draft_mask: which of the sequence's drafts each draft attends to, (D, D) or (N, D, D)
            booleans, D <= 64, [n, i, j] for draft i of sequence n and the key of its draft j, as in
            `decode_attention`. All keys before the drafts are attended.
        num_drafts: how many of the new tokens of each sequence are drafts, its last ones: (N,)
            integers of at most D. The others attend to the keys up to their own, so a sequence
            without drafts has 0 or less.
        window, causal, scale, soft_cap, sinks, precision, implementation: as in
            `decode_attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        out, (T, H, Dv) in query's dtype, or (out, lse), where lse is (H, T) in float32 (float64 for
        float64). Padding and rows that attend to nothing have out 0 and lse -inf. A row whose keys
        end beyond the cache, or are in a page that does not exist, is NaN, as are the rows of a
        sequence with more drafts than D or than new tokens. Other rows are not affected.

    Raises:
        ValueError, NotImplementedError: the errors of `decode_attention`.

    Examples:
        Two sequences decode, and a third has a chunk of six prompt tokens. There is room for a
        fourth sequence and for 16 tokens:

        >>> pages = jnp.ones((8, 4, 2, 64), jnp.bfloat16)
        >>> out = packax.ragged_paged_attention(
        ...     jnp.ones((16, 4, 64), jnp.bfloat16), pages, pages,
        ...     kv_lens=jnp.array([5, 9, 8, 0]),
        ...     page_indices=jnp.array([[0, 1, 0], [2, 3, 4], [5, 6, 0], [0, 0, 0]]),
        ...     cu_q_lens=jnp.array([0, 1, 2, 8, 8]), num_seqs=3,
        ... )
    """
    query, key, value = as_arrays(query=query, key=key, value=value)
    lengths, bounds = _integers("kv_lens", kv_lens), _integers("cu_q_lens", cu_q_lens)
    table = None if page_indices is None else _integers("page_indices", page_indices)
    paged = table is not None
    check_tensors(query, key, value, _AXES, paged=paged)
    batch = _checked_batch(query.shape[0], lengths, bounds)
    check_sequences(key, table, batch, "kv_lens", "page_indices")
    count = _checked_count(num_seqs, batch)
    starts: Any = None if kv_starts is None else _integers("kv_starts", kv_starts)
    rows, heads, _ = query.shape
    if starts is not None and starts.shape != (rows,):
        shape = (rows,)
        raise ValueError(f"kv_starts must have shape {shape}, one per row, but has {starts.shape}")
    row_axes, head_axes, _ = typed_axes(query)
    query = typed_as(query, (), head_axes)
    one_batch = query[None]
    scales = checked_scales(key, key_scale, value_scale, paged=paged)
    spec = checked_spec(one_batch, scale, soft_cap, precision, implementation)
    return_lse, causal = flag("return_lse", return_lse), flag("causal", causal)
    limits = checked_window(window, causal)
    mask, numbers = _checked_drafts(draft_mask, num_drafts, batch, causal)
    if table is None:  # a dense cache has a page for each sequence
        table = jnp.arange(batch, dtype=jnp.int32)[:, None]
    operands = Operands(require_device_info(query), key, value, block_table=table)._replace(
        key_scale=scales[0], value_scale=scales[1], sinks=checked_sinks(sinks, one_batch)
    )
    operands, lengths, bounds, count, starts, mask, numbers = vary_together(
        operands, lengths, bounds, count, starts, mask, numbers
    )
    if rows == 0 or batch == 0:
        out, lse, _ = vary_together(
            jnp.zeros((rows, heads, value.shape[3]), query.dtype),
            jnp.full((heads, rows), -jnp.inf, accumulator(query.dtype)),
            operands,
        )
    else:
        packing = _packing(rows, bounds, count)
        drafts = None
        if mask is not None:
            drafts, lengths = _drafts(packing, lengths, mask, numbers, starts, limits[0])
        lo, hi = _ranges(packing, lengths, drafts, starts, *limits, causal)
        operands = operands._replace(query=operands.query[None], kv_start=lo[None], kv_end=hi[None])
        call = operands._replace(row_bounds=jnp.stack([packing.start, packing.end]))
        call = call if drafts is None else call._replace(sinks=None)
        out, lse = decode_p.bind(*call.leaves, spec=spec, names=call.names)
        if drafts is not None:
            out, lse = with_drafts(spec, operands, drafts, (out, lse))
        out, lse = out.reshape(out.shape[1:]), lse.reshape(lse.shape[1:])
    out, lse = typed_as(out, row_axes, head_axes), typed_as(lse, head_axes, row_axes)
    return (out, lse) if return_lse else out


def token_positions(
    tokens: int, kv_lens: ArrayLike, cu_q_lens: ArrayLike, num_seqs: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """The sequence of each token of a packed step, and its position in it.

    Args:
        tokens: the number of tokens of the step, T, with padding.
        kv_lens, cu_q_lens, num_seqs: as in `ragged_paged_attention`.

    Returns:
        sequence_ids and positions for `kv_cache.write`, (T,) int32 each. Padding has -1 and 0. The
        positions are those for RoPE, too, except for drafts of a tree.

    Raises:
        ValueError: wrong shapes or dtypes.

    Examples:
        >>> packax.kv_cache.token_positions(6, jnp.array([9, 3]), jnp.array([0, 1, 4]))
        (Array([ 0,  1,  1,  1, -1, -1], dtype=int32), Array([8, 0, 1, 2, 0, 0], dtype=int32))
    """
    lengths, bounds = _integers("kv_lens", kv_lens), _integers("cu_q_lens", cu_q_lens)
    batch = _checked_batch(tokens, lengths, bounds)
    if batch == 0 or tokens == 0:
        return jnp.full(tokens, -1, jnp.int32), jnp.zeros(tokens, jnp.int32)
    packing = _packing(tokens, bounds, _checked_count(num_seqs, batch))
    sequence = jnp.where(packing.valid, packing.sequence, -1)
    return sequence, jnp.where(packing.valid, packing.positions(lengths), 0)


def _integers(name: str, x: Any) -> jax.Array:
    """Complete on every device, because any row may belong to any sequence."""
    return typed_as(as_integers(name, x))


def _packing(rows: int, cu_q_lens: jax.Array, count: jax.Array) -> PackedRows:
    batch = cu_q_lens.size - 1
    last = cu_q_lens.at[jnp.clip(count, 0, batch)].get(mode="clip")
    index = jnp.arange(batch + 1)
    bounds = jnp.maximum(jnp.where(index <= count, cu_q_lens, last), 0)
    bounds = jax.lax.cummax(bounds)
    return PackedRows.of(bounds[:-1], bounds[1:], rows)


def _drafts(
    packing: PackedRows, lengths: jax.Array, mask: jax.Array, numbers: jax.Array,
    starts: jax.Array | None, left: int | None,
) -> tuple[Drafts, jax.Array]:  # fmt: skip
    """The drafts, and the lengths of sequences whose number of drafts is possible. Others are
    longer than any cache, which gives NaN."""
    rows, size = packing.sequence.size, mask.shape[-1]
    numbers = jnp.maximum(numbers, 0)
    wrong = numbers > jnp.minimum(packing.end - packing.start, size)
    numbers, lengths = jnp.where(wrong, 0, numbers), jnp.where(wrong, INT_MAX, lengths)
    nth = jnp.arange(size, dtype=jnp.int32)[None]
    row = jnp.where(nth < numbers[:, None], (packing.end - numbers)[:, None] + nth, rows)
    of_drafts = None if starts is None else starts.at[row].get(mode="fill", fill_value=0)
    first = jnp.maximum(lengths, 0) - numbers
    drafts = Drafts.of(mask, first, of_drafts, left, count=numbers)
    return drafts._replace(row=row), lengths


def _ranges(
    packing: PackedRows, lengths: jax.Array, drafts: Drafts | None, starts: jax.Array | None,
    left: Any, right: Any, causal: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(T,) int32: each row attends to the keys lo <= j < hi, and drafts to each other. Padding has
    empty ranges."""
    position = jnp.where(packing.valid, packing.positions(lengths), -1)
    ends = jnp.maximum(lengths, 0)
    if drafts is not None:
        position = position.at[drafts.row].set(drafts.position, mode="drop")
        ends = jnp.maximum(drafts.place[:, 0], 0)
    return row_ranges(position, ends[packing.sequence], starts, left, right, causal)


def _checked_drafts(
    draft_mask: Any, num_drafts: Any, batch: int, causal: bool
) -> tuple[jax.Array | None, Any]:
    """Both arguments, the mask as (1 or N, D, D)."""
    if draft_mask is None and num_drafts is None:
        return None, None
    if draft_mask is None or num_drafts is None:
        missing = "draft_mask" if draft_mask is None else "num_drafts"
        raise ValueError(f"pass both draft_mask and num_drafts, or neither, but {missing} is None")
    mask = as_array("draft_mask", draft_mask)
    size = mask.shape[-1] if mask.ndim else 1
    if size not in range(1, MAX_DRAFTS + 1):
        raise ValueError(
            f"draft_mask must be for 1 to {MAX_DRAFTS} drafts of each sequence, but has shape "
            f"{mask.shape}"
        )
    mask = checked_drafts(mask, batch, size, causal)
    numbers = _integers("num_drafts", num_drafts)
    if numbers.shape != (batch,):
        raise ValueError(
            f"num_drafts must have shape ({batch},), one for each sequence, but has {numbers.shape}"
        )
    return typed_as(mask), numbers


def _checked_count(num_seqs: Any, batch: int) -> jax.Array:
    count = _integers("num_seqs", batch if num_seqs is None else num_seqs)
    if count.shape not in ((), (1,)):
        raise ValueError(f"num_seqs must have shape () or (1,), but has {count.shape}")
    return count.reshape(())


def _checked_batch(tokens: Any, lengths: jax.Array, cu_q_lens: jax.Array) -> int:
    """The number of sequences for which there is room."""
    if lengths.ndim != 1:
        raise ValueError(f"kv_lens must have shape (sequences,), but has {lengths.shape}")
    (batch,) = lengths.shape
    for name, size in (("tokens", tokens), ("sequences", batch)):
        if is_symbolic(size):
            raise ValueError(f"the number of {name} must be known when tracing, but is {size}")
    if cu_q_lens.shape != (batch + 1,):
        raise ValueError(
            f"cu_q_lens must have shape ({batch + 1},), one more than kv_lens, but has "
            f"{cu_q_lens.shape}"
        )
    return batch
