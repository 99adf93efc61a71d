"""`dot_product_attention` of `levanter.layers.attention`, computed by packax on named arrays."""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import packax
from packax import AttentionSharding
from packax.extend import accumulator
from packax.integrations.fallback import fall_back, why_not
from packax.integrations.jax_nn import array_mask, mean_where_empty
from packax.integrations.levanter.grug import all_of, documents_of
from packax.masks import MaskExpression


class Axes(NamedTuple):
    """The haliax axes of a call that become (batch, length, heads, dim)."""

    batch: tuple[Any, ...]
    rows: Any
    keys: Any
    kv_heads: tuple[Any, ...]
    group: tuple[Any, ...]  # only in query: the query heads of one key/value head
    key_dim: Any
    value_dim: Any

    @property
    def heads(self) -> tuple[Any, ...]:
        return (*self.kv_heads, *self.group)


def dot_product_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: bool | None = None,
    attn_backend: Any = None,
    flash_block_size: int | None = None,
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: Any = None,
    inference: bool = True,
    prng: Any = None,
    attn_sink: Any = None,
) -> Any:
    """`levanter.layers.attention.dot_product_attention`, computed by packax.

    Causal masks with offsets, causal and symmetric windows, segment ids, explicit masks, sinks,
    soft caps, biases, dropout and precision work as in Levanter; tokens with a negative segment id
    are padding and give 0. If haliax maps the axis of query positions to mesh axes, attention is
    context parallel. Calls without a kernel run on Levanter's "vanilla" backend, with one
    `packax.integrations.fallback.FallbackWarning` that gives the reason.

    Args:
        QPos, KPos, Key: the axes of query positions, key positions and head dim, or their names.
        query: a NamedArray with QPos, Key, and axes of the batch and heads.
        key: a NamedArray with KPos, Key, and axes of the batch and key/value heads. An axis that
            only query has counts the query heads that share a key/value head.
        value: a NamedArray like key; Key may be replaced by another axis.
        mask: Levanter's AttentionMask, a boolean NamedArray (True: attended), or None.
        bias: a NamedArray that is added to the logits, or None.
        attention_dtype: float64 casts query, key and value to it. Other dtypes have no effect:
            logits and sums are always at least float32.
        precision: how float32 products are computed, as in `packax.flash_attention`.
        use_flash, attn_backend, flash_block_size: no effect.
        dropout: the dropout rate; no effect if inference is True.
        logits_soft_cap: logits become cap * tanh(logits / cap). None: no cap.
        scaling_factor: the factor of the logits. None: 1 / sqrt(size of Key).
        inference: whether to omit dropout.
        prng: the key for dropout.
        attn_sink: a NamedArray with axes of heads: one more logit per head in the softmax's
            denominator, capped like the other logits. None: no sinks.

    Returns:
        A NamedArray with the axes of query except Key, in their order, then the head dim of value;
        dtype of query.

    Raises:
        ValueError: axes or shapes that do not match.
        NotImplementedError: a call without a kernel, with PACKAX_FALLBACK=error in the environment.

    Examples:
        >>> from levanter.layers.attention import AttentionMask
        >>> mask = AttentionMask.causal()
        >>> out = dot_product_attention("position", "key_position", "head_size", q, k, v, mask)
    """
    axes = _axes_of(QPos, KPos, Key, query, key, value, _arrays(mask), _arrays(attn_sink))
    rate = 0.0 if inference else float(dropout)
    reason: str | None = "axes that are not (batch, length, heads, dim)"
    if axes is not None:
        reason = _no_kernel(axes, query, value, mask, bias, rate, logits_soft_cap, attn_sink)
    if axes is None or reason is not None:
        assert reason is not None
        fall_back("Levanter's attention", reason, 'its "vanilla" backend')
        module = importlib.import_module("levanter.layers.attention")
        theirs = getattr(module.dot_product_attention, "by_levanter", module.dot_product_attention)
        options = {"prng": prng, "scaling_factor": scaling_factor}
        options |= {} if attn_sink is None else {"attn_sink": attn_sink}
        options |= {"logits_soft_cap": logits_soft_cap, "inference": inference}
        options |= {"attn_backend": module.AttentionBackend.VANILLA, "dropout": dropout}
        options |= {"attention_dtype": attention_dtype, "precision": precision}
        return theirs(QPos, KPos, Key, query, key, value, mask, bias, **options)

    tensors = [
        _raw(query, axes.batch, (axes.rows,), axes.heads, (axes.key_dim,)),
        _raw(key, axes.batch, (axes.keys,), axes.kv_heads, (axes.key_dim,)),
        _raw(value, axes.batch, (axes.keys,), axes.kv_heads, (axes.value_dim,)),
    ]
    # Logits, softmax and sums are at least float32 for any dtype of the operands.
    if attention_dtype is not None and jnp.dtype(attention_dtype) == jnp.float64:
        tensors = [x.astype(jnp.float64) for x in tensors]
    size = axes.key_dim.size
    options = {
        "scale": 1 / math.sqrt(size) if scaling_factor is None else scaling_factor,
        "soft_cap": logits_soft_cap,
        "precision": precision,
        "sharding": _sharding(axes, query),
    }
    if bias is not None:
        every = (axes.batch, axes.heads, (axes.rows,), (axes.keys,))
        options["bias"] = _broadcast(bias, *every, keep=3).astype(jnp.float32)
    if attn_sink is not None:
        sinks = _broadcast(attn_sink, axes.heads, keep=0)
        if logits_soft_cap is not None:  # in Levanter a sink is a key, so its logit is capped, too
            sinks = sinks.astype(accumulator(sinks.dtype))
            sinks = logits_soft_cap * jnp.tanh(sinks / logits_soft_cap)
        options["sinks"] = sinks
    if rate:
        options |= {"dropout_rate": rate, "dropout_key": prng}
    expression, dense = _expression(mask, axes)
    q, k, v = tensors
    out, lse = packax.flash_attention(q, k, v, expression, return_lse=True, **options)
    if dense and attn_sink is None:  # a sink takes all the weight of a row without keys
        out = mean_where_empty(out, lse, v)
    result = (*axes.batch, axes.rows, *axes.heads, axes.value_dim)
    named = importlib.import_module("haliax").named
    out = named(out.astype(query.dtype).reshape([axis.size for axis in result]), result)
    order = [axis for axis in query.axes if axis.name != axes.key_dim.name]
    return out.rearrange((*order, axes.value_dim))


def _arrays(mask: Any) -> list[Any]:
    """The named arrays of an AttentionMask, or the argument itself if it is a named array."""
    found = (mask,)
    if hasattr(mask, "explicit_mask"):
        found = (mask.causal_offset, mask.explicit_mask, *(mask.segment_ids or ()))
    return [x for x in found if hasattr(x, "axes")]


def _axes_of(
    QPos: Any, KPos: Any, Key: Any, query: Any, key: Any, value: Any, masks: Any, sinks: Any
) -> Axes | None:
    """The roles of all axes; None for axes that packax cannot interpret: several for KPos, an axis
    that only key has, or several that only value has."""
    if isinstance(KPos, (tuple, list)):
        return None
    rows, keys, key_dim = (x.resolve_axis(y) for x, y in ((query, QPos), (key, KPos), (query, Key)))
    used = {rows.name, keys.name, key_dim.name}
    names = [{axis.name for axis in x.axes} for x in (query, key, value)]
    shared = [axis for axis in query.axes if axis.name in set.intersection(*names) - used]
    only_value = [a for a in value.axes if a.name not in (keys.name, *(s.name for s in shared))]
    group = [a for a in query.axes if a not in shared and a.name not in used]
    known = used | {axis.name for axis in shared}
    if len(only_value) != 1 or names[1] - known:
        return None
    # Heads are the shared axes after the axis of rows, or else all shared axes but the first.
    # Exceptions: an axis of the mask is a batch axis, and an axis of the sinks is an axis of heads.
    order = [axis.name for axis in query.axes]
    behind = [a for a in shared if order.index(a.name) > order.index(rows.name)]
    of_masks, of_sinks = ({axis.name for x in xs for axis in x.axes} for xs in (masks, sinks))
    likely = {a.name for a in behind or shared[1:]} - of_masks
    heads = [axis for axis in shared if axis.name in likely | of_sinks]
    batch = [axis for axis in shared if axis not in heads]
    return Axes(tuple(batch), rows, keys, tuple(heads), tuple(group), key_dim, only_value[0])


def _no_kernel(
    axes: Axes, query: Any, value: Any, mask: Any, bias: Any, rate: float, cap: Any, sink: Any
) -> str | None:
    """The feature of the call that only Levanter supports, or None."""
    if bias is not None and cap is not None:
        return "a bias below a soft cap"
    if sink is not None and {a.name for a in sink.axes} - {a.name for a in axes.heads}:
        return "sinks that are not of heads"
    if mask is not None and not hasattr(mask, "explicit_mask") and mask.array.dtype != jnp.bool_:
        return f"a mask of dtype {mask.array.dtype}"
    of_heads = {axis.name for axis in axes.heads}
    explicit = mask.explicit_mask if hasattr(mask, "explicit_mask") else mask
    if any(of_heads & {a.name for a in x.axes} for x in _arrays(mask) if x is not explicit):
        return "an offset or ids by head"
    tensors = [jax.ShapeDtypeStruct((1, 1, 1, n.size), query.dtype) for n in axes[-2:]]
    added = None if bias is None else bias.array
    return why_not(
        tensors[0], tensors[0], tensors[1], bias=added, dropout=rate > 0, blockwise=False
    )


def _expression(mask: Any, axes: Axes) -> tuple[MaskExpression, bool]:
    """The mask as an expression, and whether it has a dense mask, whose empty rows give means."""
    if mask is None:
        return packax.full(), False
    if not hasattr(mask, "explicit_mask"):
        return _dense(mask, axes), True
    parts = []
    if mask.is_causal:
        offset = mask.causal_offset
        named = hasattr(offset, "axes")
        moved = _broadcast(offset, axes.batch, keep=0) if named else offset or 0
        parts.append(packax.causal(moved))
    if mask.sliding_window is not None:
        parts.append(packax.sliding_window(mask.sliding_window - 1))
    radius = getattr(mask, "bidirectional_window", None)  # Levanter 1.2 does not have it
    if radius is not None:
        parts.append(packax.sliding_window(radius, radius))
    if mask.segment_ids is not None:
        q_ids, kv_ids = mask.segment_ids
        sides = [_named_as(q_ids, axes.rows, axes), _named_as(kv_ids, axes.keys, axes)]
        same = kv_ids is q_ids and axes.rows.size == axes.keys.size
        parts.append(documents_of(sides[0], sides[0] if same else sides[1]))
    if mask.explicit_mask is not None:
        parts.append(_dense(mask.explicit_mask, axes))
    return all_of(parts), mask.explicit_mask is not None


def _named_as(ids: Any, axis: Any, axes: Axes) -> jax.Array:
    """(1 or B, length): ids whose axis may have the name of the rows or of the keys."""
    other = {axes.rows.name: axis.name, axes.keys.name: axis.name}
    return _broadcast(
        ids.rename({a: b for a, b in other.items() if a != b and a in ids.shape}),
        axes.batch,
        (axis,),
        keep=1,
    )


def _dense(mask: Any, axes: Axes) -> MaskExpression:
    whole = _broadcast(mask, axes.batch, axes.heads, (axes.rows,), (axes.keys,), keep=4)
    return array_mask(whole, axes.rows.size, axes.keys.size)


def _raw(x: Any, *dims: tuple[Any, ...]) -> jax.Array:
    """The array with exactly these axes, each group merged into one dimension."""
    array = x.rearrange(tuple(axis for group in dims for axis in group)).array
    return array.reshape([math.prod(axis.size for axis in group) for group in dims])


def _broadcast(x: Any, *dims: tuple[Any, ...], keep: int) -> jax.Array:
    """Like `_raw`, but x may lack axes: it is broadcast to them, except that each of the first
    `keep` groups has size 1 if x has none of its axes."""
    used = []
    for number, group in enumerate(dims):
        has = any(axis.name in x.shape for axis in group)
        used.append(group if has or number >= keep else ())
        for axis in used[-1]:
            if axis.name not in x.shape:
                x = x.broadcast_axis(axis)
    return _raw(x, *used)


def _sharding(axes: Axes, query: Any) -> AttentionSharding | None:
    """The sharding of haliax's axis mapping if it shards the sequence, else None.

    With axes of type Explicit, the sharding is read from the types of arrays instead.
    """
    partitioning = importlib.import_module("haliax.partitioning")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types):
        return None

    def of(group: tuple[Any, ...]) -> Any:
        found: list[str] = []
        for axis in group:
            name = partitioning.physical_axis_name(axis)
            found += () if name is None else (name,) if isinstance(name, str) else name
        return tuple(x for x in found if x in mesh.axis_names) or None

    context = of((axes.rows,))
    if context is None or axes.rows.size % math.prod(mesh.shape[x] for x in context):
        return None
    batch, keys = of(axes.batch), of((axes.keys,))
    kv_heads = of(axes.kv_heads)
    return AttentionSharding(
        P(batch, context, of(axes.heads)), P(batch, keys if keys == context else None, kv_heads)
    )
