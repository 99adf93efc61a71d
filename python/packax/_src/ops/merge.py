"""`merge_attention`: merges attention over disjoint sets of keys by their log-sum-exps.

With the weights w_p = exp(lse_p - lse), where lse = log(sum_p exp(lse_p)), out = sum_p w_p out_p.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

_EXAMPLE = "packax.flash_attention(..., return_lse=True)"


def merge_attention(parts: Sequence[tuple[ArrayLike, ArrayLike]]) -> tuple[jax.Array, jax.Array]:
    """Merges attention over several parts of the keys into attention over all of these keys.

    Use it for queries that attend to several ranges of keys, such as the first tokens and a window,
    or for keys in several caches. It is exact if no query attends to the same key in two parts, and
    differentiable any number of times.

    Args:
        parts: one or more (out, lse), as returned by `flash_attention` and `decode_attention` with
            return_lse=True: out (B, Sq, H, Dv), lse (B, H, Sq). Pass sinks to only one part.

    Returns:
        (out, lse), as from one call: out (B, Sq, H, Dv) in the dtype of the parts, summed in the
        dtype of lse, and lse (B, H, Sq). If a query attends to nothing in a part (its lse is -inf),
        that part contributes nothing, whatever its out contains, and gets no gradient. A query that
        attends to nothing in all parts has out 0 and lse -inf. A part whose lse is +inf, from an
        infinite sink, gets all of the weight.

    Raises:
        ValueError: no parts, a part that is not (out, lse), or wrong or inconsistent shapes and
            dtypes.

    Examples:
        >>> near = packax.sliding_window(9)
        >>> ends = jnp.clip(jnp.arange(query.shape[1]) - 9, 0, 4)  # of the first 4 tokens
        >>> far = packax.masks.ranges(0 * ends, ends)
        >>> attend = functools.partial(packax.flash_attention, query, key, value, return_lse=True)
        >>> out, lse = packax.merge_attention([attend(near), attend(far)])
    """
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError(
            f"parts must be a list of (out, lse), as {_EXAMPLE} returns them, but is "
            f"{_named(parts)}"
        )
    pairs: list[tuple[jax.Array, jax.Array]] = []
    for number, part in enumerate(parts):
        if not isinstance(part, (list, tuple)) or len(part) != 2:
            raise ValueError(
                f"parts[{number}] must be (out, lse), as {_EXAMPLE} returns it, but is "
                f"{_named(part)}"
            )
        try:
            out, lse = map(jnp.asarray, part)
        except (TypeError, ValueError):
            what = " and ".join(map(_named, part))
            raise ValueError(f"parts[{number}] must hold two arrays, but holds {what}") from None
        rows = (*out.shape[:1], *out.shape[2:0:-1])
        if out.ndim != 4 or lse.shape != rows:
            raise ValueError(
                f"parts[{number}] must have the shapes (batch, queries, heads, dim) for out and "
                f"(batch, heads, queries) for lse, but has {out.shape} and {lse.shape}"
            )
        for name, x, like in zip(
            ("out", "lse"), (out, lse), (pairs or [(out, lse)])[0], strict=True
        ):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise ValueError(
                    f"parts[{number}] must have a float dtype for {name}, but has {x.dtype}"
                )
            if (x.shape, x.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"all parts must have the same shape and dtype for {name}, but parts[0] has "
                    f"{like.dtype}{list(like.shape)}, and parts[{number}] has "
                    f"{x.dtype}{list(x.shape)}"
                )
        pairs.append((out, lse))
    return merged(pairs)


def merged(parts: Sequence[tuple[jax.Array | None, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """`merge_attention` of checked parts. A part whose out is None has no values, like a sink."""
    lses = [lse for _, lse in parts]
    largest = functools.reduce(jnp.maximum, lses)
    top = jax.lax.stop_gradient(largest)
    empty, full = top == -jnp.inf, top == jnp.inf
    shift = jnp.where(empty | full, 0, top)
    zero = jnp.zeros((), top.dtype)
    weights = []
    for lse in lses:
        # Infinities are replaced before the arithmetic, so that no gradient is 0 * inf.
        weight = jnp.exp(jnp.where(jnp.isinf(lse), zero, lse) - shift)
        weight = jnp.where((lse == -jnp.inf) | (full & (lse != jnp.inf)), zero, weight)
        weights.append(weight)
    total = functools.reduce(jnp.add, weights)
    total = jnp.where(empty, 1, total)
    result: Any = zero
    for (out, lse), weight in zip(parts, weights, strict=True):
        if out is None:
            continue
        attended = _of_rows(lse != -jnp.inf)
        values = jnp.where(attended, out.astype(top.dtype), zero)
        result = result + _of_rows(weight / total) * values
    dtype = next(out.dtype for out, _ in parts if out is not None)
    result = jnp.where(_of_rows(empty), zero, result)  # also stops incoming cotangents
    lse = jnp.where(full, largest, shift + jnp.log(total))
    return result.astype(dtype), jnp.where(empty, top, lse)


def _of_rows(x: jax.Array) -> jax.Array:
    """Transposes (B, H, Sq) to (B, Sq, H, 1)."""
    return x.swapaxes(1, 2)[..., None]


def _named(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of length {len(x)}"
    return f"a {type(x).__name__}" + (f" of shape {x.shape}" if hasattr(x, "shape") else "")
