"""Attention and its gradients in numpy, dense and without cleverness: the reference of every test.

`dense` computes in float64, or as plain attention in a smaller dtype, whose error is the yardstick.
It shares no code with the package, and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

OF_ROWS = ("scale", "sinks", "slopes")  # gradients that are sums over queries
Results = dict[str, Any]  # out (B, Sq, H, Dv), lse (B, H, Sq), top (B, H), and gradients


def four_axes(allowed: Any) -> np.ndarray:
    """A boolean mask (Sq, Skv), (B, Sq, Skv) or with heads, as (B or 1, H or 1, Sq, Skv)."""
    allowed = np.asarray(allowed)
    allowed = allowed if allowed.ndim > 2 else allowed[None]
    return allowed if allowed.ndim > 3 else allowed[:, None]


def to_tf32(x: Any) -> np.ndarray:
    """Rounds to 11 significant bits."""
    bits = np.asarray(x, np.float32).view(np.int32)
    return ((bits + 0x1000) & -0x2000).view(np.float32)


def _rounding(dtype: Any) -> Any:
    """Rounds to dtype, and returns float64 or float32."""
    dtype = jnp.dtype(dtype)
    work = np.float64 if dtype == np.float64 else np.float32
    if dtype.itemsize >= 4:
        return lambda x: np.asarray(x, dtype)
    return lambda x: np.asarray(x, np.float32).astype(dtype).astype(work)


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Adds groups of rows and broadcast axes, to the shape of a bias."""
    x = x.reshape(shape[0], -1, *x.shape[1:]).sum(1)
    axes = tuple(a for a in range(4) if shape[a] < x.shape[a])
    return x.sum(axes, keepdims=True)


def dense(
    arrays: Mapping[str, Any],
    allowed: Any,
    *,
    dtype: Any = np.float64,
    tf32: bool = False,
    soft_cap: float | None = None,
    places: Any = None,
    factors: Any = None,
) -> Results:
    """Results and gradients, named like the arrays with "d" before the name.

    arrays: query, key, value, scale, and perhaps dout, dlse, sinks, slopes, bias (all axes).
    Without dout there are no gradients.
    tf32: whether the operands of the forward's products are rounded.
    places: positions of queries and keys, (B or 1, length), for the slopes. factors: of the
    probabilities (dropout). Gradients of `OF_ROWS` are given for each query, (B, H, Sq).
    """
    r = _rounding(dtype)
    operand = to_tf32 if tf32 else lambda x: x
    x = {name: r(np.asarray(y, np.float64)) for name, y in arrays.items()}
    shape = x["query"].shape[0], x["query"].shape[2]
    group = shape[1] // x["key"].shape[2]
    allowed = four_axes(allowed)
    q, k, v = (x[n].transpose(0, 2, 1, 3) for n in ("query", "key", "value"))
    k, v = (np.repeat(y, group, 1) for y in (k, v))
    raw = r(operand(q) @ operand(k).swapaxes(2, 3))
    s = r(x["scale"] * raw)
    slope = 1.0
    if soft_cap is not None:
        tanh = r(np.tanh(r(s / soft_cap)))
        s, slope = r(soft_cap * tanh), r(1 - tanh**2)
    if "slopes" in x:
        far = np.abs(places[0][:, None, :, None] - places[1][:, None, None, :])
        s = r(s - x["slopes"][:, None, None] * far)
    if "bias" in x:
        s = r(s + np.repeat(x["bias"], shape[0] // len(x["bias"]), 0))
        allowed = allowed & (s != -np.inf)
    allowed = np.broadcast_to(allowed, s.shape)
    s = np.where(allowed, s, -np.inf)
    some = allowed.any(-1)
    largest = s.max(-1, initial=-np.inf)
    sinks = np.broadcast_to(x["sinks"][..., None] if "sinks" in x else -np.inf, some.shape)
    shift = np.where(some, np.maximum(largest, sinks), 0)
    p = r(np.exp(r(s - shift[..., None])))
    sink = np.where(some, np.exp(sinks - shift), 0)
    total = np.where(some, r(p.sum(-1) + sink), 1)
    lse = np.where(some, shift + np.log(total), -np.inf)
    p, sink = r(p / total[..., None]), sink / total
    kept = p if factors is None else r(p * factors)
    out = r(operand(kept) @ operand(v)).transpose(0, 2, 1, 3)
    results = {"out": out, "lse": lse, "top": largest.max(-1, initial=-np.inf)}
    if "dout" not in x:
        return results

    do = x["dout"].transpose(0, 2, 1, 3)
    dlse = np.where(some, x.get("dlse", 0), 0)
    dkept = r(do @ v.swapaxes(2, 3))
    dp = dkept if factors is None else r(dkept * factors)
    delta = r((p * dp).sum(-1)) - dlse
    ds = np.where(allowed, r(p * r(dp - delta[..., None])), 0)
    du = r(ds * slope)
    scaled = r(du * x["scale"])
    dk, dv = scaled.swapaxes(2, 3) @ q, kept.swapaxes(2, 3) @ do
    dk, dv = (y.reshape(len(y), -1, group, *y.shape[2:]).sum(2) for y in (dk, dv))
    found = {"dquery": scaled @ k, "dkey": dk, "dvalue": dv}
    found = results | {name: r(y.transpose(0, 2, 1, 3)) for name, y in found.items()}
    found["dscale"] = (du * raw).sum(-1)
    if "sinks" in x:
        found["dsinks"] = -sink * delta
    if "slopes" in x:
        found["dslopes"] = -(ds * far).sum(-1)
    if "bias" in x:
        found["dbias"] = _sum_to(ds, x["bias"].shape)
    return found


def true_of(arrays: Mapping[str, Any], allowed: Any, **options: Any) -> Results:
    """Results in float64, with gradients in the shapes of the arrays."""
    found = dense(arrays, allowed, **options)
    for name in {*OF_ROWS} & {*arrays} if "dout" in arrays else ():
        found["d" + name] = found["d" + name].sum((0, 2) if np.shape(arrays[name]) else None)
    return found


def true_and_plain(
    arrays: Mapping[str, Any], allowed: Any, dtype: Any, tf32: bool = False, **options: Any
) -> Any:
    """Results in float64 and in dtype, with gradients in the shapes of the arrays.

    The gradients of scale, sinks and slopes are sums over queries. The error of one number depends
    on luck, so the yardstick's is three times the root of the sum of its queries' squared errors.
    """
    true = dense(arrays, allowed, **options)
    plain = dense(arrays, allowed, dtype=dtype, tf32=tf32, **options)
    for name in {*OF_ROWS} & {*arrays} if "dout" in arrays else ():
        rows, near = (np.asarray(y["d" + name], np.float64) for y in (true, plain))
        axes = (0, 2) if np.shape(arrays[name]) else None
        true["d" + name] = rows.sum(axes)
        plain["d" + name] = rows.sum(axes) + 3 * np.sqrt(((near - rows) ** 2).sum(axes))
    return true, plain


def close(got: Results, true: Results, plain: Results, factor: float = 2.0) -> list[str]:
    """What differs: the largest and the RMS error of each result must be within `factor` of plain
    attention's. Where that is exact by luck, rounding is allowed: 16 float32 units of the largest
    value (for a log-sum-exp, 4 units of its value), and one unit of a smaller dtype. Logits are
    rounded relative to their size, so large ones allow 4 units times the largest log-sum-exp."""
    failures = []
    sizes = (float(np.nanmax(np.abs(true[n]), initial=0)) for n in got if n not in ("lse", "top"))
    largest = max(sizes, default=0)
    lse = np.asarray(true.get("lse", 0))
    logits = np.abs(lse[np.isfinite(lse)]).max(initial=0)
    for name in got:
        value, expected, near = got[name], true[name], np.asarray(plain[name], np.float64)
        unit = float(jnp.finfo(value.dtype).eps)
        value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
        if value.shape != np.shape(expected):
            failures.append(f"{name} has shape {value.shape}, not {np.shape(expected)}")
            continue
        finite = np.isfinite(expected)
        if not np.array_equal(value[~finite], expected[~finite], equal_nan=True):
            failures.append(f"{name} is finite where it should be infinite or NaN")
            continue
        units = 4 * max(4, logits) * max(largest, 1)
        if name in ("lse", "top"):
            units = 4 * max(4 * max(largest, 1), np.abs(expected[finite]).max(initial=0))
        floor = 2.0**-24 * units
        if unit > 1e-6:
            floor += unit * np.abs(expected[finite]).max(initial=0)
        error, allowed = (np.abs(y[finite] - expected[finite]) for y in (value, near))
        for norm in (_largest, _rms):
            if not norm(error) <= max(factor * norm(allowed), floor):
                failures.append(
                    f"{name}: {norm.__name__[1:]} error {norm(error):.3g}, "
                    f"allowed {max(factor * norm(allowed), floor):.3g}"
                )
                break
    return failures


def _largest(x: np.ndarray) -> float:
    return float(x.max(initial=0))


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0
