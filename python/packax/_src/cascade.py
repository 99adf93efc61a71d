"""`decode_shared_prefix`: sequences that continue one prompt read its pages once per step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax._src.core.arguments import ArrayLike
from packax._src.decode import MAX_ROWS, as_integers, decode_attention
from packax._src.ops.merge import merge_attention
from packax._src.ops.primitives import Implementation
from packax._src.requests import as_arrays, check_flags


def decode_shared_prefix(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    kv_lengths: ArrayLike,
    prefix_lengths: ArrayLike,
    *,
    block_table: ArrayLike,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """`decode_attention` for groups of sequences whose first keys are in the same pages.

    All groups have the same size, and the sequences of a group are consecutive in the batch. One
    pass computes attention over the prefix, for up to 16 rows (16 / Sq sequences) of a group
    together. Another computes attention over the remaining keys of each sequence. The two results
    are merged by their log-sum-exps, as in Hydragen (arXiv 2402.05099). So a step reads the prefix
    once for each 16 rows, not once for each sequence. The results are those of decode_attention,
    up to rounding.

    Args:
        query: (B, Sq, H, Dqk), as in `decode_attention`.
        key, value: pages, (pages, page_size, Hkv, D).
        kv_lengths: (B,) integers: the keys of each sequence, prefix and new ones included.
        prefix_lengths: (G,) integers, where B is a multiple of G: how many of their first keys the
            sequences of each group share. They must not include the Sq new ones.
        block_table: (B, max_blocks) integers. For sequences that are computed together, the pages
            of the prefix are taken from the row of the first of them.
        key_scale, value_scale: of pages in float8_e4m3fn, as in `decode_attention`.
        scale, soft_cap, sinks, precision, implementation: as in `decode_attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        As `decode_attention`. Sequences whose group's prefix reaches into their new rows get NaN,
        as do those for which decode_attention returns NaN.

    Raises:
        ValueError, NotImplementedError: as `decode_attention`; a batch that is not a multiple of
            the groups.

    Examples:
        >>> pages = jnp.ones((4, 8, 2, 64), jnp.bfloat16)
        >>> table = jnp.array([[0, 1, 2], [0, 1, 3]])  # two answers share the pages of their prompt
        >>> out = packax.decode_shared_prefix(
        ...     jnp.ones((2, 1, 4, 64), jnp.bfloat16), pages, pages, jnp.array([18, 20]),
        ...     prefix_lengths=jnp.array([16]), block_table=table,
        ... )
    """
    query, key, value = as_arrays(query=query, key=key, value=value)
    integers = ("kv_lengths", "prefix_lengths", "block_table")
    kv_lengths, prefixes, block_table = (
        as_integers(name, x)
        for name, x in zip(integers, (kv_lengths, prefix_lengths, block_table), strict=True)
    )
    check_flags(return_lse=return_lse)
    options: dict[str, Any] = {
        "key_scale": key_scale,
        "value_scale": value_scale,
        "scale": scale,
        "soft_cap": soft_cap,
        "precision": precision,
        "return_lse": True,
        "implementation": implementation,
    }
    if prefixes.ndim != 1:
        raise ValueError(
            "prefix_lengths must have shape (groups,), one for each group of sequences, but has "
            f"{prefixes.shape}"
        )
    groups, batch = prefixes.shape[0], query.shape[0] if query.ndim == 4 else 1
    if groups == 0 or batch % groups or query.ndim != 4:
        raise ValueError(
            "query must be (batch, rows, heads, dim), its batch a multiple of the groups of "
            f"prefix_lengths, but has shape {query.shape}, and there are {groups} groups"
        )
    prefixes = jnp.repeat(jnp.maximum(prefixes, 0), batch // groups)
    q_len, heads, dim = query.shape[1:]
    together = max(1, min(batch // groups, MAX_ROWS // max(q_len, 1)))
    while batch // groups % together:
        together -= 1
    parts = batch // together
    # A prefix with fewer keys than rows is computed with the suffix: decode_attention would treat
    # its first rows as padding.
    apart = jnp.where(prefixes < together * q_len, 0, prefixes)
    attend: Any = decode_attention
    suffix = attend(
        query, key, value, kv_lengths, block_table=block_table, kv_starts=apart, sinks=sinks,
        **options,
    )  # fmt: skip
    out, lse = attend(
        query.reshape(parts, together * q_len, heads, dim),
        key, value, apart[::together], block_table=block_table[::together], causal=False,
        **options,
    )  # fmt: skip
    lse = lse.reshape(parts, heads, together, q_len).swapaxes(1, 2).reshape(batch, heads, q_len)
    merged = merge_attention([(out.reshape(suffix[0].shape), lse), suffix])
    # A prefix that reaches into the new rows would let rows attend to later keys.
    valid = prefixes <= jnp.maximum(kv_lengths, 0) - q_len
    valid = (valid | (prefixes == 0)).reshape(batch, 1, 1)
    out = jnp.where(valid[..., None], merged[0], jnp.nan)
    lse = jnp.where(valid, merged[1], jnp.nan)
    return (out, lse) if return_lse else out
