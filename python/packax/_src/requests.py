"""Checks the arguments of `flash_attention`: tensors, axes, mask, score parameters, precision."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from packax._src.core.arguments import as_int32, described
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import HeadGroups, Layout, check_tensors
from packax._src.core.spec import MaskMode, accumulator, is_symbolic
from packax._src.masks.expressions import MaskExpression, check_lengths, instead_of_array
from packax._src.ops.dropout import WORDS
from packax._src.ops.score_mods import Alibi, ScoreParams, bias_dims

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


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False, but is {flag!r}")


def check_request(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layout: Layout | None,
    groups: HeadGroups,
) -> None:
    tensors = {"query": query, "key": key, "value": value}
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


def check_axes(
    mask: Any, query: tuple[int, ...], key: tuple[int, ...], q_len: int, kv_len: int
) -> None:
    """Raises if the mask expression does not fit the lengths. Warns if the mask does not determine
    the length, and the axes look like (batch, heads, length, dim)."""
    known = False
    if isinstance(mask, MaskExpression):
        own = check_lengths(mask)
        if own[0] not in (None, q_len) or own[1] not in (None, kv_len):
            try:
                check_lengths(mask, q_len, kv_len, said=("query has", "key has"))
            except ValueError as error:  # add the shapes to its text
                raise ValueError(f"{error}{_axes(query, key)}") from None
        known = own[0] is not None
    elif isinstance(mask, AttentionMask):
        known = mask.mask_mode >= MaskMode.IDS
    sizes = (*query[1:3], *key[1:3])
    if not known and not any(map(is_symbolic, sizes)) and _look_swapped(*sizes):
        warnings.warn(
            f"query and key may have their lengths and heads swapped{_axes(query, key)}. For the "
            "(batch, heads, length, dim) of PyTorch, pass x.swapaxes(1, 2)",
            stacklevel=3,
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


def check_mask(
    mask: Any,
    query: tuple[int, ...],
    key: tuple[int, ...],
    q_len: int,
    kv_len: int,
    layout: Layout | None,
) -> AttentionMask:
    """The mask, if it fits query and key."""
    batch, rows, heads, _ = query
    if not isinstance(mask, AttentionMask):
        raise ValueError(
            "mask must come from create_attention_mask, or be an expression such as "
            f"causal() & documents(segment_ids), but is {described(mask)}{instead_of_array(mask)}"
            + (_NO_MASK if mask is None else "")
        )
    if (mask.q_len, mask.kv_len) != (q_len, kv_len):
        raise ValueError(
            f"mask was built for {mask.q_len} queries and {mask.kv_len} keys, but query has "
            f"{q_len} and key {kv_len}{_axes(query, key)}"
        )
    shards = 1 if layout is None else layout.size(layout.context)
    if mask.shards != shards:
        raise ValueError(
            f"mask was built for queries in {mask.shards} pieces, but the context axes of its "
            f"sharding now have size {shards}: build it on the mesh that it is used on"
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
    return mask


def check_bias_with(mask: AttentionMask) -> None:
    """Raises if the mask cannot be used with a bias array."""
    if mask.private_part is not None:
        raise NotImplementedError(
            "a bias array cannot be used with a plan of kind 'local': make a plan "
            "of another kind, such as context_plan(..., kind='balanced')"
        )


def validate_score_params(
    query: jax.Array,
    q_len: int,
    kv_len: int,
    scale: float | jax.Array,
    sinks: Any,
    bias: Any,
    layout: Layout | None,
    for_sm90: bool = True,
) -> tuple[ScoreParams, tuple[jax.Array, ...]]:
    """The checked score parameters, and the ALiBi positions of rows and keys, (1 or B, length).

    Positions are omitted if they are the indices, `scale` is not an array, and the rest of the call
    is `for_sm90`, because Hopper has kernels for that. q_len and kv_len are the lengths of whole
    sequences.
    """
    real = accumulator(query.dtype)
    scores = ScoreParams(sinks=per_head("sinks", "logit", sinks, query, layout))
    if isinstance(scale, jax.Array):
        scores = scores._replace(scales=_reshard(scale.astype(real)[None], layout, ()))
    if bias is None:
        return scores, ()
    if not isinstance(bias, Alibi):
        return scores._replace(bias=_bias_array(bias, query, kv_len, layout)), ()
    slopes = per_head("slopes", "slope", bias.slopes, query, layout)
    if slopes is None:
        raise ValueError("slopes must be an array of floats, but is None")
    positions: tuple[jax.Array, ...] = ()
    _check_sharded_alibi(bias, layout)
    given = bias.positions is not None or bias.kv_positions is not None
    if given or scores.scales is not None or not for_sm90:
        positions = _alibi_positions(bias, query.shape[:2], q_len, kv_len, layout)
    return scores._replace(slopes=slopes.astype(real)[None]), positions


def _bias_array(bias: Any, query: jax.Array, kv_len: int, layout: Layout | None) -> jax.Array:
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
    # In float32, so that partial gradients of ranks and head groups are added in float32.
    groups = bias.shape[0]
    divided = layout is not None and (1 in bias.shape[:3] or groups != batch)
    if divided or bias.dtype not in (query.dtype, real):
        bias = bias.astype(real)
    if layout is not None and groups not in (1, batch) and groups % layout.size(layout.batch):
        bias = jnp.repeat(bias, batch // groups, axis=0)  # ranks have no whole number of biases
    return bias if layout is None else _reshard(bias, layout, *bias_dims(layout, bias))


def _divides(groups: Any, batch: Any) -> bool:
    """Whether the batch consists of `groups` groups of equally many rows."""
    if groups == 1 or groups == batch:
        return True
    known = not (is_symbolic(groups) or is_symbolic(batch))
    return known and groups > 0 and batch % groups == 0


def _reshard(x: jax.Array, layout: Layout | None, *dims: Any) -> jax.Array:
    return x if layout is None else layout.place(x, *dims)


def per_head(
    name: str, what: str, given: Any, query: jax.Array, layout: Layout | None
) -> jax.Array | None:
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
    if layout is not None:
        return layout.place(given, layout.heads)
    sharding = jax.typeof(query).sharding
    of_heads, own = ((*x.spec, *[None] * 4) for x in (sharding, jax.typeof(given).sharding))
    if own[0] == of_heads[2]:
        return given
    return jax.sharding.reshard(given, NamedSharding(sharding.mesh, P(of_heads[2])))


def _check_sharded_alibi(bias: Alibi, layout: Layout | None) -> None:
    if layout is None or layout.size(layout.context) <= 1:
        return
    if bias.positions is None or bias.kv_positions is None:
        raise ValueError(
            f"alibi needs positions and kv_positions where the sequence is sharded, here over "
            f"{layout.context}: a query's index is not its position"
        )


def _alibi_positions(
    bias: Alibi, rows: tuple[int, ...], q_len: int, kv_len: int, layout: Layout | None
) -> tuple[jax.Array, ...]:
    q, kv = bias.positions, bias.kv_positions
    if q is not None and kv is None:
        if q_len != kv_len:
            raise ValueError(
                f"alibi needs both positions and kv_positions where the lengths differ: there are "
                f"{q_len} queries and {kv_len} keys"
            )
        kv = q
    q = jnp.arange(q_len, dtype=jnp.int32) if q is None else q
    kv = jnp.arange(kv_len, dtype=jnp.int32) if kv is None else kv
    positions = []
    batch = rows[0]
    for name, x, length in (("positions", q, rows[1]), ("kv_positions", kv, kv_len)):
        shapes = f"({length},), (1, {length}) or ({batch}, {length})"
        x = as_int32(name, x, shapes=shapes)
        if x.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"{name} must have shape {shapes}, but has {x.shape}")
        x = jnp.atleast_2d(x)
        if layout is not None:
            dims = layout.context if name == "positions" else ()
            x = layout.place(x, () if x.shape[0] == 1 else layout.batch, dims)
        positions.append(x)
    return tuple(positions)


def checked_scale(scale: Any) -> float | jax.Array:
    """The checked scale: a number that is finite in float32, or a float array of shape ()."""
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
