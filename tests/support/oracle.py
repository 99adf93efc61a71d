"""`dense` for calls without options, as tuples, and plain attention of a device, the yardstick."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import dense
import jax
import jax.numpy as jnp


class Results(NamedTuple):
    out: Any  # (B, Sq, H, Dv)
    lse: Any  # (B, H, Sq)
    dq: Any
    dk: Any
    dv: Any


of_heads = dense.four_axes


def exact(query, key, value, allowed, scale, dout, dlse=None) -> Results:
    """Forward and backward in float64. `allowed`: (Sq, Skv), (B or 1, Sq, Skv), or with heads."""
    arrays = {"query": query, "key": key, "value": value, "dout": dout, "scale": scale}
    found = dense.dense(arrays | ({} if dlse is None else {"dlse": dlse}), allowed)
    return Results(*(found[name] for name in ("out", "lse", "dquery", "dkey", "dvalue")))


def plain(query, key, value, allowed, scale, dout, dlse=None) -> Results:
    """Straightforward jax.numpy attention in the operands' dtype: its error is the yardstick."""
    dlse = None if dlse is None else jnp.asarray(dlse, query.dtype)
    allowed = of_heads(allowed)
    return _plain(query, key, value, allowed, dout, dlse, scale=scale)


@functools.partial(jax.jit, static_argnames="scale")
def _plain(query, key, value, allowed, dout, dlse, *, scale) -> Results:
    def attention(q, k, v):
        group = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        s = jnp.einsum("bihd,bjhd->bhij", q, k) * jnp.asarray(scale, q.dtype)
        s = jnp.where(allowed, s, jnp.finfo(q.dtype).min)
        top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
        p = jnp.where(allowed, jnp.exp(s - top), 0)
        total = p.sum(-1)
        some = allowed.any(-1)
        lse = jnp.where(some, top[..., 0] + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
        p = p / jnp.where(some, total, 1)[..., None]
        return jnp.einsum("bhij,bjhd->bihd", p, v), lse

    return run(attention, query, key, value, dout, dlse)


def run(attention, query, key, value, dout, dlse=None) -> Results:
    """Results of `attention(query, key, value) -> (out, lse)` and of its gradient."""
    (out, lse), transpose = jax.vjp(attention, query, key, value)
    dlse = jnp.zeros_like(lse) if dlse is None else jnp.asarray(dlse, lse.dtype)
    return Results(out, lse, *transpose((jnp.asarray(dout, out.dtype), dlse)))


def check(got: Results, true: Results, yardstick: Results, factor: float = 2.0) -> None:
    """Raises AssertionError unless `dense.close`."""
    failures = dense.close(*(x._asdict() for x in (got, true, yardstick)), factor)
    assert not failures, "; ".join(failures)
