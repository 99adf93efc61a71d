"""The request of `flash_attention`, checked: tensors, their axes, and that the mask fits them."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.mask import AttentionMask
from packax._src.core.messages import described
from packax._src.core.shapes import is_symbolic
from packax._src.core.sharding import HeadGroups, Layout, check_tensors
from packax._src.masks.expressions import MaskExpression
from packax._src.masks.lengths import check_lengths
from packax._src.masks.messages import instead_of_array

_MOST_HEADS, _MOST_EQUAL_HEADS = 256, 128  # of a model, of which any is known; and of keys too
_MANY_HEADS, _FEW_TOKENS = 64, 16
_NO_MASK = (
    ": for no mask at all give full(), and for attention_fn= of a layer of Flax what "
    "packax.integrations.flax.attention_fn() makes"
)
DTYPES = ("bfloat16", "float16", "float32", "float64")


def as_array(name: str, given: Any) -> jax.Array:
    if isinstance(given, jax.Array):
        return given
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be an array, but is {described(given)}") from None


def check_request(
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
        known = mask.segment_check > 0
    sizes = (*query[1:3], *key[1:3])
    if not known and not any(map(is_symbolic, sizes)) and _look_swapped(*sizes):
        warnings.warn(
            f"query and key may have their lengths and heads swapped{_axes(query, key)}. For "
            "(batch, heads, length, dim), as PyTorch has it, call with x.swapaxes(1, 2)",
            stacklevel=3,
        )


def _look_swapped(rows: int, heads: int, keys: int, kv_heads: int) -> bool:
    """More heads than any model has, or as many as large ones for a few tokens; as many heads of
    keys as of queries, and more than a model has that does not group them, or an odd number; or, of
    swapped axes with grouped heads, as many heads of keys as of queries, and fewer keys than rows.
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
) -> None:
    batch, rows, heads, _ = query
    if not isinstance(mask, AttentionMask):
        raise ValueError(
            "mask must come from create_attention_mask, or be an expression such as "
            f"causal() & documents(segment_ids), but is {described(mask)}{instead_of_array(mask)}"
            + (_NO_MASK if mask is None else "")
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
            f"leaves it, but query has batch size {batch}: map query over its batch too, or give "
            "the mask a batch of one, jax.tree.map(lambda x: x[None], mask)"
        )
    if len(shape) == 2 and shape[0] not in (1, batch) and shape[0] == rows:
        raise ValueError(
            f"mask was built for batch size {shape[0]}, the length of query, but query has "
            f"{batch}: "
            f"an array of shape ({rows},) of prefix or offset= is one for each row of the batch. "
            f"For lengths of each token give (1, {rows})"
        )
    if len(shape) == 2 and shape[1] == rows and shape[0] not in (1, batch):
        raise ValueError(
            f"mask was built for batch size {shape[0]}, but query has {batch}: build it from ids "
            "of the same batch, or from one row, whose mask serves all. Inside of a vmap over the "
            "batch map the mask too, with in_axes=mask.vmap_axes()"
        )
    if shape != (rows,) and (len(shape) != 2 or shape[0] not in (1, batch) or shape[1] != rows):
        raise ValueError(
            f"mask has row ranges of shape {shape}, but query needs ({batch}, {rows}) or "
            f"(1, {rows}), one mask for all: its arrays were cut or reshaped after it was built"
        )
    if mask.block_mask is not None and jnp.shape(mask.block_mask)[-3] not in (1, heads):
        raise ValueError(
            f"mask has a block_mask of {jnp.shape(mask.block_mask)[-3]} heads, but query has "
            f"{heads}: give it one for each head of query, or one for all"
        )


def check_bias_beside(mask: AttentionMask) -> None:
    """Of a bias that is an array."""
    if mask.private_part is not None:
        raise NotImplementedError(
            "a bias that is an array beside a plan of kind 'local', by which ranks have keys of "
            "their own: make a plan of another kind, such as context_plan(..., kind='balanced')"
        )
