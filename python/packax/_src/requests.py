"""`check`: the arguments of a call, checked, as one `Request`. Knows shapes, and no mesh."""

from __future__ import annotations

import functools
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from packax._src.core.arguments import as_int32, described
from packax._src.core.context_mask import ContextMask
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import Axes, Cut, checked_head_groups
from packax._src.core.spec import AttentionSpec, MaskMode, accumulator, is_symbolic
from packax._src.masks.expressions import (
    MaskExpression,
    batch_of,
    check_lengths,
    instead_of_array,
)
from packax._src.ops.dropout import WORDS, check_key
from packax._src.ops.primitives import Inputs, check_implementation
from packax._src.ops.score_mods import Alibi, NonDiffOperands, ScoreParams

# The most query heads of any known model, and of any known model with as many key/value heads.
_MOST_HEADS, _MOST_EQUAL_HEADS = 256, 128
_MANY_HEADS, _FEW_TOKENS = 64, 16
_CAPS = (1e-30, 1e30)
_NO_MASK = (
    ": for no mask at all pass full(). In a Flax layer, pass "
    "attention_fn=packax.integrations.flax.attention_fn()"
)
DTYPES = ("bfloat16", "float16", "float32", "float64")


def as_array(name: str, given: Any) -> jax.Array:
    if isinstance(given, jax.Array):
        return given
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be an array, but is {described(given)}") from None


def as_arrays(**given: Any) -> tuple[jax.Array, ...]:
    return tuple(as_array(name, x) for name, x in given.items())


def as_tensors(**given: Any) -> tuple[jax.Array, ...]:
    arrays = as_arrays(**given)
    for name, x in zip(given, arrays, strict=True):
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (batch, length, heads, dim), not {x.shape}")
    return arrays


class Request(NamedTuple):
    """A checked call: its arrays as the caller passed them, not placed on a mesh."""

    spec: AttentionSpec
    inputs: Inputs  # its mask may be an expression; `place` builds it, and adds `fixed` for dropout
    dropout_key: Any
    return_lse: bool
    q_len: Any  # of whole sequences, as kv_len
    kv_len: Any


def check(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, cut: Cut, *,
    scale: Any, sinks: Any, bias: Any, dropout_key: Any, return_lse: Any, **static: Any,
) -> Request:  # fmt: skip
    """The checked arguments of `flash_attention`; `static`: those in `OPTIONS`."""
    _check_tensors({"query": query, "key": key, "value": value}, cut)
    options = checked_options(**static)
    factor = checked_scale(scale, query)
    q_len, kv_len = query.shape[1] * cut.rows, key.shape[1] * cut.keys
    if isinstance(mask, MaskExpression):
        known = _check_expression(mask, query, key, q_len, kv_len)
    else:
        check_mask(mask, query, key, q_len, kv_len)
        known = mask.mask_mode >= MaskMode.IDS
    if not known:
        _warn_if_swapped(query.shape, key.shape)
    threshold = options["dropout_threshold"]
    if static["dropout_rate"] is None and dropout_key is not None:
        raise ValueError(
            "dropout_key was given without dropout_rate: pass both, with a rate of 0 for no dropout"
        )
    if threshold:
        check_key(dropout_key)
    if not isinstance(factor, jax.Array):
        query, options["scale"] = _with_positive_scale(query, factor)
    scores, fixed = ScoreParams(sinks=checked_sinks(sinks, query)), NonDiffOperands()
    if isinstance(factor, jax.Array):
        scores = scores._replace(scales=factor.astype(accumulator(query.dtype))[None])
    if isinstance(bias, Alibi):
        # Hopper has kernels for positions that are indices.
        always = bool(threshold) or scores.scales is not None
        slopes, fixed = _alibi(bias, query, q_len, kv_len, cut.context, always)
        scores = scores._replace(slopes=slopes)
    elif bias is not None:
        scores = scores._replace(bias=_bias_array(bias, query, kv_len))
    if isinstance(mask, ContextMask):
        _check_with_plan(mask, scores.bias is not None, bool(threshold))
    spec, lse = AttentionSpec(**options), flag("return_lse", return_lse)
    inputs = Inputs(query, key, value, scores, mask, fixed)
    return Request(spec, inputs, dropout_key, lse, q_len, kv_len)


def _check_tensors(tensors: dict[str, jax.Array], cut: Cut) -> None:
    query, key, value = tensors.values()
    for name, x in tensors.items():
        if 0 in x.shape[2:]:
            raise ValueError(
                f"{name} must have at least 1 head and a head dim of at least 1, but has shape "
                f"{x.shape}"
            )
        if str(x.dtype) not in DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, but is {x.dtype}")
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
    heads, kv_heads = query.shape[2] * cut.heads, key.shape[2] * cut.kv_heads
    if heads % kv_heads:
        raise ValueError(
            f"the heads of query must be a multiple of those of key and value, but there are "
            f"{heads} and {kv_heads}{_axes(query.shape, key.shape)}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"key must have the head dim of query, {query.shape[3]}, but has {key.shape[3]}"
        )


def _axes(query: tuple[int, ...], key: tuple[int, ...]) -> str:
    return f". query has shape {query} and key {key}, whose axes are (batch, length, heads, dim)"


def _check_expression(
    mask: MaskExpression, query: jax.Array, key: jax.Array, q_len: Any, kv_len: Any
) -> bool:
    """Raises if the expression does not fit query and key. Returns whether it determines the
    length."""
    own = check_lengths(mask)
    if own[0] not in (None, q_len) or own[1] not in (None, kv_len):
        try:
            check_lengths(mask, q_len, kv_len, said=("query has", "key has"))
        except ValueError as error:  # add the shapes to its text
            raise ValueError(f"{error}{_axes(query.shape, key.shape)}") from None
    batch_of(mask, query.shape[0], "query")
    return own[0] is not None


def _warn_if_swapped(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    """Warns if the axes look like (batch, heads, length, dim)."""
    sizes = (*query[1:3], *key[1:3])
    if not any(map(is_symbolic, sizes)) and _look_swapped(*sizes):
        warnings.warn(
            f"query and key may have their lengths and heads swapped{_axes(query, key)}. For the "
            "(batch, heads, length, dim) of PyTorch, pass x.swapaxes(1, 2)",
            stacklevel=4,
        )


def _look_swapped(rows: int, heads: int, keys: int, kv_heads: int) -> bool:
    """Whether length and heads look swapped.

    Always false if the longer of the two lengths is at least the number of query heads. Otherwise
    true if there are more heads than any model has, or as many as in large models and very few
    tokens. If query and key have the same heads and the same length, it is also true for more heads
    than models without grouped heads have, and for an unusual number. If they have the same heads,
    and there are fewer keys than rows, it is also true if the lengths look like the heads of a
    model with grouped heads.
    """
    longest = max(rows, keys)
    if longest >= heads:
        return False
    large, few = heads > _MANY_HEADS, longest < _FEW_TOKENS
    if heads > _MOST_HEADS or (large and few):
        return True
    if heads != kv_heads:
        return False
    if rows == keys:
        return heads > _MOST_EQUAL_HEADS or (large and heads % 8 != 0) or (heads == 64 and few)
    return 0 < keys < rows and rows % keys == 0


def check_mask(mask: Any, query: jax.Array, key: jax.Array, q_len: Any, kv_len: Any) -> None:
    """Raises if the mask does not fit query and key."""
    batch, rows, heads, _ = query.shape
    if not isinstance(mask, AttentionMask):
        raise ValueError(
            "mask must come from create_attention_mask, or be an expression such as "
            f"causal() & documents(segment_ids), but is {described(mask)}{instead_of_array(mask)}"
            + (_NO_MASK if mask is None else "")
        )
    if (mask.q_len, mask.kv_len) != (q_len, kv_len):
        raise ValueError(
            f"mask was built for {mask.q_len} queries and {mask.kv_len} keys, but query has "
            f"{q_len} and key {kv_len}{_axes(query.shape, key.shape)}"
        )
    shape = jnp.shape(mask.kv_start)
    if shape == (rows,) and batch > 1:
        raise ValueError(
            f"mask has row ranges of shape {shape}, without a batch axis, as inside a vmap over "
            f"the mask, but query has batch size {batch}: map query over its batch too, or give "
            "the mask a batch of one, jax.tree.map(lambda x: x[None], mask)"
        )
    if len(shape) == 2 and shape[0] not in (1, batch) and shape[0] == rows:
        raise ValueError(
            f"mask was built for batch size {shape[0]}, the length of query, but query has "
            f"{batch}: "
            f"an array of shape ({rows},) in prefix or offset= has one value per row. For "
            f"one value per token pass shape (1, {rows})"
        )
    if len(shape) == 2 and shape[1] == rows and shape[0] not in (1, batch):
        raise ValueError(
            f"mask was built for batch size {shape[0]}, but query has {batch}: build it from ids "
            "of the same batch, or from one row, whose mask is used for all. Inside a vmap over "
            "the batch map the mask too, with in_axes=mask.vmap_axes()"
        )
    if shape != (rows,) and (len(shape) != 2 or shape[0] not in (1, batch) or shape[1] != rows):
        raise ValueError(
            f"mask has row ranges of shape {shape}, but query needs ({batch}, {rows}) or "
            f"(1, {rows}), one mask for all: its arrays were cut or reshaped after it was built"
        )
    if mask.block_mask is not None and jnp.shape(mask.block_mask)[-3] not in (1, heads):
        raise ValueError(
            f"mask has a block_mask of {jnp.shape(mask.block_mask)[-3]} heads, but query has "
            f"{heads}: pass one map per query head, or one for all"
        )


def _check_with_plan(mask: ContextMask, has_bias: bool, has_dropout: bool) -> None:
    """Raises if the mask's plan cannot be used with a bias array or with dropout."""
    if mask.private_part is not None and mask.halo is None and (has_bias or has_dropout):
        raise NotImplementedError(
            f"{'a bias array' if has_bias else 'dropout'} cannot be used with a plan of kind "
            "'local': make a plan of another kind, such as context_plan(..., kind='balanced')"
        )
    if has_dropout and mask.permuted and mask.kv_plan is None:
        raise NotImplementedError(
            "dropout cannot be used with a plan that permutes only the queries "
            "(permuted_keys=False): the mask does not store its order"
        )


def _bias_array(bias: Any, query: jax.Array, kv_len: int) -> jax.Array:
    """The checked bias (a divisor of B, 1 or H, 1 or Sq, Skv), in the dtype of query or its
    accumulator."""
    if not hasattr(bias, "dtype") or not hasattr(bias, "shape"):
        raise ValueError(
            f"bias must be None, alibi(slopes) or an array of floats, but is {described(bias)}"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        more = ": a mask is an expression, not a bias" if bias.dtype == bool else ""
        raise ValueError(f"bias must be an array of floats, but is {bias.dtype}{more}")
    batch, rows, heads, _ = query.shape
    fits = len(bias.shape) == 4 and bias.shape[3] == kv_len and bias.shape[1] in (1, heads)
    fits = fits and bias.shape[2] in (1, rows)
    if not fits or not _divides(bias.shape[0], batch):
        raise ValueError(
            f"bias must have shape ({batch} or a divisor of it, 1 or {heads}, 1 or {rows}, "
            f"{kv_len}), which is (batch, heads, queries, keys), but has {tuple(bias.shape)}"
        )
    real = accumulator(query.dtype)
    if bias.dtype == jnp.float64 and real == jnp.float32:  # its lowest number must stay finite
        xp, limits = jnp if isinstance(bias, jax.Array) else np, np.finfo(np.float32)
        bias = xp.where(xp.isinf(bias), bias, xp.clip(bias, limits.min, limits.max))
    bias = jnp.asarray(bias)
    return bias if bias.dtype in (query.dtype, real) else bias.astype(real)


def _divides(groups: Any, batch: Any) -> bool:
    """Whether the batch consists of `groups` groups of equally many rows."""
    if groups == 1 or groups == batch:
        return True
    known = not (is_symbolic(groups) or is_symbolic(batch))
    return known and groups > 0 and batch % groups == 0


def per_head(name: str, what: str, given: Any, query: jax.Array) -> jax.Array | None:
    """A checked float array (H,), or None. On explicit mesh axes it is sharded like the heads."""
    heads = query.shape[2]
    if given is None:
        return None
    try:
        given = jnp.asarray(given)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be an array of floats, but is {given!r}") from None
    if not jnp.issubdtype(given.dtype, jnp.floating):
        raise ValueError(f"{name} must be an array of floats, but is {given.dtype}")
    if given.shape != (heads,):
        raise ValueError(
            f"{name} must have shape ({heads},), one {what} per head of query, but has "
            f"{given.shape}"
        )
    sharding = jax.typeof(query).sharding
    of_heads, own = ((*x.spec, *[None] * 4) for x in (sharding, jax.typeof(given).sharding))
    if own[0] == of_heads[2]:
        return given
    return jax.sharding.reshard(given, NamedSharding(sharding.mesh, P(of_heads[2])))


def checked_sinks(sinks: Any, query: jax.Array) -> jax.Array | None:
    """The sinks as (1, heads), for a query (B, Sq, H, D)."""
    of_heads = per_head("sinks", "logit", sinks, query)
    return None if of_heads is None else of_heads.astype(accumulator(query.dtype))[None]


def _alibi(
    bias: Alibi, query: jax.Array, q_len: int, kv_len: int, context: Axes, always: bool
) -> tuple[jax.Array, NonDiffOperands]:
    """The slopes (1, H), and the positions of rows and keys, (1 or B, length).

    Positions that are the indices are omitted, unless they are `always` needed.
    """
    slopes = per_head("slopes", "slope", bias.slopes, query)
    if slopes is None:
        raise ValueError("slopes must be an array of floats, but is None")
    slopes = slopes.astype(accumulator(query.dtype))[None]
    q, kv = bias.positions, bias.kv_positions
    if context and (q is None or kv is None):
        raise ValueError(
            "alibi needs positions and kv_positions where the sequence is sharded, here over "
            f"{context}: a query's index is not its position"
        )
    if q is None and kv is None and not always:
        return slopes, NonDiffOperands()
    if q is not None and kv is None:
        if q_len != kv_len:
            raise ValueError(
                f"alibi needs both positions and kv_positions where the lengths differ: there are "
                f"{q_len} queries and {kv_len} keys"
            )
        kv = q
    q = jnp.arange(q_len, dtype=jnp.int32) if q is None else q
    kv = jnp.arange(kv_len, dtype=jnp.int32) if kv is None else kv
    positions = {}
    batch, rows = query.shape[:2]
    for field, name, x, length in (
        ("q_bias_pos", "positions", q, rows),
        ("kv_bias_pos", "kv_positions", kv, kv_len),
    ):
        shapes = f"({length},), (1, {length}) or ({batch}, {length})"
        x = as_int32(name, x, shapes=shapes)
        if x.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"{name} must have shape {shapes}, but has {x.shape}")
        positions[field] = jnp.atleast_2d(x)
    return slopes, NonDiffOperands(**positions)


# --- Options


def _with_positive_scale(query: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """Moves the sign of the scale into query: kernels take the row maximum before they scale.

    With scale 0, all scores and the gradients of query and key are 0, as with a query of zeros. A
    scale below the smallest normal number is treated in the same way.
    """
    real = np.float64 if query.dtype == jnp.float64 else np.float32
    if abs(scale) < float(np.finfo(real).tiny):
        return jnp.zeros_like(query), 1.0
    return (query, scale) if scale > 0 else (-query, -scale)


def checked_scale(scale: Any, query: jax.Array) -> float | jax.Array:
    """The checked scale: a number that is finite in float32, or a float array of shape ()."""
    if scale is None:
        return 1 / math.sqrt(query.shape[3])
    if isinstance(scale, (jax.Array, np.ndarray)):
        if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
            key = (
                ", a key of jax.random" if jnp.issubdtype(scale.dtype, jax.dtypes.prng_key) else ""
            )
            raise ValueError(
                f"scale, where it is an array, must have shape () and a float dtype, but is "
                f"{scale.dtype} of shape {scale.shape}{key}"
            )
        return jnp.asarray(scale)
    number = _number("scale", scale)
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"scale must be finite in float32, but is {number}")
    return number


def checked_soft_cap(soft_cap: Any) -> float:
    """The checked cap; 0: no cap."""
    if soft_cap is None:
        return 0.0
    number = _number("soft_cap", soft_cap)
    if not _CAPS[0] <= number <= _CAPS[1]:
        none = ": for no cap, pass None" if number == 0 else ""
        raise ValueError(f"soft_cap must be from {_CAPS[0]} to {_CAPS[1]}, but is {number}{none}")
    return number


def checked_rate(rate: Any) -> int:
    """The dropout threshold: random 32-bit words below it drop the element; 0: no dropout."""
    if rate is None:
        return 0
    number = _number("dropout_rate", rate)
    if not 0 <= number < 1:
        raise ValueError(f"dropout_rate must be at least 0 and less than 1, but is {number}")
    return min(round(number * WORDS), WORDS - 1)


def _number(name: str, given: Any) -> float:
    if not isinstance(given, numbers.Real) or isinstance(given, bool):
        more = " or an array of shape ()" if name == "scale" else ", known when tracing"
        raise ValueError(
            f"{name} must be a Python or numpy number{more}, but is {described(given)}"
        )
    try:
        return float(given)
    except OverflowError:  # an integer beyond float64
        return math.inf


# --- Precision

Precision = jax.lax.Precision
_config: Any = jax.config  # its type does not list all attributes in some releases
_Preset = jax.lax.DotAlgorithmPreset

# For each precision, the presets that it satisfies. All other presets need float32.
_AT_LEAST = {
    Precision.DEFAULT: ("DEFAULT", "ANY_F8", "F16_F16", "BF16_BF16_BF16", "BF16_BF16_F32"),
    Precision.HIGH: ("TF32_TF32_F32",),
}
_MORE = ("_X3", "_X6", "_X9")
_ACCEPTED = (
    "None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset for float32 or less, the name of one, "
    "or a pair of them"
)


def checked_precision(precision: Any) -> jax.lax.Precision:
    """The lowest of three precisions that satisfies the argument, for products of float32 operands.

    `DEFAULT` and `HIGH` are TF32 on GPUs (11 bits of each operand), `HIGHEST` is float32. Sums are
    always float32, and products of bfloat16 and float16 operands are exact in all three. None: the
    value of `jax.default_matmul_precision`.
    """
    if precision is None:
        precision = _config.jax_default_matmul_precision
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        first, second = (checked_precision(x) for x in precision)
        return first if first.value >= second.value else second
    if precision is None:
        return Precision.DEFAULT
    try:
        return Precision(precision)
    except (ValueError, TypeError, KeyError):
        pass
    name = precision.name if isinstance(precision, _Preset) else precision
    if not isinstance(name, str) or name not in _Preset.__members__ or name == "F64_F64_F64":
        raise ValueError(f"precision must be {_ACCEPTED}, but is {precision!r}")
    for least, names in _AT_LEAST.items():
        if name.startswith(names) and not name.endswith(_MORE):
            return least
    return Precision.HIGHEST


def flag(name: str, flag: Any) -> bool:
    if not isinstance(flag, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, but is {flag!r}")
    return bool(flag)


def _checked_name(name: Any) -> str | None:
    if not isinstance(name, (str, type(None))):
        raise ValueError(f"checkpoint_name must be None or a string, but is {name!r}")
    return name


OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "soft_cap": ("soft_cap", checked_soft_cap),
    "precision": ("precision", checked_precision),
    "dropout_rate": ("dropout_threshold", checked_rate),
    "return_max_logits": ("max_logits", functools.partial(flag, "return_max_logits")),
    "deterministic": ("deterministic", functools.partial(flag, "deterministic")),
    "implementation": ("implementation", check_implementation),
    "gather_head_groups": ("gather_head_groups", checked_head_groups),
    "checkpoint_name": ("checkpoint_name", _checked_name),
}
"""The static arguments of a call: the field of `AttentionSpec` that each sets, and its check."""


def checked_options(**given: Any) -> dict[str, Any]:
    """The fields of `AttentionSpec` that these arguments set."""
    rows = ((OPTIONS[name], x) for name, x in given.items())
    return {field: checked(x) for (field, checked), x in rows}


_MASKS = "pass an expression as mask, such as packax.causal() or packax.documents(segment_ids)"
_REPLACEMENTS = {  # of arguments that other libraries' attention takes
    **dict.fromkeys(("is_causal", "causal"), "pass packax.causal() as mask"),
    **dict.fromkeys(
        ("segment_ids", "q_segment_ids", "kv_segment_ids"),
        "pass packax.documents(segment_ids) as mask, joined with others by `&`, as in "
        "packax.causal() & packax.documents(segment_ids)",
    ),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"),
        "pass packax.documents(packax.segments.from_cu_seqlens(cu_seqlens, length)) as mask",
    ),
    **dict.fromkeys(
        ("attn_mask", "attention_mask"),
        f"{_MASKS}; for an array of 0 and 1 that marks padding "
        "packax.documents(packax.segments.from_attention_mask(array)), for a boolean array of "
        "queries and keys packax.masks.block_sparse(array, 1), and an array of floats as bias",
    ),
    **dict.fromkeys(
        ("window_size", "local_window_size", "window", "sliding_window"),
        "pass packax.sliding_window(left, right) as mask, for causal attention with right=0",
    ),
    **dict.fromkeys(
        ("query_seq_lengths", "key_value_seq_lengths", "lengths"),
        "pass packax.documents(segment_ids) as mask, with id -1 for padding",
    ),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling", "scaling_factor"), "pass scale"),
    **dict.fromkeys(("softcap", "logits_soft_cap", "attn_logits_soft_cap"), "pass soft_cap"),
    **dict.fromkeys(("attn_bias", "attention_bias", "ab"), "pass bias"),
    **dict.fromkeys(("dropout", "dropout_p"), "pass dropout_rate and dropout_key"),
    "alibi_slopes": "pass bias=packax.alibi(slopes)",
    "block_size": "leave it out: the kernels have fixed tile sizes",
    "block_sizes": "leave it out: the kernels have fixed tile sizes",
}


def refuse_other_arguments(function: str, others: dict[str, Any]) -> None:
    """Raises TypeError for arguments that the function does not have, with what to use instead."""
    for name in others:
        instead = _REPLACEMENTS.get(name)
        more = "" if instead is None else f": {instead}"
        raise TypeError(f"{function}() has no argument {name!r}{more}")
