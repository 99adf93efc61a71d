"""What is timed: packax and cuDNN as functions of (query, key, value, operands), and their passes.

cuDNN is called as a JAX user can reach it: through `jax.nn.dot_product_attention` for one causal
document, and through jax's private packed call where there are several (there is no public one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax

from lib.cases import Case

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Implementation:
    name: str
    function: Callable[..., jax.Array]  # (query, key, value, operands) -> output
    operands: Any  # what does not change between layers: a built mask, lengths and offsets


def packax_attention(case: Case, *, deterministic: bool = False) -> Implementation:
    segment_ids = jnp.asarray(case.segment_ids())
    mask = jax.jit(
        lambda ids: packax.create_attention_mask(packax.causal() & packax.documents(ids))
    )(segment_ids)
    options = (
        {"deterministic": True} if deterministic else {}
    )  # of old wheels (versus_wheel.py) no more is asked
    return Implementation(
        "deterministic" if deterministic else "packax",
        lambda q, k, v, mask: packax.flash_attention(q, k, v, mask, **options),
        mask,
    )


# cuDNN's backward of a packed row asks for 64.5 GiB at 64 documents in 32k: not tried with more.
MOST_DOCUMENTS = 64


def not_tried(case: Case) -> dict[str, str]:
    """Passes that cuDNN is not asked for, and why."""
    if case.documents <= MOST_DOCUMENTS:
        return {}
    return {"bwd": f"not tried with {case.documents} documents, for its workspace"}


def cudnn_attention(case: Case) -> Implementation:
    """Through jax.nn where that takes the shapes (one document, one head dim), else jax's private
    call."""
    scale = case.head_dim**-0.5
    if case.documents == 1 and case.value_dim == case.head_dim:

        def causal(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> jax.Array:
            return jax.nn.dot_product_attention(
                q, k, v, scale=scale, is_causal=True, implementation="cudnn"
            )

        return Implementation("cudnn", causal, ())

    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if case.documents == 1:

        def unequal(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> jax.Array:
            return cudnn.dot_product_attention(
                q, k, v, scale=scale, mask_type=cudnn.MaskType.CAUSAL
            )

        return Implementation("cudnn", unequal, ())

    edges = np.concatenate([[0], np.cumsum(case.lengths)])
    lengths = jnp.asarray(np.tile(case.lengths, (case.batch, 1)), jnp.int32)
    offsets = jnp.asarray(np.tile(edges, (case.batch, 1)), jnp.int32)

    def packed(q: jax.Array, k: jax.Array, v: jax.Array, operands: Arrays) -> jax.Array:
        lengths, offsets = operands
        return cudnn.dot_product_attention(
            q,
            k,
            v,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=offsets,
            kv_offsets=offsets,
            scale=scale,
            mask_type=cudnn.MaskType.PADDING_CAUSAL,
        )

    return Implementation("cudnn", packed, (lengths, offsets))


def random_inputs(case: Case, seed: int = 0) -> Arrays:
    """query, key, value and the output's cotangent: bfloat16, normally distributed."""
    keys = jax.random.split(jax.random.key(seed), 4)
    qk, v = case.head_dim, case.value_dim
    sizes = ((case.heads, qk), (case.kv_heads, qk), (case.kv_heads, v), (case.heads, v))
    return tuple(
        jax.random.normal(key, (case.batch, case.seq, *size), jnp.bfloat16)
        for key, size in zip(keys, sizes, strict=True)
    )


LOOP = 20  # passes in a call of work that is shorter than a dispatch


def touched(x: jax.Array, by: jax.Array) -> jax.Array:
    """x, but only once `by` is there: one element is written."""
    at = (0,) * x.ndim
    return x.at[at].add((by[at] * 0).astype(x.dtype))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The jitted passes of one implementation, with its inputs bound."""

    implementation: Implementation
    inputs: Arrays

    def forward(self) -> Callable[[], jax.Array]:
        query, key, value, _ = self.inputs
        function = jax.jit(self.implementation.function)
        return lambda: function(query, key, value, self.implementation.operands)

    def both(self) -> Callable[[], tuple[jax.Array, Arrays]]:
        """Forward and backward in one jitted call."""

        @jax.jit
        def function(query, key, value, operands, cotangent):
            out, pullback = jax.vjp(
                lambda *x: self.implementation.function(*x, operands), query, key, value
            )
            return out, pullback(cotangent)

        query, key, value, cotangent = self.inputs
        return lambda: function(query, key, value, self.implementation.operands, cotangent)

    def pullback(self) -> Any:
        """The backward with its residuals in memory, as jax.vjp gives it."""
        query, key, value, _ = self.inputs

        @jax.jit
        def with_residuals(query, key, value, operands):
            return jax.vjp(
                lambda *x: self.implementation.function(*x, operands), query, key, value
            )[1]

        return with_residuals(query, key, value, self.implementation.operands)

    def backward(self) -> Callable[[], Arrays]:
        """The backward alone: the jitted pullback."""
        pullback, cotangent = self.pullback(), self.inputs[3]
        function = jax.jit(lambda pullback, cotangent: pullback(cotangent))
        return lambda: function(pullback, cotangent)

    def forward_loop(self, count: int) -> Callable[[], jax.Array]:
        """`count` forward passes in one call, one after the other: for work shorter than a
        dispatch."""
        query, key, value, _ = self.inputs

        @jax.jit
        def function(query, key, value, operands):
            def step(_: Any, query: jax.Array) -> jax.Array:
                return touched(query, self.implementation.function(query, key, value, operands))

            return jax.lax.fori_loop(0, count, step, query)

        return lambda: function(query, key, value, self.implementation.operands)

    def backward_loop(self, count: int) -> Callable[[], jax.Array]:
        pullback, cotangent = self.pullback(), self.inputs[3]

        @jax.jit
        def function(pullback, cotangent):
            def step(_: Any, cotangent: jax.Array) -> jax.Array:
                for gradient in pullback(cotangent):
                    cotangent = touched(cotangent, gradient)
                return cotangent

            return jax.lax.fori_loop(0, count, step, cotangent)

        return lambda: function(pullback, cotangent)
