"""`decode_shared_prefix`: sequences that continue one prompt read its pages once per step."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.core.arguments import ArrayLike
from packax._src.core.sharding import Axes, over_auto_axes, typed_axes
from packax._src.core.spec import is_symbolic
from packax._src.decode import as_integers, decode_attention
from packax._src.ops.merge import merge_attention
from packax._src.ops.packed_rows import MAX_ROWS
from packax._src.ops.primitives import Implementation
from packax._src.requests import as_arrays, flag


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
    once per 16 rows, not once per sequence. The results are those of decode_attention, up to
    rounding. If a mesh shards the batch, each device reads the prefixes of its sequences.

    Args:
        query: (B, Sq, H, Dqk), as in `decode_attention`.
        key, value: pages, (pages, page_size, Hkv, D).
        kv_lengths: the number of keys of each sequence, including the prefix and the new ones: (B,)
            integers.
        prefix_lengths: how many of their first keys the sequences of each group share: (G,)
            integers, where B is a multiple of G. They must not include the Sq new keys.
        block_table: as in `decode_attention`. For sequences that are computed together, the first
            one's row gives the pages of the prefix.
        key_scale, value_scale: scales of float8_e4m3fn pages, as in `decode_attention`.
        scale, soft_cap, sinks, precision, implementation: as in `decode_attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        The results of `decode_attention`. They are NaN, too, for a sequence whose group's prefix
        includes some of its new keys.

    Raises:
        ValueError, NotImplementedError: the errors of `decode_attention`, or a batch that is
            symbolic, or that the number of groups does not divide.

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
    return_lse = flag("return_lse", return_lse)
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
    if is_symbolic(groups) or is_symbolic(batch):
        raise ValueError(
            "decode_shared_prefix needs a known batch and number of groups, but query has shape "
            f"{query.shape}, and prefix_lengths {prefixes.shape}"
        )
    if groups == 0 and batch == 0:
        groups, prefixes = 1, jnp.zeros(1, jnp.int32)
    if groups == 0 or batch % groups or query.ndim != 4:
        raise ValueError(
            "query must be (batch, queries, heads, dim), its batch a multiple of the groups of "
            f"prefix_lengths, but has shape {query.shape}, and there are {groups} groups"
        )
    q_len = query.shape[1]
    batch_axes, _, head_axes, _ = typed_axes(query)
    parts = _parts(batch, groups, q_len, _pieces(query, batch_axes))
    prefixes = jnp.maximum(prefixes, 0)
    limits = functools.partial(_limits, parts, q_len)
    apart, first = over_auto_axes(limits, (prefixes,), (batch_axes,))
    attend: Any = decode_attention
    suffix = attend(
        query, key, value, kv_lengths, block_table=block_table, kv_starts=apart, sinks=sinks,
        **options,
    )  # fmt: skip
    together = over_auto_axes(parts.joined, (query,), (batch_axes, (), head_axes))
    first_table = over_auto_axes(parts.first, (block_table,), (batch_axes,))
    out, lse = attend(together, key, value, first, block_table=first_table, causal=False, **options)
    out = over_auto_axes(parts.apart, (out,), (batch_axes, (), head_axes))
    lse = over_auto_axes(
        lambda x: parts.apart(x.swapaxes(1, 2)).swapaxes(1, 2), (lse,), (batch_axes, head_axes)
    )
    merged = merge_attention([(out, lse), suffix])
    valid = over_auto_axes(functools.partial(_valid, q_len), (prefixes, kv_lengths), (batch_axes,))
    out = jnp.where(valid[:, None, None, None], merged[0], jnp.nan)
    lse = jnp.where(valid[:, None, None], merged[1], jnp.nan)
    return (out, lse) if return_lse else out


class _Parts(NamedTuple):
    """How sequences are divided into parts that compute their prefix together: each run of `run`
    sequences has `number` parts of `together` sequences. The last part of a run is padded."""

    runs: int
    run: int
    number: int
    together: int

    def joined(self, x: jax.Array) -> jax.Array:
        """Reshapes (batch, Sq, ...) to (parts, together * Sq, ...)."""
        x = x.reshape(self.runs, self.run, *x.shape[1:])
        missing = self.number * self.together - self.run
        x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(self.runs * self.number, self.together * x.shape[2], *x.shape[3:])

    def apart(self, x: jax.Array) -> jax.Array:
        """The inverse of `joined`."""
        rows = x.shape[1] // self.together
        x = x.reshape(self.runs, self.number * self.together, rows, *x.shape[2:])
        return x[:, : self.run].reshape(self.runs * self.run, *x.shape[2:])

    def first(self, x: jax.Array) -> jax.Array:
        """The entries of x for the first sequence of each part."""
        x = x.reshape(self.runs, self.run, *x.shape[1:])[:, :: self.together]
        return x.reshape(self.runs * self.number, *x.shape[2:])


def _parts(batch: int, groups: int, q_len: int, pieces: int) -> _Parts:
    """`pieces`: the number of devices that share the batch, as far as types show. Sequences on
    different devices are not computed together."""
    run = max(1, math.gcd(batch // groups, batch // pieces))
    number = -(-run // max(1, MAX_ROWS // max(q_len, 1)))
    return _Parts(batch // run, run, number, -(-run // number))


def _pieces(x: jax.Array, axes: Axes) -> int:
    shape = jax.typeof(x).sharding.mesh.shape
    return math.prod(shape[axis] for axis in axes)


def _limits(parts: _Parts, q_len: int, prefixes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The number of keys that are computed together, for each sequence and for each part."""
    prefixes = jnp.repeat(prefixes, parts.runs * parts.run // prefixes.shape[0])
    # A prefix with fewer keys than rows is computed with the suffix: decode_attention would treat
    # its first rows as padding.
    apart = jnp.where(prefixes < parts.together * q_len, 0, prefixes)
    return apart, parts.first(apart)


def _valid(q_len: int, prefixes: jax.Array, lengths: jax.Array) -> jax.Array:
    """Whether each sequence's prefix ends before its new rows. Otherwise they would attend to later
    keys."""
    prefixes = jnp.repeat(prefixes, lengths.shape[0] // prefixes.shape[0])
    return (prefixes <= jnp.maximum(lengths, 0) - q_len) | (prefixes == 0)
