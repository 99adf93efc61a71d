"""Dense attention and its gradients in float64 numpy, and the rule that judges other results by it.

Quadratic and plain on purpose: it shares no code and no algorithm with the package.
"""

from __future__ import annotations

import functools
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


def of_heads(allowed) -> np.ndarray:
    """A mask's as_array with all axes, (B or 1, H or 1, Sq, Skv)."""
    allowed = np.asarray(allowed)
    allowed = allowed if allowed.ndim > 2 else allowed[None]
    return allowed if allowed.ndim > 3 else allowed[:, None]


def exact(query, key, value, allowed, scale, dout, dlse=None) -> Results:
    """Forward and backward. `allowed` is boolean: (Sq, Skv), (B or 1, Sq, Skv), or with heads."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (query, key, value, dout))
    heads = q.shape[2]
    group = heads // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    allowed = of_heads(allowed)

    # Heads before rows, (B, H, S, D), so that numpy computes the products with BLAS.
    q, k, v, do = (x.transpose(0, 2, 1, 3) for x in (q, k, v, do))
    s = np.where(allowed, q @ k.swapaxes(2, 3) * scale, -np.inf)
    some = allowed.any(-1)
    top = np.where(some, s.max(-1, initial=-np.inf), 0)
    p = np.exp(s - top[..., None])
    total = p.sum(-1)
    lse = np.where(some, top + np.log(np.where(some, total, 1)), -np.inf)
    p /= np.where(some, total, 1)[..., None]
    out = p @ v

    dp = do @ v.swapaxes(2, 3)
    delta = (p * dp).sum(-1)
    if dlse is not None:
        delta = delta - np.where(some, np.asarray(dlse, np.float64), 0)
    ds = p * (dp - delta[..., None]) * scale
    dq, dk, dv = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
    out, dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in (out, dq, dk, dv))
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return Results(out, lse, dq, dk, dv)


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
    """Both the largest and the RMS error of every result are within `factor` of the yardstick's.

    The yardstick can be exact by luck: with one key, its dp - delta is 0. Rounding is still allowed
    then: 16 float32 units of the largest value (for a log-sum-exp, 4 units of its value), and one
    unit of a smaller dtype.
    """
    failures = []
    largest = max(float(np.abs(x).max()) for name, x in true._asdict().items() if name != "lse")
    for name in true._fields:
        value, expected, plain_value = (getattr(x, name) for x in (got, true, yardstick))
        dtype = value.dtype
        value, plain_value = (np.asarray(x, np.float64) for x in (value, plain_value))
        assert value.shape == expected.shape, f"{name}: {value.shape}, not {expected.shape}"
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(value[~finite], expected[~finite], err_msg=name)
        floor = 16 * 2.0**-24 * max(largest, 1)
        if name == "lse":  # a sum of base-2 logarithms, times ln 2: three roundings of its size
            floor = max(floor, 4 * 2.0**-24 * np.abs(expected[finite]).max(initial=0))
        if dtype.itemsize < 4:
            floor += float(jnp.finfo(dtype).eps) * np.abs(expected[finite]).max(initial=0)
        error, plain_error = (np.abs(x[finite] - expected[finite]) for x in (value, plain_value))
        for norm, measure in (("largest", _largest), ("rms", _rms)):
            ours, theirs = measure(error), measure(plain_error)
            if not ours <= max(factor * theirs, floor):
                failures.append(f"{name}: {norm} error {ours:.3g}, yardstick {theirs:.3g}")
    assert not failures, "; ".join(failures)


def _largest(x):
    return float(x.max(initial=0))


def _rms(x):
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0
