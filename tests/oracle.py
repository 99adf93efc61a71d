"""Dense attention in float64 numpy, its gradients, and the 2x rule that judges the others.

Quadratic and plain on purpose: it shares no code and no trick with the package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Results(NamedTuple):
    out: Any  # (B, Sq, H, Dv)
    lse: Any  # (B, H, Sq)
    dq: Any
    dk: Any
    dv: Any


def exact(query, key, value, allowed, scale, dout, dlse=None) -> Results:
    """Forward and backward; `allowed` is boolean (Sq, Skv) or (B or 1, Sq, Skv)."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (query, key, value, dout))
    batch, q_len, heads, _ = q.shape
    group = heads // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    allowed = np.broadcast_to(np.asarray(allowed), (batch, q_len, k.shape[1]))[:, None]

    s = np.where(allowed, np.einsum("bihd,bjhd->bhij", q, k) * scale, -np.inf)
    some = allowed.any(-1)
    top = np.where(some, s.max(-1, initial=-np.inf), 0)
    p = np.exp(s - top[..., None])
    total = p.sum(-1)
    lse = np.where(some, top + np.log(np.where(some, total, 1)), -np.inf)
    p /= np.where(some, total, 1)[..., None]
    out = np.einsum("bhij,bjhd->bihd", p, v)

    dp = np.einsum("bihd,bjhd->bhij", do, v)
    delta = np.einsum("bhij,bhij->bhi", p, dp)
    if dlse is not None:
        delta = delta - np.where(some, np.asarray(dlse, np.float64), 0)
    ds = p * (dp - delta[..., None]) * scale
    dq = np.einsum("bhij,bjhd->bihd", ds, k)
    dk = np.einsum("bhij,bihd->bjhd", ds, q)
    dv = np.einsum("bhij,bihd->bjhd", p, do)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return Results(out, lse, dq, dk, dv)


def plain(query, key, value, allowed, scale, dout, dlse=None) -> Results:
    """What anybody would write in jax.numpy, in the operands' own dtype: the yardstick."""
    allowed = jnp.asarray(allowed)
    allowed = (allowed if allowed.ndim == 3 else allowed[None])[:, None]

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

    (out, lse), transpose = jax.vjp(attention, query, key, value)
    dlse = jnp.zeros_like(lse) if dlse is None else jnp.asarray(dlse, lse.dtype)
    return Results(out, lse, *transpose((jnp.asarray(dout, out.dtype), dlse)))


def run(attention, query, key, value, dout, dlse=None) -> Results:
    """Results of `attention(query, key, value) -> (out, lse)` and of its own gradient."""
    (out, lse), transpose = jax.vjp(attention, query, key, value)
    dlse = jnp.zeros_like(lse) if dlse is None else jnp.asarray(dlse, lse.dtype)
    return Results(out, lse, *transpose((jnp.asarray(dout, out.dtype), dlse)))


def check(got: Results, true: Results, yardstick: Results, factor: float = 2.0) -> None:
    """Every result within `factor` of the yardstick's error, the largest and the RMS.

    Where the yardstick happens to be exact (one key, say) rounding is still allowed: a few units
    of the smaller of float32 and the result's dtype, of the largest value.
    """
    failures = []
    for name in Results._fields:
        value, expected, plain_value = (getattr(x, name) for x in (got, true, yardstick))
        dtype = value.dtype
        value, plain_value = (np.asarray(x, np.float64) for x in (value, plain_value))
        assert value.shape == expected.shape, f"{name}: {value.shape}, not {expected.shape}"
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(value[~finite], expected[~finite], err_msg=name)
        # 2^-24 for float32 sums; a result in a smaller dtype is rounded once more.
        unit = 2.0**-24 if np.dtype(dtype).itemsize >= 4 else float(jnp.finfo(dtype).eps) / 2
        floor = 4 * unit * np.abs(expected[finite]).max(initial=1.0)
        error, plain_error = (np.abs(x - expected)[finite] for x in (value, plain_value))
        for norm, measure in (("largest", _largest), ("rms", _rms)):
            ours, theirs = measure(error), measure(plain_error)
            if not ours <= max(factor * theirs, floor):
                failures.append(f"{name}: {norm} error {ours:.3g}, yardstick {theirs:.3g}")
    assert not failures, "; ".join(failures)


def _largest(x):
    return float(x.max(initial=0))


def _rms(x):
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0
