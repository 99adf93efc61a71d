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
from cases import Case

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Implementation:
    name: str
    function: Callable[..., jax.Array]  # (query, key, value, operands) -> output
    operands: Any  # what does not change between layers: a built mask, lengths and offsets


def packax_attention(case: Case) -> Implementation:
    segment_ids = jnp.asarray(case.segment_ids())
    mask = jax.jit(
        lambda ids: packax.create_attention_mask(packax.causal() & packax.documents(ids))
    )(segment_ids)
    return Implementation(
        "packax", lambda q, k, v, mask: packax.flash_attention(q, k, v, mask), mask
    )


def cudnn_attention(case: Case) -> Implementation:
    scale = case.head_dim**-0.5
    if case.documents == 1:

        def causal(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> jax.Array:
            return jax.nn.dot_product_attention(
                q, k, v, scale=scale, is_causal=True, implementation="cudnn"
            )

        return Implementation("cudnn", causal, ())

    from jax._src.cudnn import fused_attention_stablehlo as cudnn

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
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return tuple(
        jax.random.normal(key, (case.batch, case.seq, h, case.head_dim), jnp.bfloat16)
        for key, h in zip(keys, heads, strict=True)
    )


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

    def backward(self) -> Callable[[], Arrays]:
        """The backward alone: the jitted pullback; its residuals are in memory already."""
        query, key, value, cotangent = self.inputs

        @jax.jit
        def with_residuals(query, key, value, operands):
            return jax.vjp(
                lambda *x: self.implementation.function(*x, operands), query, key, value
            )[1]

        pullback = with_residuals(query, key, value, self.implementation.operands)
        function = jax.jit(lambda pullback, cotangent: pullback(cotangent))
        return lambda: function(pullback, cotangent)
