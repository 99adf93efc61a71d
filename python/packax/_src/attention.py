"""`flash_attention`: the user's request checked once, and defaults."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from packax._src.autodiff import attention
from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import AttentionMask
from packax._src.core.precision import checked_precision
from packax._src.core.sharding import (
    AttentionSharding,
    checked_head_groups,
    layout_of,
    shown,
    with_types,
)
from packax._src.core.spec import AttentionSpec
from packax._src.masks.build import create_attention_mask
from packax._src.masks.expressions import MaskExpression, batch_of
from packax._src.ops.dropout import check_key, checked_rate, rows_of, streams_of
from packax._src.ops.primitives import Implementation, check_implementation
from packax._src.ops.row_sums import log_sum_exp
from packax._src.ops.score_mods import (
    Alibi,
    NonDiffOperands,
    bias_dims,
    largest,
)
from packax._src.requests import (
    as_array,
    check_axes,
    check_bias_beside,
    check_mask,
    check_request,
    checked_scale,
    checked_soft_cap,
    validate_score_params,
)

if TYPE_CHECKING:

    class _Options(TypedDict, total=False):
        """What does not change the kind of result."""

        scale: ArrayLike | None
        soft_cap: float | None
        sinks: ArrayLike | None
        bias: Alibi | ArrayLike | None
        dropout_rate: float | None
        dropout_key: ArrayLike | None
        deterministic: bool
        precision: jax.lax.PrecisionLike
        implementation: Implementation | None
        sharding: AttentionSharding | None
        gather_head_groups: int | tuple[int, ...] | None
        checkpoint_name: str | None

    Mask = AttentionMask | MaskExpression


@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, mask: Mask, *,
    return_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...  # fmt: skip
@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, mask: Mask, *,
    return_lse: Literal[True], return_max_logits: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, mask: Mask, *,
    return_lse: bool = False, return_max_logits: Literal[True], **options: Unpack[_Options],
) -> tuple[jax.Array, ...]: ...  # fmt: skip
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: AttentionMask | MaskExpression,
    *,
    scale: ArrayLike | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    bias: Alibi | ArrayLike | None = None,
    dropout_rate: float | None = None,
    dropout_key: ArrayLike | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    deterministic: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
    sharding: AttentionSharding | None = None,
    gather_head_groups: int | tuple[int, ...] | None = None,
    checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Exact softmax attention, softmax(logits where mask) @ value, in O(S) memory.

    The logits are `scale * query @ key^T`, soft-capped, with a bias and a sink on request.

    The algorithm is FlashAttention-2 (arXiv 2307.08691) over row ranges: blocks of keys that no
    row of a tile attends are never visited, forward or backward. Differentiable in query, key,
    value, sinks, slopes or array of the bias and an array's scale; softmax and all sums are float32
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
        bias: added to the logits behind the soft cap. `alibi(slopes)`: minus the slope of the head
            times the distance of row and key; no array of Sq x Skv is made. Or an array, (1 or B,
            1 or H, 1 or Sq, Skv) of any float dtype, read block by block where the mask attends,
            and never expanded: differentiable, its gradient 0 where nothing attends. Where a plan
            permutes the sequence, its rows are those of query, its columns stay in order. An entry
            may be -inf.
        dropout_rate: a Python or numpy number of at least 0 and less than 1: the share of the
            softmax's probabilities that becomes 0; the others are divided by 1 - dropout_rate.
            The log-sum-exp and the largest logits are of all. 0 or None: none.
        dropout_key: the key of jax.random whose bits decide that, for dropout_rate above 0: one
            for each layer and step. Bits depend on it and on the indices of batch row, head, row
            and key alone, so that all implementations, meshes and passes drop the same ones.
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
            None: 1 on two ranks, where nothing is won, and where a plan of kind "local" leaves at
            least as many rows private as shared, else what was found best for each pass.
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
        ValueError: shapes, dtypes, scale, soft_cap, sinks, bias, dropout, precision, mask,
            implementation or sharding that are not as above, or sizes that the mesh does not
            divide.
        NotImplementedError: when lowered for CUDA, no kernel for the dtype or head dims (there
            are some for all multiples of 8 up to 512, of float32 up to 256); with
            implementation="cuda", when lowered for another platform. A bias that is an array, or
            dropout, above head dim 128 there; beside a plan of kind "local"; and dropout beside
            permuted_keys=False.

    Under `jax.checkpoint`, the policy `save_only_these_names("packax_out", "packax_lse")`
    (`packax.CHECKPOINT_NAMES`) keeps the results, so that the backward pass does not run
    attention forward again.

    Examples:
        >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
        >>> out = packax.flash_attention(query, key, value, mask)
    """
    query, key, value = (
        as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    sharding = _sharding(mask, sharding, query, key, value)
    layout = None if sharding is None else layout_of(sharding)
    if gather_head_groups is not None:
        gather_head_groups = checked_head_groups(gather_head_groups)
    check_request(query, key, value, layout, gather_head_groups)
    if layout is not None:
        query, key, value = layout.place_tensors(query, key, value)
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
    check_axes(mask, query.shape, key.shape, q_len, kv_len)
    if isinstance(mask, MaskExpression):
        if layout is None:
            batch_of(mask, query.shape[0], "query")
        mask = create_attention_mask(
            mask, q_len=q_len, kv_len=kv_len, sharding=sharding, implementation=implementation
        )
    check_mask(mask, query.shape, key.shape, q_len, kv_len, layout)
    built = mask.with_batch()
    if layout is not None:
        dims = built.specs(lambda *dims: dims, layout.batch, layout.context, layout.heads)
        built = jax.tree.map(lambda x, of: layout.place(x, *of), built, dims)
    if dropout_rate is None and dropout_key is not None:
        raise ValueError(
            "dropout_key was given without dropout_rate: give both, a rate of 0 for none"
        )
    threshold = 0 if dropout_rate is None else checked_rate(dropout_rate)
    if threshold:
        check_key(dropout_key)

    if not isinstance(factor, jax.Array):
        query, factor = _with_positive_scale(query, factor)
    scores, positions = validate_score_params(
        query, q_len, kv_len, factor, sinks, bias, layout, for_sm90=not threshold
    )
    if scores.bias is not None:
        check_bias_beside(mask)
    fixed = NonDiffOperands(positions)
    if 0 in query.shape[:2] or 0 in key.shape[:2]:
        return _empty_result(query, key, value, bool(return_lse), bool(return_max_logits))
    if threshold:
        fixed = fixed._replace(
            streams=streams_of(dropout_key, query, layout), rows=rows_of(built, rows, layout)
        )
    scores, query, key, value, built, fixed = vary_together(scores, query, key, value, built, fixed)
    spec = AttentionSpec(
        scale=1.0 if isinstance(factor, jax.Array) else factor,
        soft_cap=soft_cap,
        precision=precision,
        dropout_threshold=threshold,
        max_logits=bool(return_max_logits),
        deterministic=bool(deterministic),
        implementation=implementation,
        layout=layout,
        gather_head_groups=gather_head_groups,
        bias_dims=() if layout is None or scores.bias is None else bias_dims(layout, scores.bias),
        checkpoint_name=checkpoint_name,
    )
    results = list(attention(spec, (query, key, value, scores), built, fixed))
    if return_max_logits:
        results[2] = largest(results[2], layout)
    if return_lse:
        results[1] = log_sum_exp(results[1])
    else:
        del results[1]
    return tuple(results) if len(results) > 1 else results[0]


def _empty_result(
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


def _with_positive_scale(query: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """The kernels take the largest score before they scale it: a sign belongs into the query.

    At scale 0 scores are 0 whatever query holds, and so are the gradients of query and key: those
    of a query of zeros. So they are at a scale that is 0 beside the smallest normal number.
    """
    real = np.float64 if query.dtype == jnp.float64 else np.float32
    if abs(scale) < float(np.finfo(real).tiny):
        return jnp.zeros_like(query), 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def _sharding(
    mask: Any, given: Any, query: jax.Array, key: jax.Array, value: jax.Array
) -> AttentionSharding | None:
    """That of sharding=, or that which the mask was built with, and what types of tensors add."""
    asked = with_types(given, query, key, value)
    if not isinstance(mask, AttentionMask):
        return asked
    found = asked
    if mask.sharding is not None:
        found = with_types(mask.sharding, query, key, value, "mask.sharding")
    if found is None:
        return None
    context = layout_of(found).context
    if given is None:
        if context and mask.sharding is None:
            raise ValueError(
                f"query is {jax.typeof(query)}: its sequence axis is sharded over "
                f"{shown(context)}, but mask was built of whole sequences. Build it from ids that "
                "are sharded as query is (jax.sharding.reshard), or with sharding=, or pass the "
                "expression as mask"
            )
    elif (context and mask.sharding is None) or layout_of(asked) != layout_of(found):
        raise ValueError(
            f"sharding must be that of the mask, {mask.sharding}, but is {given}: give it to "
            "create_attention_mask, and leave it out here"
        )
    return found
