"""JAX's `ragged_paged_attention` for TPUs, on packax: change only the import.

    from packax.integrations.ragged_paged_attention import ragged_paged_attention

It has the arguments of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`, whose pages have
keys and values of each head next to each other. packax reads them as heads of
twice the head dim, whose first half is the key and whose second half is the value. This copies no
page, but computes twice the products: new programs should have two arrays, and call
`packax.ragged_paged_attention`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import packax
from packax.extend import as_arrays

__all__ = ["ragged_paged_attention"]


def ragged_paged_attention(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """One step of a server, as `packax.ragged_paged_attention`.

    Args:
        q: (tokens, heads, dim).
        kv_pages: (pages, page_size, 2 * kv_heads, dim): head 2 n has keys, head 2 n + 1 the values.
        kv_lens: the number of keys of each sequence, (sequences,).
        page_indices: the pages of each sequence, (sequences, pages_per_sequence).
        cu_q_lens: where the rows of each sequence begin, (sequences + 1,).
        num_seqs: how many sequences there are, (1,).
        sm_scale: the factor of the scores.
        sliding_window: how many keys a row attends to, including its own; None: all before it.
        soft_cap: as in `packax.flash_attention`.
        mask_value: ignored: keys that a row does not attend to have no weight.
        k_scale, v_scale: the scales of all keys and values.
        num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: ignored, as they do not
            change the result.

    Returns:
        (tokens, heads, dim), dtype of q. Rows that belong to no sequence are 0.

    Raises:
        ValueError: wrong shapes or dtypes.
        NotImplementedError: no kernel for twice the head dim, when lowered for CUDA.

    Examples:
        >>> kv_pages = jnp.ones((8, 4, 2 * 2, 64))  # of two heads
        >>> out = ragged_paged_attention(
        ...     jnp.ones((16, 4, 64)), kv_pages, jnp.array([5, 9]),
        ...     jnp.array([[0, 1, 0], [2, 3, 4]]), jnp.array([0, 1, 8]), jnp.array([2]),
        ...     sm_scale=64**-0.5,
        ... )
    """
    del mask_value, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    q, kv_pages = as_arrays(q=q, kv_pages=kv_pages)
    if kv_pages.ndim != 4 or kv_pages.shape[2] % 2 or q.ndim != 3:
        raise ValueError(
            "q and kv_pages must have shapes (tokens, heads, dim) and (pages, page_size, 2 * "
            f"kv_heads, dim), but have {q.shape} and {kv_pages.shape}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, but is {sliding_window}")
    pages, size, heads, dim = kv_pages.shape
    both = kv_pages.reshape(pages, size, heads // 2, 2 * dim)
    scales: dict[str, Any] = {}
    factor = 1.0
    if kv_pages.dtype == jnp.float8_e4m3fn:
        scales = {"key_scale": k_scale, "value_scale": v_scale}
    else:
        sm_scale *= 1.0 if k_scale is None else k_scale
        factor = 1.0 if v_scale is None else v_scale
    out = packax.ragged_paged_attention(
        jnp.pad(q, ((0, 0), (0, 0), (0, dim))), both, both, kv_lens, page_indices, cu_q_lens,
        num_seqs, scale=sm_scale, soft_cap=soft_cap,
        window=None if sliding_window is None else (sliding_window - 1, 0), **scales,
    )[..., dim:]  # fmt: skip
    return out if factor == 1 else (out * factor).astype(q.dtype)
