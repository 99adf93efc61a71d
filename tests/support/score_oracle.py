"""Dense attention with all score parameters: float64 gives the truth, the tensors' dtype the
yardstick."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle

x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


class Results(NamedTuple):
    out: Any  # (B, Sq, H, Dv)
    lse: Any  # (B, H, Sq)
    gradients: dict[str, Any]  # keyed like `arrays`


def dense(arrays: dict[str, Any], allowed, *, soft_cap=None, places=None, factors=None):
    """out, lse and the largest logits (B, H). `arrays`: query, key, value, scale, sinks, slopes,
    bias.

    The scale is one number, slopes and sinks one per head; or each has one per row, (B, H, Sq).
    `factors`: dropout's factors of the probabilities.
    """
    q, k, v = arrays["query"], arrays["key"], arrays["value"]
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k) * arrays["scale"].astype(q.dtype)[..., None]
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    if "slopes" in arrays:
        far = jnp.abs(places[0][:, None, :, None] - places[1][:, None, None, :])
        s -= _of_rows(arrays["slopes"]).astype(q.dtype)[..., None] * far.astype(q.dtype)
    if "bias" in arrays:
        s += arrays["bias"].astype(q.dtype)
        allowed = allowed & (s != -jnp.inf)
    s = jnp.where(allowed, s, jnp.finfo(q.dtype).min)
    some = allowed.any(-1)
    top = s.max(-1)
    z = jnp.full_like(top, -jnp.inf)
    if "sinks" in arrays:
        z = jnp.broadcast_to(_of_rows(arrays["sinks"]).astype(q.dtype), top.shape)
    shift = jax.lax.stop_gradient(jnp.where(some, jnp.maximum(top, z), 0))
    p = jnp.where(allowed, jnp.exp(s - shift[..., None]), 0)
    total = jnp.where(some, p.sum(-1) + jnp.exp(z - shift), 1)
    lse = jnp.where(some, shift + jnp.log(total), -jnp.inf)
    p = p / total[..., None]
    if factors is not None:
        p = p * factors.astype(p.dtype)
    out = jnp.einsum("bhij,bjhd->bihd", p, v)
    return out, lse, jnp.where(some, top, -jnp.inf).max(-1)


def _of_rows(x):
    """Adds a row axis to values per head, (H,); (B, H, Sq) already has one."""
    return x[:, None] if x.ndim == 1 else x


def run(attention, arrays, dout, dlse) -> Results:
    """Results of `attention(arrays) -> (out, lse, ...)`, and its gradients for all arrays."""
    (out, lse), transpose = jax.vjp(lambda arrays: attention(arrays)[:2], arrays)
    cotangents = jnp.asarray(dout, out.dtype), jnp.asarray(dlse, lse.dtype)
    return Results(out, lse, *transpose(cotangents))


@jax.jit
def _run(arrays, allowed, dout, dlse, places, soft_cap, factors):
    attention = functools.partial(
        dense, allowed=allowed, soft_cap=soft_cap, places=places, factors=factors
    )
    sums = {name: _of_rows(x) for name, x in arrays.items() if name in ("slopes", "sinks")}
    sums["scale"] = arrays["scale"]
    by_row = arrays | {name: jnp.broadcast_to(x, dlse.shape) for name, x in sums.items()}
    return run(attention, by_row, dout, dlse), attention(arrays)[2]


def true_and_plain(arrays, allowed, dout, dlse, *, soft_cap=None, places=None, factors=None):
    """Results in float64 and in the tensors' dtype. dlse counts as 0 in rows without a key.

    The gradients of scale, slopes and sinks are single numbers, sums over rows, and the error of a
    single number depends on luck: of two equally accurate ones, each has more than twice the
    other's error in 3 draws of 10. The yardstick's error is therefore computed from the errors of
    its rows, as three times the root of the sum of their squares.
    """
    allowed = np.asarray(allowed)
    allowed = oracle.of_heads(allowed)
    some = np.broadcast_to(allowed.any(-1), np.shape(dlse))
    dlse = np.where(some, np.asarray(dlse), 0)
    others = allowed, np.asarray(dout, np.float32), dlse, places, soft_cap, factors
    plain, _ = _run(arrays, *others)
    with x64(True):
        doubles = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), arrays)
        true, top = _run(doubles, *others)
        true, plain, top = jax.tree.map(np.asarray, (true, plain, top))
    for name in {"scale", "slopes", "sinks"} & set(arrays):
        rows, shape = true.gradients[name], np.shape(arrays[name])
        axes = (0, 2) if shape else None
        total = rows.sum(axes).reshape(shape)
        error = 3 * np.sqrt(((plain.gradients[name] - rows) ** 2).sum(axes)).reshape(shape)
        true.gradients[name] = total
        plain.gradients[name] = total + error
    return true, plain, top


def check(got: Results, true: Results, plain: Results, factor: float = 2.0) -> None:
    """The rule of oracle.check, including the gradients of sinks, slopes and scale."""
    names = tuple(got.gradients)
    flat = [oracle_fields(names)(x.out, x.lse, *(x.gradients[n] for n in names)) for x in (got,
        true, plain)]  # fmt: skip
    oracle.check(*flat, factor)


@functools.cache
def oracle_fields(names):
    fields = [(name, Any) for name in ("out", "lse", *names)]
    return NamedTuple("Flat", fields)
