"""`decode_attention`: attention of a few new tokens per sequence over a key/value cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from packax._src.core.arguments import described, numpy_array
from packax._src.core.sharding import typed_axes, vary_together
from packax._src.core.spec import (
    FP8,
    INT_MAX,
    MAX_LENGTH,
    AttentionSpec,
    Operands,
    accumulator,
    is_fp8,
    is_symbolic,
)
from packax._src.ops.draft_tokens import Drafts, with_drafts
from packax._src.ops.packed_rows import MAX_ROWS
from packax._src.ops.partitioning import check_decode_types, require_device_info
from packax._src.ops.primitives import Implementation, decode_p
from packax._src.requests import (
    DTYPES,
    as_array,
    as_arrays,
    checked_options,
    checked_scale,
    checked_sinks,
    flag,
)

_AXES = "(batch, queries, heads, dim)"


if TYPE_CHECKING:

    class Options(TypedDict, total=False):
        """Arguments that do not change the type of the result."""

        key_scale: ArrayLike | None
        value_scale: ArrayLike | None
        kv_starts: ArrayLike | None
        window: tuple[int | None, int | None] | None
        causal: bool
        draft_mask: ArrayLike | None
        scale: float | None
        soft_cap: float | None
        sinks: ArrayLike | None
        precision: jax.lax.PrecisionLike
        implementation: Implementation | None

    class _Options(Options, total=False):
        block_table: ArrayLike | None


@overload
def decode_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, kv_lengths: ArrayLike, *,
    return_lse: Literal[False] = False, **options: Unpack[_Options],
) -> jax.Array: ...  # fmt: skip
@overload
def decode_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, kv_lengths: ArrayLike, *,
    return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
def decode_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    block_table: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    kv_starts: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    causal: bool = True,
    draft_mask: ArrayLike | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention of the last 1 to 16 tokens of every sequence over its key/value cache.

    Query token i of sequence b is at position p = kv_lengths[b] - Sq + i, and attends to the keys
    j <= p of its sequence. The keys of a sequence are split into parts, which are computed in
    parallel and merged (Flash-Decoding, pytorch.org/blog/flash-decoding), so a single sequence can
    fill the GPU. Keys beyond a length are not read, and no cache is copied or padded. Softmax and
    all sums are float32 (float64 for float64 operands). There is no gradient: train with
    `flash_attention`.

    Args:
        query: (B, Sq, H, Dqk) bfloat16, float16 or float32 (float64 where jax has it enabled),
            1 <= Sq <= 16. The keys and values of its tokens are in the cache already.
        key: the cache, (B, S, Hkv, Dqk), dtype of query or float8_e4m3fn; with block_table
            (pages, page_size, Hkv, Dqk). H must be a multiple of Hkv: query head h reads key/value
            head h // (H / Hkv). If a mesh shards S, or pages, each device attends to its part, and
            the results are merged.
        value: like key, with head dim Dv.
        kv_lengths: the number of keys of each sequence, including its Sq new ones: (B,) integers.
            If it is below Sq, the first query tokens are padding and attend to nothing.
        block_table: the pages of each sequence, (B, max_blocks) integers: keys n * page_size to
            (n + 1) * page_size - 1 of sequence b are in page block_table[b, n]. Entries beyond a
            length may have any value; sequences may share pages, and pages may be in any order.
        key_scale: what the keys of a float8_e4m3fn cache are multiplied by: a positive number or an
            array of floats, of shape () for all, (Hkv,) for each head, (B, Hkv) for each sequence
            and head, or with block_table (pages, Hkv) for each page and head. None: 1.
        value_scale: the same for the values.
        kv_starts: the index of the first key to which each sequence, (B,), or each query token,
            (B, Sq), attends: for left padding, or for chunked attention (kv_starts = p //
            size * size). Integers.
        window: (left, right), each a Python integer of at least 0, or None for no limit: a query
            token attends to the keys from p - left to p + right, as in `sliding_window(left,
            right)`. A `right` above 0 needs causal=False.
        causal: whether a query token attends only to keys up to its position. Otherwise, all query
            tokens of a sequence attend to all of its keys, including those of later query tokens.
        draft_mask: which of the sequence's query tokens each query token attends to, in place of
            those up to its own: (Sq, Sq) or (B, Sq, Sq) booleans, [b, i, j] for query token i and
            the key of query token j. For a tree of drafts, these are its ancestors and itself. All
            keys before the query tokens are attended, from kv_starts on. A window counts positions
            along the paths: a query token that attends to n of the query tokens is at position
            kv_lengths - Sq + n - 1.
        scale: the factor of the scores, a finite Python or numpy number. None: 1 / sqrt(Dqk).
        soft_cap: the cap of the scores, which become soft_cap * tanh(score / soft_cap) (Gemma). A
            positive Python or numpy number.
        sinks: one more logit for each query head in the softmax's denominator, without a value
            (gpt-oss): (H,) of any float dtype.
        precision: how products of float32 operands are computed, as in `flash_attention`: on GPUs
            in float32 for "highest" and presets above TF32, otherwise in TF32. None: the value of
            `jax.default_matmul_precision`.
        return_lse: also return the log-sum-exp (natural logarithm) of each query token's scores. It
            includes the sink.
        implementation: what runs. None: the CUDA kernels when lowered for CUDA, blockwise XLA
            elsewhere; "cuda": the CUDA kernels or an error; "xla": blockwise XLA everywhere. The
            kernels take bfloat16 and float16 with head dims up to 512, and float32 with head dims
            up to 256, all multiples of 8. With a float8_e4m3fn cache they take queries in bfloat16
            and float16 with head dims up to 256, multiples of 16.

    Returns:
        out, (B, Sq, H, Dv) in query's dtype, or (out, lse), where lse is (B, H, Sq) in float32
        (float64 for float64). A query token that attends to nothing has out 0 and lse -inf, even
        with a sink. Values are unknown when tracing, so an invalid value makes only that query
        token's result NaN: a range that ends beyond the cache (a length over S, or over
        max_blocks * page_size), or a key whose block_table entry is not a page (below 0, or at
        least `pages`).

    Raises:
        ValueError: wrong shapes or dtypes, or numbers out of range.
        NotImplementedError: when differentiated; when lowered for CUDA without a kernel for the
            dtype or head dims; with implementation="cuda", when lowered for another platform.

    Examples:
        A decoding step over a paged cache. The caches are donated, so they are written in place:

        >>> @functools.partial(jax.jit, donate_argnames=("key_cache", "value_cache"))
        ... def step(query, key, value, key_cache, value_cache, block_table, lengths):
        ...     # query (B, 1, H, D); key, value (B, 1, Hkv, D)
        ...     row, place = jnp.arange(len(lengths))[:, None], lengths[:, None]
        ...     write = functools.partial(packax.kv_cache.write, block_table=block_table)
        ...     key_cache = write(key_cache, key, row, place)
        ...     value_cache = write(value_cache, value, row, place)
        ...     out = packax.decode_attention(
        ...         query, key_cache, value_cache, lengths + 1, block_table=block_table
        ...     )
        ...     return out, key_cache, value_cache, lengths + 1
    """
    query, key, value = as_arrays(query=query, key=key, value=value)
    lengths = as_integers("kv_lengths", kv_lengths)
    table = None if block_table is None else as_integers("block_table", block_table)
    check_tensors(query, key, value, _AXES, paged=table is not None)
    _check_rows(query, lengths)
    check_sequences(key, table, query.shape[0], "query")
    check_decode_types(query, key, value, paged=table is not None)
    scales = checked_scales(key, key_scale, value_scale, paged=table is not None)
    spec = checked_spec(query, scale, soft_cap, precision, implementation)
    return_lse, causal = flag("return_lse", return_lse), flag("causal", causal)
    limits = checked_window(window, causal)
    batch, q_len, heads, _ = query.shape
    mask = None if draft_mask is None else checked_drafts(draft_mask, batch, q_len, causal)
    starts = _checked_starts(kv_starts, batch, q_len)
    ends = jnp.maximum(lengths, 0)
    position, drafts = ends[:, None] + jnp.arange(-q_len, 0, dtype=jnp.int32)[None], None
    if mask is not None:
        first = ends - q_len
        drafts = Drafts.of(mask, first, starts, limits[0], typed_axes(query)[0])
        position, ends = drafts.position, jnp.maximum(first, 0)
    lo, hi = row_ranges(position, ends[:, None], starts, *limits, causal)
    operands = Operands(require_device_info(query), key, value, kv_start=lo, kv_end=hi)._replace(
        block_table=table, key_scale=scales[0], value_scale=scales[1],
        sinks=checked_sinks(sinks, query),
    )  # fmt: skip
    operands, drafts = vary_together(operands, drafts)
    if batch == 0 or q_len == 0:
        out = jnp.zeros((batch, q_len, heads, value.shape[3]), query.dtype)
        lse = jnp.zeros((batch, heads, q_len), accumulator(query.dtype))
        out, lse, _ = vary_together(out, lse, operands)
        return (out, lse) if return_lse else out
    call = operands if drafts is None else operands._replace(sinks=None)
    out, lse = decode_p.bind(*call.leaves, spec=spec, names=call.names)
    if drafts is not None:
        out, lse = with_drafts(spec, operands, drafts, (out, lse))
    return (out, lse) if return_lse else out


def checked_spec(
    query: jax.Array, scale: Any, soft_cap: Any, precision: Any, implementation: Any
) -> AttentionSpec:
    """The static part of a call."""
    options = checked_options(soft_cap=soft_cap, precision=precision, implementation=implementation)
    if isinstance(scale, (jax.Array, np.ndarray)):
        raise ValueError(
            "scale must be a Python or numpy number, known when tracing, but is "
            f"{described(scale)}: multiply query by it, and pass scale=1.0"
        )
    factor: Any = checked_scale(scale, query)
    return AttentionSpec(scale=factor, **options)


def checked_scales(
    key: jax.Array, key_scale: Any, value_scale: Any, *, paged: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Both scales in float32, as (1, Hkv) or as (B or pages, Hkv); None without FP8."""
    given = {"key_scale": key_scale, "value_scale": value_scale}
    if not is_fp8(key):
        for name, scale in given.items():
            if scale is not None:
                raise ValueError(f"{name} is for caches in {FP8}, but key is {key.dtype}: omit it")
        return None, None
    rows, _, heads, _ = key.shape
    arrays = [checked_kv_scale(*named, rows, heads, paged=paged) for named in given.items()]
    if any(x.shape[0] != 1 for x in arrays):
        arrays = [jnp.broadcast_to(x, (rows, heads)) for x in arrays]
    return arrays[0], arrays[1]


def checked_kv_scale(name: str, given: Any, rows: Any, heads: int, *, paged: bool) -> jax.Array:
    """The checked scale as (1, heads) or (rows, heads) in float32. None means ones."""
    scale = as_array(name, 1.0 if given is None else given)
    if not jnp.issubdtype(scale.dtype, jnp.floating) and scale.ndim:
        raise ValueError(f"{name} must be a number or an array of floats, but is {scale.dtype}")
    if scale.shape not in ((), (heads,), (rows, heads)):
        each = "page" if paged else "sequence"
        raise ValueError(
            f"{name} must have shape (), ({heads},), one for each head of the cache, or "
            f"{(rows, heads)}, one for each {each} and head, but has {scale.shape}"
        )
    scale = scale.astype(jnp.float32)
    return scale if scale.ndim == 2 else jnp.broadcast_to(scale, (1, heads))


def _checked_starts(kv_starts: Any, batch: Any, q_len: int) -> jax.Array | None:
    """The first key of each row, (B, 1) or (B, Sq)."""
    if kv_starts is None:
        return None
    starts = as_integers("kv_starts", kv_starts)
    shapes = (batch,), (batch, q_len)
    if starts.shape not in shapes:
        raise ValueError(
            f"kv_starts must have shape {shapes[0]}, one per sequence, or {shapes[1]}, one per "
            f"row, but has {starts.shape}"
        )
    return starts[:, None] if starts.ndim == 1 else starts


def row_ranges(
    position: jax.Array,
    lengths: jax.Array,
    starts: jax.Array | None,
    left: int | None,
    right: int | None,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Each row attends to the keys lo <= j < hi; empty rows have any lo >= hi. Rows at these
    positions, below 0 for padding, in sequences of these lengths, at least 0. `starts`: their first
    keys."""
    if causal:
        right = 0
    hi = jnp.broadcast_to(lengths, position.shape)
    if right is not None:  # this comparison does not overflow int32
        hi = jnp.where(position < lengths - 1 - right, position + 1 + right, hi)
    hi = jnp.where(position < 0, 0, hi)
    lo = jnp.zeros_like(position)
    if starts is not None:
        lo = jnp.maximum(lo, starts)
    if left is not None:
        lo = jnp.maximum(lo, position - min(left, INT_MAX // 2))
    return lo, hi


def checked_drafts(draft_mask: Any, batch: Any, size: int, causal: bool) -> jax.Array:
    """The checked draft_mask as (1 or batch, size, size)."""
    mask = as_array("draft_mask", draft_mask)
    shapes = (size, size), (batch, size, size)
    if mask.dtype != bool or mask.shape not in shapes:
        raise ValueError(
            f"draft_mask must be an array of booleans of shape {shapes[0]} or {shapes[1]}, from "
            f"query tokens to query tokens, but is {described(mask)}"
        )
    if not causal:
        raise ValueError(
            "draft_mask says to which of the new tokens each attends, but causal=False does, too: "
            "omit it"
        )
    return mask if mask.ndim == 3 else mask[None]


def checked_window(window: Any, causal: bool) -> tuple[int | None, int | None]:
    """The checked (left, right), clipped to INT_MAX."""
    if window is None:
        return None, None
    sizes = window if isinstance(window, (tuple, list)) and len(window) == 2 else (-1, -1)
    if not all(x is None or (_is_integer(x) and x >= 0) for x in sizes):
        raise ValueError(
            "window must be None or (left, right), each an integer of at least 0, known when "
            f"tracing, or None for no limit, but is {window!r}"
        )
    left, right = (None if x is None else min(int(x), INT_MAX) for x in sizes)
    if causal and right:
        raise ValueError(
            f"window={window} lets a query attend to {right} keys after itself, which causal=True "
            f"forbids: pass ({left}, 0), or causal=False"
        )
    return left, right


def _is_integer(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def as_integers(name: str, x: Any) -> jax.Array:
    """x as int32. Values that do not fit saturate, which puts them beyond any cache."""
    if not isinstance(x, jax.Array):
        x = numpy_array(name, x)  # jax would truncate 64-bit values
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be an array of integers, but is {x.dtype}")
    limits = jnp.iinfo(x.dtype)
    if limits.max > INT_MAX:
        x = x.clip(max(limits.min, -INT_MAX - 1), INT_MAX)
    return jnp.asarray(x.astype(np.int32))


def check_tensors(
    query: jax.Array, key: jax.Array, value: jax.Array, axes: str, *, paged: bool
) -> None:
    """Checks tensors and what they have in common. `axes`: the names of the axes of query."""
    cache = "(pages, page size, heads, dim)" if paged else "(batch, length, heads, dim)"
    ranks = {"query": axes.count(",") + 1, "key": 4, "value": 4}
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.ndim != ranks[name]:
            shape = axes if name == "query" else cache
            raise ValueError(f"{name} must have shape {shape}, not {x.shape}")
        # An empty batch and an empty query are accepted, and give an empty result.
        empty = name == "query" or not (paged or x.shape[0])
        if 0 in (x.shape[-2:] if empty else x.shape):
            raise ValueError(f"{name} must not be empty, but has shape {x.shape}")
        dtypes = DTYPES if name == "query" else (*DTYPES, FP8)
        if str(x.dtype) not in dtypes:
            raise ValueError(f"{name} must be one of {', '.join(dtypes)}, but is {x.dtype}")
    if not (key.dtype == value.dtype and (key.dtype == query.dtype or is_fp8(key))):
        raise ValueError(
            f"query, key and value must have one dtype, or key and value {FP8}, but have "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"value must have the shape of key, {key.shape[:3]}, and then a head dim, but "
            f"has {value.shape}"
        )
    heads, qk_dim = query.shape[-2:]
    if heads % key.shape[2]:
        raise ValueError(
            f"the heads of query must be a multiple of those of the caches, but there are {heads} "
            f"and {key.shape[2]}: query has shape {query.shape}, whose axes are {axes}, and key "
            f"{key.shape}, whose axes are {cache}"
        )
    if qk_dim != key.shape[3]:
        raise ValueError(f"key must have the head dim of query, {qk_dim}, but has {key.shape[3]}")


def check_sequences(
    key: jax.Array, table: jax.Array | None, batch: Any, of: str, name: str = "block_table"
) -> None:
    """Checks the number of sequences, `batch`, which is that of `of`, and the room of each."""
    if table is None:
        if key.shape[0] != batch:
            raise ValueError(
                f"key has batch size {key.shape[0]}, but {of} has {batch}; if key holds pages, "
                f"pass {name}="
            )
        capacity = key.shape[1]
    else:
        if table.ndim != 2 or table.shape[0] != batch or table.shape[1] == 0:
            raise ValueError(
                f"{name} must have shape ({batch}, blocks), the batch of {of} first, but has "
                f"{table.shape}"
            )
        capacity = table.shape[1] * key.shape[1]
    if not is_symbolic(capacity) and capacity > MAX_LENGTH:
        raise ValueError(
            f"a sequence may have room for at most {MAX_LENGTH} keys, but has room for {capacity}"
        )


def _check_rows(query: jax.Array, lengths: jax.Array) -> None:
    batch, rows = query.shape[:2]
    if is_symbolic(rows):
        raise ValueError(f"query must have a known number of tokens per sequence, but has {rows}")
    if rows > MAX_ROWS:
        raise ValueError(
            f"query must have 1 to {MAX_ROWS} tokens per sequence, but has {rows}: for more, use "
            f"ragged_paged_attention. query has shape {query.shape}, whose axes are {_AXES}"
        )
    if lengths.shape != (batch,):
        raise ValueError(
            f"kv_lengths must have shape ({batch},), the batch of query, but has {lengths.shape}"
        )
