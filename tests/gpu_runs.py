"""How the GPU tests run the kernels, and what they compare with. Imported by test_gpu.py only.

`run` poisons the memory that results will get, so that an element which no kernel wrote is a NaN.
`exact` is float32 at the highest precision, `plain` the same formulas in the operands' dtype: the
tolerance of every comparison is twice plain's error.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import packax

FLOOR = 2e-5  # of the largest value: where plain is exact by luck, as in a document of one token


class Results(NamedTuple):
    out: jax.Array
    lse: jax.Array
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


class Tensors(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array
    dlse: jax.Array


def tensors(batch, q_len, kv_len, heads, kv_heads, dim, dtype, seed=0) -> Tensors:
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = [(q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads), (q_len, heads)]
    four = (
        jax.random.normal(key, (batch, length, n, dim), jnp.float32).astype(dtype)
        for key, (length, n) in zip(keys, shapes, strict=False)
    )
    return Tensors(*four, jax.random.normal(keys[4], (batch, heads, q_len), jnp.float32))


def poison(x: Tensors) -> None:
    """NaNs into memory of the sizes that the results will ask for, and back to the pool."""
    batch, q_len, heads, _ = x.query.shape
    held = [jnp.full((batch, heads, q_len), jnp.nan, jnp.float32) for _ in range(4)]
    held += [jnp.full(y.shape, jnp.nan, y.dtype) for y in (x.query, x.key, x.value) for _ in "12"]
    jax.block_until_ready(held)
    for y in held:
        y.delete()


@functools.partial(jax.jit, static_argnames=("scale", "implementation"))
def passes(x: Tensors, mask: Any, scale: float | None, implementation: str) -> Results:
    def attention(query, key, value):
        return packax.flash_attention(
            query, key, value, mask, scale=scale, return_lse=True, implementation=implementation
        )

    (out, lse), pullback = jax.vjp(attention, x.query, x.key, x.value)
    return Results(out, lse, *pullback((x.dout, x.dlse)))


def build(expression: Any, x: Tensors) -> packax.AttentionMask:
    return packax.create_attention_mask(expression, q_len=x.query.shape[1], kv_len=x.key.shape[1])


def run(x: Tensors, expression: Any, scale: float | None = None) -> Results:
    """Forward, LSE and gradients by the cubins, in poisoned memory. `expression`, or a mask."""
    mask = expression
    if not isinstance(expression, packax.AttentionMask):
        mask = build(expression, x)
    jax.block_until_ready(mask)
    poison(x)
    return jax.block_until_ready(passes(x, mask, scale, "cubin"))


@functools.partial(jax.jit, static_argnames=("scale", "dtype"))
def dense(x: Tensors, attends: jax.Array, scale: float, dtype: Any) -> Results:
    """Quadratic attention, every intermediate in `dtype`; attends is (B or 1, Sq, Skv).

    Cotangents of rows that attend nothing are ignored, and so is what such rows give: out 0.
    """
    group = x.query.shape[2] // x.key.shape[2]
    rows = attends.any(-1)
    dout = jnp.where(rows[..., None, None], x.dout, 0).astype(dtype)
    dlse = jnp.where(rows[:, None], x.dlse, 0).astype(dtype)

    def attention(query, key, value):
        key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * scale
        scores = jnp.where(attends[:, None], scores.astype(dtype), jnp.finfo(dtype).min)
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        p = jnp.where(attends[:, None], jnp.exp(scores - top), 0)
        total = jnp.where(rows[:, None], p.sum(-1), 1)
        out = jnp.einsum("bhqk,bkhd->bqhd", p / total[..., None], value, precision="highest")
        return out, jnp.log(total) + top[..., 0]

    operands = (y.astype(dtype) for y in (x.query, x.key, x.value))
    (out, lse), pullback = jax.vjp(attention, *operands)
    return Results(out, jnp.where(rows[:, None], lse, -jnp.inf), *pullback((dout, dlse)))


def assert_close(x: Tensors, got: Results, attends: Any, scale: float | None = None) -> None:
    """Every result at most twice as far from float32 as plain attention in the same dtype."""
    attends = jnp.asarray(attends)
    attends = attends if attends.ndim == 3 else attends[None]
    scale = x.query.shape[-1] ** -0.5 if scale is None else scale
    exact = dense(x, attends, scale, jnp.float32)
    plain = dense(x, attends, scale, x.query.dtype)
    problems = []
    for name, y, truth, same_dtype in zip(Results._fields, got, exact, plain, strict=True):
        y, truth, same_dtype = (np.asarray(a, np.float32) for a in (y, truth, same_dtype))
        empty = np.isneginf(truth)
        if name == "lse" and not np.array_equal(np.isneginf(y), empty):
            problems.append("lse: -inf where a row attends something, or the other way round")
            continue
        y, truth, same_dtype = (np.where(empty, 0, a) for a in (y, truth, same_dtype))
        floor = FLOOR * max(1.0, float(np.abs(truth).max()))
        for kind, norm in (("max", np.max), ("rms", lambda a: np.sqrt(np.mean(a * a)))):
            error, limit = (float(norm(np.abs(a - truth))) for a in (y, same_dtype))
            if not error <= 2 * limit + floor:  # a NaN fails
                where = np.unravel_index(
                    np.argmax(np.nan_to_num(np.abs(y - truth), nan=1e30)), y.shape
                )
                problems.append(
                    f"{name}: {kind} error {error:.2e}, plain {limit:.2e}; at "
                    f"{tuple(map(int, where))} got {y[where]}, exact {truth[where]}"
                )
    assert not problems, "\n".join(problems)


def assert_identical(got: Any, expected: Any, what: str) -> None:
    """Bit for bit, NaNs included; names the first difference."""
    paths, _ = jax.tree_util.tree_flatten_with_path(got)
    for (path, x), y in zip(paths, jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape, f"{what}{jax.tree_util.keystr(path)}: {x.shape}, {y.shape}"
        bits = np.dtype(f"u{x.dtype.itemsize}")
        different = np.argwhere(np.atleast_1d(x.view(bits) != y.view(bits)))
        if len(different):
            first = tuple(map(int, different[0]))
            raise AssertionError(
                f"{what}{jax.tree_util.keystr(path)}: {len(different)} of {x.size} differ, first at "
                f"{first}: {np.atleast_1d(x)[first]} and {np.atleast_1d(y)[first]}"
            )


def packed(*lengths: int) -> np.ndarray:
    """Segment ids of runs: a positive length is a new document, a negative one padding."""
    ids, document = [], 0
    for length in lengths:
        document += length > 0
        ids.append(np.full(abs(length), document if length > 0 else -1))
    return np.concatenate(ids).astype(np.int32)
