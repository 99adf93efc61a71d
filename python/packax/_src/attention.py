"""`flash_attention`: the user's request checked once, and defaults."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.autodiff import attention
from packax._src.context.shard import Call
from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import AttentionMask
from packax._src.core.precision import checked_precision
from packax._src.core.shapes import is_symbolic
from packax._src.core.sharding import (
    AttentionSharding,
    HeadGroups,
    Layout,
    check_tensors,
    checked_head_groups,
    layout_of,
)
from packax._src.masks.build import create_attention_mask
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.lengths import batch_of, check_lengths
from packax._src.masks.messages import described, instead_of_array
from packax._src.ops.primitives import Implementation, check_implementation
from packax._src.ops.score_mods import Alibi, checked_scale, checked_soft_cap, largest, scores_of

_MOST_HEADS = 256  # of a model, as far as any is known
_MANY_HEADS, _FEW_TOKENS = 64, 16
_DTYPES = ("bfloat16", "float16", "float32", "float64")


@overload
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: AttentionMask | MaskExpression,
    *,
    scale: Any = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Alibi | None = None,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    deterministic: bool = False,
    precision: Any = None,
    implementation: Implementation | None = None,
    sharding: AttentionSharding | None = None,
    gather_head_groups: int | tuple[int, ...] | None = None,
    checkpoint_name: str | None = None,
) -> jax.Array: ...
@overload
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: AttentionMask | MaskExpression,
    *,
    scale: Any = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Alibi | None = None,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    deterministic: bool = False,
    precision: Any = None,
    implementation: Implementation | None = None,
    sharding: AttentionSharding | None = None,
    gather_head_groups: int | tuple[int, ...] | None = None,
    checkpoint_name: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: AttentionMask | MaskExpression,
    *,
    scale: Any = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Alibi | None = None,
    return_lse: bool = False,
    return_max_logits: Literal[True],
    deterministic: bool = False,
    precision: Any = None,
    implementation: Implementation | None = None,
    sharding: AttentionSharding | None = None,
    gather_head_groups: int | tuple[int, ...] | None = None,
    checkpoint_name: str | None = None,
) -> tuple[jax.Array, ...]: ...
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: AttentionMask | MaskExpression,
    *,
    scale: Any = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    bias: Alibi | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    deterministic: bool = False,
    precision: Any = None,
    implementation: Implementation | None = None,
    sharding: AttentionSharding | None = None,
    gather_head_groups: int | tuple[int, ...] | None = None,
    checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Exact softmax attention, softmax(logits where mask) @ value, in O(S) memory.

    The logits are `scale * query @ key^T`, soft-capped, with a bias and a sink on request.

    The algorithm is FlashAttention-2 (arXiv 2307.08691) over row ranges: blocks of keys that no
    row of a tile attends are never visited, forward or backward. Differentiable in query, key,
    value, sinks, slopes of the bias and an array's scale; softmax and all sums are float32
    (float64 for float64 operands).

    Args:
        query: (B, Sq, H, Dqk) bfloat16, float16 or float32 (float64 where jax has it enabled).
        key: (B, Skv, Hkv, Dqk), dtype of query. H must be a multiple of Hkv: query head h reads
            key/value head h // (H / Hkv).
        value: (B, Skv, Hkv, Dv), dtype of query.
        mask: a mask from `create_attention_mask`, built once and used by every layer, or an
            expression such as `causal() & documents(segment_ids)`, built on the spot. Its batch
            is B, or 1 for one mask for all.
        scale: of any sign, or 0; a finite Python or numpy number, or an array of shape () and a
            float dtype, traced or not, in which it is differentiable. None: 1 / sqrt(Dqk).
        soft_cap: a Python or numpy number from 1e-30 to 1e30: logits become
            soft_cap * tanh(logits / soft_cap) (Gemma 2, arXiv 2408.00118). None: no cap.
        sinks: (H,) of any float dtype: a logit per query head that stands in the softmax's
            denominator beside the logits, and has no value (gpt-oss). Differentiable.
        bias: `alibi(slopes)`: minus the slope of the head times the distance of row and key,
            added behind the soft cap. No array of Sq x Skv is made.
        return_lse: return also the log-sum-exp (natural logarithm) of each row's logits. It is
            differentiable, and counts the sink.
        return_max_logits: return also the largest logit of each head, as it enters the softmax,
            over the attended pairs (for QK-clip, arXiv 2507.20534). It has no gradient, as from
            `jax.lax.stop_gradient`.
        deterministic: True: bit-identical gradients from run to run; on Hopper the backward then
            uses other kernels (slower). False: on Hopper, parts of the gradient of query
            are summed in any order, so it may differ by rounding. The results, the gradients of
            key and value, and all that runs on other GPUs or as XLA are bit-identical either way.
        precision: of the products of float32 operands, as in jax.numpy.matmul: a
            `jax.lax.Precision`, the name of one, or anything else that `jax.lax.dot` takes for
            float32. On GPUs "highest" means float32 and less means TF32, 11 bits of each operand,
            also in the gradients. None: what `jax.default_matmul_precision` says, by default
            TF32. For bfloat16 and float16 it changes nothing in the kernels.
            docs/guide/numerics.md.
        implementation: None: the CUDA kernels where this is lowered for CUDA, blockwise XLA
            elsewhere; "cuda": the CUDA kernels or an error; "xla": blockwise XLA everywhere.
        sharding: an `AttentionSharding`, on the mesh that `jax.set_mesh` set: the batch, the query
            rows and the heads are then split over it, and keys and values are gathered along the
            context axes. Results and gradients are sharded as query, key and value are. Needed
            beside an expression only: a mask carries the sharding that it was built with.
            docs/guide/context_parallelism.md.
        gather_head_groups: with context parallelism, keys and values are gathered by this many
            groups of key/value heads, or by groups of these sizes: one group while the attention of
            the one before runs. The first gather and the last reduce-scatter stay in the open.
            None: 1 on two ranks, where nothing is won, else what was found best for each pass.
            No effect where nothing is gathered; results are the same.
        checkpoint_name: one more name for both results, for `jax.checkpoint` policies of a program
            that has names of its own.

    Returns:
        out, (B, Sq, H, Dv) in query's dtype; with return_lse or return_max_logits a tuple: out,
        then lse (B, H, Sq), then max_logits (B, H), -inf where nothing is attended, both float32
        (float64 for float64). Inside a `shard_map` of the caller's, max_logits of all rows needs
        `sharding`. A row that attends nothing has out 0, lse -inf (also with a sink) and gradients
        0, and the cotangents that come in for it are ignored. An empty batch, no query rows or no
        keys give empty results, or those of rows that attend nothing.

    Raises:
        ValueError: shapes, dtypes, scale, soft_cap, sinks, bias, precision, mask, implementation or sharding that are not as above,
            or sizes that the mesh does not divide.
        NotImplementedError: when lowered for CUDA, no kernel for the dtype or head dims (there
            are some for bfloat16, float16 and float32, and all multiples of 8 up to 256); with
            implementation="cuda", when lowered for another platform.

    Under `jax.checkpoint`, the policy `save_only_these_names("packax_out", "packax_lse")`
    (`packax.CHECKPOINT_NAMES`) keeps the results, so that the backward pass does not run
    attention forward again.

    >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    >>> out = packax.flash_attention(query, key, value, mask)
    """
    query, key, value = (
        x if isinstance(x, jax.Array) else jnp.asarray(x) for x in (query, key, value)
    )
    layout = _layout(mask, sharding)
    gather_head_groups = checked_head_groups(gather_head_groups)
    _check_tensors(query, key, value, layout, gather_head_groups)
    check_implementation(implementation)
    for name, flag in (
        ("return_lse", return_lse),
        ("return_max_logits", return_max_logits),
        ("deterministic", deterministic),
    ):
        if not isinstance(flag, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False, but is {flag!r}")
    _, rows, _, qk_dim = query.shape
    q_len, kv_len = rows, key.shape[1]
    if layout is not None:  # of whole sequences
        q_len *= layout.outside(layout.context)
        kv_len *= layout.outside(layout.kv_context)
    if not isinstance(checkpoint_name, (str, type(None))):
        raise ValueError(f"checkpoint_name must be None or a string, but is {checkpoint_name!r}")
    precision = checked_precision(precision)
    factor = 1 / math.sqrt(qk_dim) if scale is None else checked_scale(scale)
    soft_cap = checked_soft_cap(soft_cap)
    _check_axes(mask, query.shape, key.shape, q_len, kv_len)
    if isinstance(mask, MaskExpression):
        if layout is None:
            batch_of(mask, query.shape[0], "query")
        mask = create_attention_mask(
            mask, q_len=q_len, kv_len=kv_len, sharding=sharding, implementation=implementation
        )
    _check_mask(mask, query.shape, key.shape, q_len, kv_len, layout)
    built = mask.with_batch()

    if not isinstance(factor, jax.Array):
        query, factor = _with_positive_scale(query, factor)
    scores, places = scores_of(query, q_len, kv_len, factor, sinks, bias, layout)
    if 0 in query.shape[:2] or 0 in key.shape[:2]:
        return _of_nothing(query, key, value, bool(return_lse), bool(return_max_logits))
    scores, query, key, value, built, places = vary_together(
        scores, query, key, value, built, places
    )
    call = Call(
        1.0 if isinstance(factor, jax.Array) else factor,
        bool(return_lse),
        bool(deterministic),
        implementation,
        layout,
        checkpoint_name,
        soft_cap=soft_cap,
        precision=precision,
        return_max_logits=bool(return_max_logits),
        gather_head_groups=gather_head_groups,
    )
    results = list(attention(call, (query, key, value, scores), built, places))
    if return_max_logits:
        results[2] = largest(results[2], layout)
    if not return_lse:
        del results[1]
    return tuple(results) if len(results) > 1 else results[0]


def _of_nothing(
    query: jax.Array, key: jax.Array, value: jax.Array, return_lse: bool, return_max_logits: bool
) -> jax.Array | tuple[jax.Array, ...]:
    """Of an empty batch, no query rows, or no keys: no row attends anything."""
    batch, rows, heads, _ = query.shape
    real = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    results = [jnp.zeros((batch, rows, heads, value.shape[3]), query.dtype)]
    if return_lse:
        results.append(jnp.full((batch, heads, rows), -jnp.inf, real))
    if return_max_logits:
        results.append(jnp.full((batch, heads), -jnp.inf, real))
    results = list(vary_together(*results, query, key, value)[: len(results)])
    return tuple(results) if len(results) > 1 else results[0]


def _check_tensors(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layout: Layout | None,
    groups: HeadGroups,
) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (batch, length, heads, dim), not {x.shape}")
        if 0 in x.shape[2:]:
            raise ValueError(
                f"{name} must have heads and a head dim of 1 at least, but has shape {x.shape}"
            )
        if str(x.dtype) not in _DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(_DTYPES)}, but is {x.dtype}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "query, key and value must have one dtype, but have "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    for name in ("key", "value"):
        if tensors[name].shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} has batch size {tensors[name].shape[0]}, but query has {query.shape[0]}"
            )
    for axis, what in ((1, "length"), (2, "number of heads")):
        if key.shape[axis] != value.shape[axis]:
            raise ValueError(
                f"value must have the {what} of key, {key.shape[axis]}, but has {value.shape[axis]}"
            )
    heads, kv_heads = query.shape[2], key.shape[2]
    if layout is not None:
        heads, kv_heads = (
            n * layout.outside(axes)
            for n, axes in ((heads, layout.heads), (kv_heads, layout.kv_heads))
        )
    if heads % kv_heads:
        raise ValueError(
            f"the heads of query must be a multiple of those of key and value, but there are "
            f"{heads} and {kv_heads}{_axes(query.shape, key.shape)}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"key must have the head dim of query, {query.shape[3]}, but has {key.shape[3]}"
        )
    if layout is not None:
        check_tensors(layout, query, key, groups)


def _axes(query: tuple[int, ...], key: tuple[int, ...]) -> str:
    return f". query has shape {query} and key {key}, whose axes are (batch, length, heads, dim)"


def _check_axes(
    mask: Any, query: tuple[int, ...], key: tuple[int, ...], q_len: int, kv_len: int
) -> None:
    """An error where lengths and the expression's disagree, a warning where nothing says the length
    and the axes look like (batch, heads, length, dim)."""
    known = False
    if isinstance(mask, MaskExpression):
        own = check_lengths(mask)
        if own[0] not in (None, q_len) or own[1] not in (None, kv_len):
            try:
                check_lengths(mask, q_len, kv_len, said=("query has", "key has"))
            except ValueError as error:  # nobody gave a q_len
                raise ValueError(f"{error}{_axes(query, key)}") from None
        known = own[0] is not None
    elif isinstance(mask, AttentionMask):
        known = mask.element_test > 0
    sizes = (*query[1:3], *key[1:3])
    if not known and not any(map(is_symbolic, sizes)) and _look_swapped(*sizes):
        warnings.warn(
            f"query and key may have their lengths and heads swapped{_axes(query, key)}. For "
            "(batch, heads, length, dim), as PyTorch has it, call with x.swapaxes(1, 2)",
            stacklevel=3,
        )


def _look_swapped(rows: int, heads: int, keys: int, kv_heads: int) -> bool:
    """More heads than any model has, or as many as large ones for a few tokens, or of swapped axes
    with grouped heads: fewer keys than rows, and as many heads of keys as of queries."""
    longest = max(rows, keys)
    if longest >= heads:
        return False
    grouped = 0 < keys < rows and rows % keys == 0 and heads == kv_heads
    return heads > _MOST_HEADS or (heads > _MANY_HEADS and longest < _FEW_TOKENS) or grouped


def _with_positive_scale(query: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """The kernels take the largest score before they scale it: a sign belongs into the query.

    At scale 0 scores are 0 whatever query holds, and so are the gradients of query and key: those
    of a query of zeros. So they are at a scale that is 0 beside the smallest normal number.
    """
    real = np.float64 if query.dtype == jnp.float64 else np.float32
    if abs(scale) < float(np.finfo(real).tiny):
        return jnp.zeros_like(query), 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def _check_mask(
    mask: Any,
    query: tuple[int, ...],
    key: tuple[int, ...],
    q_len: int,
    kv_len: int,
    layout: Layout | None,
) -> None:
    batch, rows, heads, _ = query
    if not isinstance(mask, AttentionMask):
        raise ValueError(
            "mask must come from create_attention_mask, or be an expression such as "
            f"causal() & documents(segment_ids), but is {described(mask)}{instead_of_array(mask)}"
        )
    if (mask.q_len, mask.kv_len) != (q_len, kv_len):
        raise ValueError(
            f"mask was built for {mask.q_len} query rows and {mask.kv_len} keys, but query has "
            f"{q_len} and key {kv_len}{_axes(query, key)}"
        )
    shards = 1 if layout is None else layout.size(layout.context)
    if mask.shards != shards:
        raise ValueError(
            f"mask was built for query rows in {mask.shards} pieces, but the context axes of its "
            f"sharding now have size {shards}: build it on the mesh that it is used on"
        )
    shape = jnp.shape(mask.q_lo)
    if shape == (rows,) and batch > 1:
        raise ValueError(
            f"mask has row ranges of shape {shape}, without a batch axis, as a vmap over the mask "
            f"leaves it, but query has batch size {batch}: map query over its batch too, or give the "
            "mask a batch of one, jax.tree.map(lambda x: x[None], mask)"
        )
    if len(shape) == 2 and shape[0] == rows != batch:
        raise ValueError(
            f"mask was built for batch size {shape[0]}, the length of query, but query has {batch}: "
            f"an array of shape ({rows},) of prefix or offset= is one for each row of the batch. For "
            f"lengths of each token give (1, {rows})"
        )
    if shape != (rows,) and (len(shape) != 2 or shape[0] not in (1, batch) or shape[1] != rows):
        raise ValueError(
            f"mask has row ranges of shape {shape}, but query needs ({batch}, {rows}) or "
            f"(1, {rows}), one mask for all: was it built for another batch, or cut? Inside of a "
            "vmap over the batch map the mask too, with in_axes=mask.vmap_axes()"
        )
    if mask.map_bits is not None and jnp.shape(mask.map_bits)[-3] not in (1, heads):
        raise ValueError(
            f"mask has a block_map of {jnp.shape(mask.map_bits)[-3]} heads, but query has {heads}: "
            "give it one for each head of query, or one for all"
        )


def _layout(mask: Any, sharding: AttentionSharding | None) -> Layout | None:
    """The layout that the mask was built with, or that of sharding= beside an expression."""
    if not isinstance(mask, AttentionMask):
        return None if sharding is None else layout_of(sharding)
    layout = None if mask.sharding is None else layout_of(mask.sharding)
    if sharding is None:
        return layout
    asked = layout_of(sharding)
    if mask.sharding is None and not asked.context:
        return asked  # such a mask is the same with and without
    if asked != layout:
        raise ValueError(
            f"sharding must be that of the mask, {mask.sharding}, but is {sharding}: give it to "
            "create_attention_mask, and leave it out here"
        )
    return layout
