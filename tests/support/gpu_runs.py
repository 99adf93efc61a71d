"""Runs the kernels for the GPU tests and compares their results.

`run` first poisons the memory that the results will use, so that an element no kernel writes is a
NaN. numpy creates the arrays, because jax would compile a program for every shape, which takes half
the time of a short test on a CPU; large arrays are created on the GPU. oracle.py judges the
results: at most twice the error of plain attention in the same dtype.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packax
from oracle import Results
from packax import _ext

MANY = 2**26  # elements


class Tensors(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array
    dlse: jax.Array


def has_hopper_kernels() -> bool:
    """False also on Hopper with a proxy build (docs/internals/proxy.md): it has no sm90 kernels."""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return capability == "9.0" and any("sm90" in v["kernel"] for v in _ext.variants())


def tensors(batch, q_len, kv_len, heads, kv_heads, dims, dtype, seed=0) -> Tensors:
    """`dims`: (head dim of query and key, head dim of value), or one number for both."""
    qk_dim, v_dim = (dims, dims) if isinstance(dims, int) else dims
    rng = np.random.default_rng(seed)
    rows, columns = (q_len, heads), (kv_len, kv_heads)
    shapes = [(*rows, qk_dim), (*columns, qk_dim), (*columns, v_dim), (*rows, v_dim)]

    def normal(shape, dtype):
        shape = (batch, *shape)
        if math.prod(shape) > MANY:
            drawn = jax.random.normal(jax.random.key(rng.integers(2**31)), shape, jnp.float32)
            return drawn.astype(dtype)
        return jnp.asarray(rng.standard_normal(shape).astype(jnp.dtype(dtype)))

    return Tensors(*(normal(shape, dtype) for shape in shapes), normal((heads, q_len), jnp.float32))


def poison(x: Tensors) -> None:
    """Fill buffers of the sizes that the results need with NaNs, and free them to the pool."""
    batch, q_len, heads, _ = x.query.shape
    kinds = [((batch, heads, q_len), np.dtype(np.float32))] * 4
    kinds += [(y.shape, y.dtype) for y in x[:4] for _ in "12"]
    workspace = (4 * batch, q_len + 64, heads, x.query.shape[3])
    kinds.append((workspace, np.dtype(np.float32)))
    buffers = [jnp.asarray(np.full(shape, np.nan, dtype)) for shape, dtype in kinds]
    jax.block_until_ready(buffers)
    for y in buffers:
        y.delete()


@functools.partial(
    jax.jit, static_argnames=("scale", "implementation", "deterministic", "soft_cap")
)
def passes(
    x: Tensors,
    mask: Any,
    scale: float | None,
    implementation: str,
    deterministic: bool = False,
    soft_cap: float | None = None,
) -> Results:
    def attention(query, key, value):
        return packax.flash_attention(
            query,
            key,
            value,
            mask,
            scale=scale,
            return_lse=True,
            deterministic=deterministic,
            soft_cap=soft_cap,
            implementation=implementation,
        )

    (out, lse), pullback = jax.vjp(attention, x.query, x.key, x.value)
    return Results(out, lse, *pullback((x.dout, x.dlse)))


def build(expression: Any, x: Tensors) -> packax.AttentionMask:
    return packax.create_attention_mask(expression, q_len=x.query.shape[1], kv_len=x.key.shape[1])


def run(
    x: Tensors,
    expression: Any,
    scale: float | None = None,
    deterministic: bool = False,
    soft_cap: float | None = None,
) -> Results:
    """Output, LSE and gradients from the CUDA kernels, in poisoned memory. `expression` may also be
    an AttentionMask."""
    mask = expression
    if not isinstance(expression, packax.AttentionMask):
        mask = build(expression, x)
    jax.block_until_ready(mask)
    poison(x)
    return jax.block_until_ready(passes(x, mask, scale, "cuda", deterministic, soft_cap))


_plain = oracle.plain


def assert_close(
    x: Tensors, got: Results, allowed: Any, scale: float | None = None, pad: int = 0
) -> None:
    """Check against the oracle. With `pad`, plain attention runs on operands padded to that length,
    so that many lengths share one compiled program."""
    scale = x.query.shape[-1] ** -0.5 if scale is None else scale
    allowed = np.asarray(allowed)
    true = oracle.exact(x.query, x.key, x.value, allowed, scale, x.dout, x.dlse)
    if not pad:
        plain = _plain(x.query, x.key, x.value, allowed, scale, x.dout, x.dlse)
    else:
        q_len, kv_len = x.query.shape[1], x.key.shape[1]
        query, key, value, dout = (_pad(y, 1, pad) for y in x[:4])
        wide = np.zeros((*allowed.shape[:-2], pad, pad), bool)
        wide[..., :q_len, :kv_len] = allowed
        wide = jax.tree.map(
            np.asarray, _plain(query, key, value, wide, scale, dout, _pad(x.dlse, 2, pad))
        )
        plain = Results(
            wide.out[:, :q_len],
            wide.lse[:, :, :q_len],
            wide.dq[:, :q_len],
            wide.dk[:, :kv_len],
            wide.dv[:, :kv_len],
        )
    oracle.check(got, true, plain)


def _pad(y: jax.Array, axis: int, length: int) -> jax.Array:
    widths = [(0, length - n if i == axis else 0) for i, n in enumerate(y.shape)]
    return jnp.asarray(np.pad(np.asarray(y), widths))


def assert_identical(got: Any, expected: Any, what: str) -> None:
    """Bit for bit equality, NaNs included; reports the first difference."""
    paths, _ = jax.tree_util.tree_flatten_with_path(got)
    for (path, x), y in zip(paths, jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape, f"{what}{jax.tree_util.keystr(path)}: {x.shape}, {y.shape}"
        bits = np.dtype(f"u{x.dtype.itemsize}")
        different = np.argwhere(np.atleast_1d(x.view(bits) != y.view(bits)))
        if len(different):
            first = tuple(map(int, different[0]))
            raise AssertionError(
                f"{what}{jax.tree_util.keystr(path)}: {len(different)} of {x.size} differ, "
                f"first at {first}: {np.atleast_1d(x)[first]} and {np.atleast_1d(y)[first]}"
            )


def assert_agree(got: Results, expected: Results) -> None:
    """Compare two kinds of kernels, with a much tighter bound than either has alone."""
    for name, a, b in zip(Results._fields, got, expected, strict=True):
        a, b = (np.asarray(y, np.float64) for y in (a, b))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        difference = np.linalg.norm(a[finite] - b[finite])
        assert difference <= 1e-2 * np.linalg.norm(b[finite]), name


def same_each_run(x: Results, deterministic: bool) -> Results:
    """Drop dq unless deterministic: Hopper's kernels then sum it in varying order."""
    return x if deterministic else x._replace(dq=np.zeros(()))


def packed(*lengths: int) -> np.ndarray:
    """Segment ids of runs: a positive length starts a document, a negative length is padding."""
    ids, document = [], 0
    for length in lengths:
        document += length > 0
        ids.append(np.full(abs(length), document if length > 0 else -1))
    return np.concatenate(ids).astype(np.int32)
