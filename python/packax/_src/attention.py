"""`flash_attention`: checks the arguments into one request, places it on the mesh, and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from packax._src.autodiff import attention
from packax._src.context.shard import place_operands
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import (
    AttentionSharding,
    Layout,
    check_tensors,
    layout_of_call,
    vary_together,
)
from packax._src.core.spec import AttentionSpec, accumulator
from packax._src.masks.build import create_attention_mask
from packax._src.masks.expressions import MaskExpression
from packax._src.ops.dropout import rows_of, streams_of
from packax._src.ops.primitives import Implementation, Inputs
from packax._src.ops.row_sums import log_sum_exp
from packax._src.ops.score_mods import Alibi, largest
from packax._src.requests import Request, as_tensors, check, check_mask, refuse_other_arguments

if TYPE_CHECKING:

    class _Options(TypedDict, total=False):
        """Arguments that do not change the type of the result."""

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
    mask: AttentionMask | MaskExpression | None = None,
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
    **others: Any,
) -> jax.Array | tuple[jax.Array, ...]:
    """Exact softmax attention, softmax(logits where mask) @ value, in O(S) memory.

    The logits are `scale * query @ key^T`, optionally with a soft cap, a bias and a sink.

    The algorithm is FlashAttention-2 (arXiv 2307.08691). Blocks of keys to which no query of a tile
    attends are skipped in both passes. The function is differentiable with respect to query, key,
    value, sinks, the slopes or array of the bias, and a scale that is an array. Softmax and all
    sums are float32 (float64 for float64 operands).

    Args:
        query: (B, Sq, H, Dqk) bfloat16, float16 or float32 (float64 where jax has it enabled).
        key: (B, Skv, Hkv, Dqk), dtype of query. H must be a multiple of Hkv: query head h reads
            key/value head h // (H / Hkv).
        value: (B, Skv, Hkv, Dv), dtype of query.
        mask: a mask from `create_attention_mask`, built once and used by every layer, or an
            expression such as `causal() & documents(segment_ids)`, built in this call. Its batch
            size is B, or 1 if all rows of the batch share one mask.
        scale: the factor of the scores: a finite Python or numpy number, or a float array of shape
            (), traced or not, which may have a gradient. None: 1 / sqrt(Dqk).
        soft_cap: the cap of the logits, which become soft_cap * tanh(logits / soft_cap)
            (Gemma 2, arXiv 2408.00118). A Python or numpy number from 1e-30 to 1e30. None: no cap.
        sinks: one more logit for each query head in the softmax's denominator, without a value
            (gpt-oss): (H,) of any float dtype. Differentiable.
        bias: added to the logits after the soft cap. Either `alibi(slopes)`: minus the head's slope
            times the distance between query and key; no Sq x Skv array is created. Or an array,
            (G, 1 or H, 1 or Sq, Skv) of any float dtype, which may contain -inf. G is 1, B or
            another divisor of B: row b reads `bias[b // (B // G)]`. Only the blocks that the
            mask needs are read, and it is never expanded. It is differentiable; its gradient is 0
            for pairs that are not attended. If a plan permutes the sequence, pass the array with
            its rows in the order of query, and its columns in the original order.
        dropout_rate: the fraction of the softmax's probabilities that become 0, a Python or numpy
            number of at least 0 and less than 1. The others are divided by 1 - dropout_rate. The
            log-sum-exp and the largest logits are computed before dropout. 0 or None: no dropout.
        dropout_key: a key of jax.random, required for dropout_rate above 0. Use a different
            dropout_key for each layer and step. Whether a probability is dropped depends only on
            dropout_key and on four indices: of the row, the head, the query and the key.
            All implementations, meshes and passes therefore drop the same probabilities.
        return_lse: also return the log-sum-exp (natural logarithm) of each query's logits. It is
            differentiable, and includes the sink.
        return_max_logits: also return the largest logit of each head, as it enters the softmax,
            over the attended pairs (for QK-clip, arXiv 2507.20534). It has no gradient, as if by
            `jax.lax.stop_gradient`.
        deterministic: whether gradients are bit-identical from run to run, computed by slower
            kernels where needed. Otherwise, on most GPUs, for common head dims, the gradient of
            query is summed in an order that varies, so it may differ by rounding. The results and
            the gradients of key and value are bit-identical either way.
        precision: how products of float32 operands are computed, as in jax.numpy.matmul: a
            `jax.lax.Precision`, the name of one, or anything else that `jax.lax.dot` takes for
            float32. On GPUs, "highest" and presets above TF32 mean float32, and anything else means
            TF32 (11 bits of each operand), in the gradients too. None: the value of
            `jax.default_matmul_precision`, TF32 by default. It does not affect the kernels for
            bfloat16 and float16. See "Numerics" in the documentation.
        implementation: what runs. None: the CUDA kernels when lowered for CUDA, blockwise XLA
            elsewhere; "cuda": the CUDA kernels or an error; "xla": blockwise XLA everywhere.
        sharding: an `AttentionSharding` on the mesh set by `jax.set_mesh`: batch, queries and heads
            are split over the mesh, and keys and values are gathered along the context axes.
            Results and gradients are sharded like query, key and value. Pass it only together with
            an expression: a built mask stores its sharding.
            See "Context parallelism" in the documentation.
        gather_head_groups: with context parallelism, the number of groups of key/value heads in
            which keys and values are gathered, or the sizes of the groups. Each group is gathered
            while attention runs on the previous one; the first gather and the last reduce-scatter
            are not overlapped. None: one group on two ranks, and with a plan of kind "local" if a
            rank has at least as many private tokens as the shared part has keys. Otherwise, None
            selects the groups that were fastest in measurements, separately for the forward and the
            backward pass. The argument has no effect if ranks fetch no keys, or only the keys next
            to their tokens, and it never changes results.
        checkpoint_name: an additional name for out and lse in `jax.checkpoint` policies.

    Returns:
        out, (B, Sq, H, Dv) in query's dtype. With return_lse or return_max_logits, a tuple: out,
        then lse (B, H, Sq), then max_logits (B, H), as far as requested. Both are float32
        (float64 for float64), and -inf where nothing is attended. Inside your own `shard_map`,
        max_logits covers the queries of all ranks if the attention has a sharding, and otherwise
        only those of this rank. A query that attends to nothing has out 0, lse -inf
        (even with a sink) and gradients 0, and its incoming cotangents are ignored if they are
        finite. An empty batch or no queries give empty results; without keys, every query attends
        to nothing.

    Raises:
        ValueError: wrong shapes or dtypes, a wrong value of another argument, or sizes that the
            mesh does not divide.
        NotImplementedError: when lowered for CUDA, there is no kernel for the dtype or head dims
            (there are kernels for all multiples of 8 up to 512, in float32 up to 256), or a bias
            array or dropout is used with head dims above 256 (in float32, above 128); with
            implementation="cuda", when lowered for another platform. On any platform, a bias array
            or dropout with a plan of kind "local", and dropout with permuted_keys=False.

    Under `jax.checkpoint`, the policy `save_only_these_names("packax_out", "packax_lse")`
    (`packax.CHECKPOINT_NAMES`) keeps the results, so that the backward pass does not run the
    forward attention again.

    Examples:
        >>> mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
        >>> out = packax.flash_attention(query, key, value, mask)
    """
    refuse_other_arguments("flash_attention", others)
    query, key, value = as_tensors(query=query, key=key, value=value)
    built = mask if isinstance(mask, AttentionMask) else None
    layout = layout_of_call(sharding, built, query, key, value)
    request = check(
        query, key, value, mask, layout.cut,
        scale=scale, soft_cap=soft_cap, sinks=sinks, bias=bias,
        dropout_rate=dropout_rate, dropout_key=dropout_key,
        return_lse=return_lse, return_max_logits=return_max_logits,
        deterministic=deterministic, precision=precision, implementation=implementation,
        gather_head_groups=gather_head_groups, checkpoint_name=checkpoint_name,
    )  # fmt: skip
    spec, inputs = place(request, layout)
    empty = 0 in query.shape[:2] or 0 in key.shape[:2]
    results = (_empty_results if empty else attention)(spec, inputs)
    if request.spec.max_logits:
        results[2] = largest(results[2], layout)
    if request.return_lse:
        results[1] = log_sum_exp(results[1])
    else:
        del results[1]
    return tuple(results) if len(results) > 1 else results[0]


def place(request: Request, layout: Layout) -> tuple[AttentionSpec, Inputs]:
    """The inputs of `attention` on the mesh of the call; builds the mask of an expression."""
    spec, x, q_len, kv_len = request.spec, request.inputs, request.q_len, request.kv_len
    mask: Any = x.mask
    if layout.on_mesh:
        check_tensors(layout, x.query, x.key, spec.gather_head_groups)
    if isinstance(mask, MaskExpression):
        mask = create_attention_mask(
            mask,
            q_len=q_len,
            kv_len=kv_len,
            sharding=layout.sharding,
            implementation=spec.implementation,
        )
        check_mask(mask, x.query, x.key, q_len, kv_len)
    x = x._replace(mask=mask.with_batch())
    if spec.dropout_threshold:
        streams = streams_of(request.dropout_key, x.query, layout)
        rows = rows_of(x.mask, x.query, layout)
        x = x._replace(fixed=x.fixed._replace(dropout_streams=streams, dropout_rows=rows))
    if layout.on_mesh:
        spec, x = place_operands(spec, layout, x)
    return spec, Inputs(*vary_together(*x))


def _empty_results(spec: AttentionSpec, x: Inputs) -> list[jax.Array]:
    """The results for an empty batch, no queries, or no keys, where no row attends to anything."""
    batch, rows, heads, _ = x.query.shape
    real = accumulator(x.query.dtype)
    results = [
        jnp.zeros((batch, rows, heads, x.value.shape[3]), x.query.dtype),
        jnp.full((batch, heads, rows), -jnp.inf, real),
        *([jnp.full((batch, heads, 1), -jnp.inf, real)] if spec.max_logits else []),
    ]
    return list(vary_together(*results, x)[:-1])
