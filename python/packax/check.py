"""`python -m packax check`: checks packax's results on this machine and measures its speed.

The output is one block of text to paste into an issue. Every case is compared with a dense float32
reference. A case is correct if its error is at most twice the error of plain attention in the same
dtype. Speed is the median time of single calls, with that of cuDNN if jax supports it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import packax
from packax import info

LENGTH = 500  # not a multiple of any tile size
BFLOAT16, FLOAT16 = jnp.bfloat16, jnp.float16


def documents(length: int, count: int) -> np.ndarray:
    """The segment ids of a packed row, with padding at the end."""
    edges = np.sort(np.random.default_rng(0).choice(np.arange(1, length - 8), count - 1, False))
    ids = np.searchsorted(edges, np.arange(length), side="right").astype(np.int32)
    ids[-7:] = packax.PADDING_SEGMENT_ID
    return ids


# name, dtype, head_dim, query heads, key/value heads, mask, options
CASES: tuple[tuple[str, Any, int, int, int, Any, dict[str, Any]], ...] = (
    ("causal", BFLOAT16, 64, 4, 4, packax.causal(), {}),
    ("causal, grouped heads", BFLOAT16, 128, 8, 2, packax.causal(), {}),
    ("causal, float16", FLOAT16, 128, 4, 1, packax.causal(), {}),
    ("full", BFLOAT16, 64, 4, 2, packax.full(), {}),
    ("window", BFLOAT16, 128, 4, 4, packax.sliding_window(100, 0), {}),
    *(
        (
            *(f"documents, head dim {dim}", BFLOAT16, dim, 4, 2),
            *(packax.causal() & packax.documents(documents(LENGTH, 7)), {}),
        )
        for dim in (64, 96, 128, 256)
    ),
    ("ids that reappear", BFLOAT16, 64, 4, 4, packax.documents(np.arange(LENGTH) // 50 % 3), {}),
    ("soft cap", BFLOAT16, 128, 4, 2, packax.causal(), {"soft_cap": 2.0}),
    ("deterministic", BFLOAT16, 128, 4, 2, packax.causal(), {"deterministic": True}),
)
# name, length, head_dim, documents
TIMED = (("causal", 8192, 128, 1), ("causal", 8192, 64, 1), ("documents", 16384, 128, 12))


def tensors(length: int, heads: int, kv_heads: int, dim: int, dtype: Any) -> list[jax.Array]:
    """Query, key, value and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def dense(attends: jax.Array, soft_cap: float | None) -> Callable[..., jax.Array]:
    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, precision="highest")
        scores *= query.shape[3] ** -0.5
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        weights = jax.nn.softmax(jnp.where(attends, scores, -jnp.inf), -1, where=attends)
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, value, precision="highest")
        return out.reshape(query.shape)

    return attention


def results(
    attention: Callable[..., jax.Array], operands: list[jax.Array], dtype: Any
) -> list[jax.Array]:
    """The output and all gradients."""

    def both(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(attention, query, key, value)
        return out, *pullback(cotangent)

    return list(jax.jit(both)(*(x.astype(dtype) for x in operands)))


def error(got: jax.Array, want: jax.Array) -> float:
    difference = jnp.linalg.norm((got.astype(jnp.float32) - want).ravel())
    return float(difference / jnp.linalg.norm(want.ravel()))


def correctness() -> Iterator[tuple[bool, str]]:
    """For each case, whether it is correct and a line of text."""
    for name, dtype, dim, heads, kv_heads, expression, options in CASES:
        operands = tensors(LENGTH, heads, kv_heads, dim, dtype)
        attends = jnp.asarray(expression.as_array(LENGTH, LENGTH))
        attends = attends.reshape(-1, 1, 1, LENGTH, LENGTH)
        mask = packax.create_attention_mask(expression, q_len=LENGTH, kv_len=LENGTH)

        def ours(q: Any, k: Any, v: Any, mask: Any = mask, options: Any = options) -> jax.Array:
            return packax.flash_attention(q, k, v, mask, **options)

        reference = dense(attends, options.get("soft_cap"))
        want = results(reference, operands, jnp.float32)
        plain = results(reference, operands, dtype)
        got = results(ours, operands, dtype)
        shares = [
            error(g, w) / max(2 * error(p, w), 1e-6)
            for g, w, p in zip(got, want, plain, strict=True)
        ]
        right = max(shares) <= 1  # False for NaN
        text = f"{2 * max(shares):.2f}"
        if options.get("deterministic"):
            again = results(ours, operands, dtype)
            same = all(bool((a == b).all()) for a, b in zip(got, again, strict=True))
            right, text = (
                right and same,
                text + (", bit-identical" if same else ", NOT BIT-IDENTICAL"),
            )
        yield right, f"  {'ok   ' if right else 'WRONG'} {name}: {text}"


def median_ms(call: Callable[[], Any], calls: int) -> float:
    took = []
    for i in range(calls + 2):
        began = time.perf_counter()
        jax.block_until_ready(call())
        if i > 1:
            took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def train(attention: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    """The gradients, which also require the forward pass."""
    return jax.vjp(attention, *operands[:3])[1](operands[3])


def speed(on_gpu: bool) -> Iterator[str]:
    for name, length, dim, count in TIMED:
        length = length if on_gpu else 512
        operands = tensors(length, 16, 4, dim, BFLOAT16)
        expression = packax.causal()
        if count > 1:
            expression &= packax.documents(documents(length, count))
        mask = packax.create_attention_mask(expression, q_len=length, kv_len=length)
        calls: dict[str, Callable[..., jax.Array]] = {
            "packax": lambda q, k, v, mask=mask: packax.flash_attention(q, k, v, mask)
        }
        if on_gpu and count == 1:
            calls["cuDNN"] = cudnn
        for who, attention in calls.items():
            try:
                backward = jax.jit(functools.partial(train, attention))
                once = 10 if on_gpu else 1
                times = [
                    median_ms(functools.partial(jax.jit(attention), *operands[:3]), once),
                    median_ms(functools.partial(backward, *operands), once),
                ]
                text = f"forward {times[0]:.3f} ms, forward and backward {times[1]:.3f} ms"
            except Exception as failure:  # cuDNN does not support every GPU and head dim
                text = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:80]}"
            yield f"  {name} {length}, head dim {dim}, {who}: {text}"


def run() -> int:
    report = info.gather()
    on_gpu = jax.default_backend() == "gpu"
    print(info.render(report))
    print(f"\ncorrectness, {'CUDA kernels' if on_gpu else 'XLA: jax has no GPU here'}")
    print("(error divided by that of plain attention in the same dtype; at most 2 is accepted):")
    wrong = 0
    for right, line in correctness():
        wrong += not right
        print(line, flush=True)
    print("speed (bfloat16, 16 query heads, 4 key/value heads; calls do not overlap):")
    for line in speed(on_gpu):
        print(line, flush=True)
    print(
        f"\n{f'{wrong} cases FAILED: please open an issue' if wrong else 'all cases are correct'}"
    )
    return 1 if wrong else 0
