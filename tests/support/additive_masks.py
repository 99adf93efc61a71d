"""Biases that hide keys or rows as additive masks do (-inf, the lowest finite number, -1e9, ...),
and a check of attention with such biases against float64.

A row with only -inf attends to nothing. A row with only one finite value is the softmax of the
scores. The cotangents of rows that attend to nothing are NaN here, since they must be ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import score_oracle

KINDS = ("left 40", "left 64", "left 100", "left 200", "keys", "rows", "both")


def values_of(dtype: Any) -> dict[str, float]:
    """Hiding values by name. Only "-inf" is infinite: the others are clipped to the dtype."""
    least, most = (float(x) for x in (jnp.finfo(dtype).min, jnp.finfo(dtype).max))
    finite = {"least": least, "0.7 least": 0.7 * least, "-1e9": -1e9, "-1e4": -1e4, "most": most}
    return {"-inf": -np.inf} | {name: max(x, least) for name, x in finite.items()}


def hiding(kind: str, value: float, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """A bias of shape (B or 1, H or 1, Sq or 1, Skv) with `value` at the keys or rows of `kind`."""
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal(shape)
    if kind.startswith("left"):
        bias[..., : int(kind.split()[1])] = value
    if kind in ("keys", "both"):
        bias[..., rng.random(shape[-1]) < 0.4] = value
    if kind in ("rows", "both"):
        bias[:, :, rng.random(shape[2]) < 0.4] = value
    return bias


def biases(shape: tuple[int, ...], dtype: Any) -> Iterator[tuple[str, jax.Array]]:
    for kind in KINDS:
        if kind in ("rows", "both") and shape[2] == 1:
            continue
        for name, value in values_of(dtype).items():
            yield f"{kind} {name}", jnp.asarray(hiding(kind, value, shape), dtype)


def emptied(allowed: Any, bias: Any, shape: tuple[int, ...]) -> np.ndarray:
    """(B, H, Sq): the rows that attend to nothing."""
    some = oracle.of_heads(allowed) & (np.asarray(bias, np.float32) != -np.inf)
    return np.broadcast_to(~some.any(-1), shape)


def checker(attention: Callable[[Any], Any], allowed: Any) -> Callable[..., None]:
    """A function that checks `attention(arrays) -> (out, lse)` and its gradients."""

    @jax.jit
    def run(arrays, dout, dlse):
        return score_oracle.run(attention, arrays, dout, dlse)

    return functools.partial(_check, run, allowed)


def _check(
    run,
    allowed,
    arrays,
    dout,
    dlse,
    where,
    *,
    scale=None,
    soft_cap=None,
    factors=None,
    float32_products=False,
) -> None:
    """`scale`: a Python number, for a scale that is not among the differentiable arrays.
    `float32_products`: allow the bias gradient the rounding error of one float32 dot product."""
    idle = emptied(allowed, arrays["bias"], dlse.shape)
    by_row = idle.swapaxes(1, 2)[..., None]
    got = run(arrays, jnp.where(by_row, jnp.nan, dout), jnp.where(idle, jnp.nan, dlse))
    fixed = {} if scale is None else {"scale": jnp.float32(scale)}
    dout, dlse = np.where(by_row, 0, np.asarray(dout, np.float32)), np.where(idle, 0, dlse)
    oracles = functools.partial(score_oracle.true_and_plain, soft_cap=soft_cap, factors=factors)
    true, plain, _ = oracles(arrays | fixed, allowed, dout, dlse)
    # A bias beyond the range of the tensors' dtype would become infinite in plain attention.
    bias, limits = arrays["bias"], jnp.finfo(arrays["query"].dtype)
    if bool((jnp.isfinite(bias) & (jnp.abs(bias) > float(limits.max))).any()):
        clipped = jnp.clip(bias, float(limits.min), float(limits.max))
        clipped = jnp.where(jnp.isfinite(bias), clipped, bias)
        _, plain, _ = oracles(arrays | fixed | {"bias": clipped}, allowed, dout, dlse)
    for name in fixed:
        del true.gradients[name], plain.gradients[name]
    if float32_products:
        true_bias, plain_bias = (np.asarray(x.gradients["bias"], np.float64) for x in (true, plain))
        error = rounding_of_products(dout, arrays["value"])
        if error > np.abs(plain_bias - true_bias).max():
            plain.gradients["bias"] = true_bias + error
    compare(got, true, plain, idle, where)


def rounding_of_products(dout: Any, value: Any) -> float:
    """The largest error of a float32 dot product of a row of dout and a row of value.

    For a query with one key the gradient is 0. The kernels compute it as the difference of two such
    products, each with its own order of summation (docs/guide/numerics.md), whereas the plain
    implementation subtracts a number from itself.
    """
    dout = np.asarray(dout, np.float64)
    value = np.repeat(np.asarray(value, np.float64), dout.shape[2] // value.shape[2], axis=2)
    total = np.float64(0)
    for i in range(dout.shape[3]):  # fused multiply-adds, in order
        total = total + np.einsum("bqh,bkh->bhqk", dout[..., i], value[..., i])
        total = total.astype(np.float32).astype(np.float64)
    return float(np.abs(total - np.einsum("bqhd,bkhd->bhqk", dout, value)).max())


def compare(got: Any, true: Any, plain: Any, idle: np.ndarray, where: str) -> None:
    """Apply the rule of oracle.check to all results but the log-sum-exp. Here the log-sum-exp is so
    large that the rule would accept anything, so it is held to its rounding error instead."""
    by_row = idle.swapaxes(1, 2)[..., None]
    assert not np.any(np.where(by_row, got.out, 0)), where
    assert not np.any(np.where(by_row, got.gradients["query"], 0)), where
    found, wanted = np.asarray(got.lse, np.float64), np.asarray(true.lse, np.float64)
    np.testing.assert_array_equal(np.isneginf(found), idle, err_msg=where)
    error = np.abs(found[~idle] - wanted[~idle])
    # Float32 rounding, and twice the error of plain attention, which may be computed in 16 bits.
    close = np.abs(np.asarray(plain.lse, np.float64)[~idle] - wanted[~idle])
    close = 2 * close + 2.0**-22 * np.maximum(np.abs(wanted[~idle]), 16)
    assert (error <= close).all(), f"{where}: lse by {error.max()}"
    for results in (got, true, plain):
        for x in results.gradients.values():
            assert np.isfinite(np.asarray(x, np.float64)).all(), where
    try:
        score_oracle.check(*(x._replace(lse=np.zeros(1, np.float32)) for x in (got, true, plain)))
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from None
