"""A small byte-level transformer in plain JAX: pre-norm, grouped queries, RoPE, SwiGLU.

Parameters are a pytree of arrays. Layers are stacked along a leading axis and run in one `scan`.
Each layer is rematerialized except for packax's named output and log-sum-exp, so the backward pass
does not run the forward attention again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import packax

Parameters = dict[str, Any]
Batch = dict[str, Any]  # arrays (batch, length)


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # width of the SwiGLU
    dtype: Any = jnp.float32  # of activations; parameters are float32
    rope_base: float = 10000.0


def initialize(config: Config, key: jax.Array) -> Parameters:
    keys = iter(jax.random.split(key, 8))
    layers, width = config.layers, config.width
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def normal(*shape: int, fan_in: int, gain: float = 1.0) -> jax.Array:
        return gain * fan_in**-0.5 * jax.random.normal(next(keys), shape)

    residual = (2 * layers) ** -0.5  # keeps the residual stream's variance near 1 at any depth
    return {
        "embedding": normal(config.vocabulary, width, fan_in=1, gain=0.7),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "query_key_value": normal(layers, width, q_width + 2 * kv_width, fan_in=width),
            "attention_out": normal(layers, q_width, width, fan_in=q_width, gain=residual),
            "mlp_norm": jnp.ones((layers, width)),
            "gate_up": normal(layers, width, 2 * config.hidden, fan_in=width),
            "down": normal(layers, config.hidden, width, fan_in=config.hidden, gain=residual),
        },
        "norm": jnp.ones(width),
        "unembedding": normal(width, config.vocabulary, fan_in=width, gain=0.5),
    }


def count(parameters: Parameters) -> int:
    return sum(x.size for x in jax.tree.leaves(parameters))


def logits(
    parameters: Parameters,
    tokens: jax.Array,
    positions: jax.Array,
    mask: packax.AttentionMask,
    config: Config,
) -> jax.Array:
    """(batch, length, vocabulary) float32 for tokens and positions (batch, length)."""
    return transform(parameters, parameters["embedding"][tokens], positions, mask, config)


def transform(
    parameters: Parameters,
    x: jax.Array,
    positions: jax.Array,
    mask: packax.AttentionMask,
    config: Config,
) -> jax.Array:
    """Like `logits`, from embedded tokens (batch, length, width)."""
    angles = rope_angles(positions, config)

    def layer(x: jax.Array, weights: Parameters) -> tuple[jax.Array, None]:
        y = normalize(x, weights["attention_norm"])
        out = packax.flash_attention(*heads(weights, y, angles, config), mask)
        x = x + jnp.dot(out.reshape(*out.shape[:2], -1), weights["attention_out"])
        x = x + mlp(weights, normalize(x, weights["mlp_norm"]))
        return x, None

    policy = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
    weights = jax.tree.map(lambda w: w.astype(config.dtype), parameters["layers"])
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x.astype(config.dtype), weights)
    x = normalize(x, parameters["norm"].astype(config.dtype))
    return jnp.dot(x, parameters["unembedding"].astype(config.dtype)).astype(jnp.float32)


def heads(
    weights: Parameters, x: jax.Array, angles: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of a layer, (batch, length, heads, head_dim), with RoPE applied."""
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    split = jnp.split(
        jnp.dot(x, weights["query_key_value"]), [q_width, q_width + kv_width], axis=-1
    )
    query, key, value = (part.reshape(*x.shape[:2], -1, config.head_dim) for part in split)
    return rotate(query, angles), rotate(key, angles), value


def mlp(weights: Parameters, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(jnp.dot(x, weights["gate_up"]), 2, axis=-1)
    return jnp.dot(jax.nn.silu(gate) * up, weights["down"])


def normalize(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Root-mean-square norm, in float32."""
    full = x.astype(jnp.float32)
    full = full * jax.lax.rsqrt(jnp.mean(full * full, axis=-1, keepdims=True) + 1e-6)
    return full.astype(x.dtype) * weight


def rope_angles(positions: jax.Array, config: Config) -> jax.Array:
    """(batch, length, 1, head_dim / 2), from positions that restart in every document."""
    exponents = jnp.arange(0, config.head_dim, 2) / config.head_dim
    return (positions[..., None, None] * config.rope_base**-exponents).astype(jnp.float32)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(
        x.dtype
    )


def loss(
    parameters: Parameters, batch: Batch, mask: packax.AttentionMask, config: Config
) -> jax.Array:
    """Mean cross entropy, in nats, over tokens with a next byte in their document."""
    scores = logits(parameters, batch["tokens"], batch["positions"], mask, config)
    losses, weight = token_losses(scores, batch["following"]), batch["weight"]
    return jnp.sum(losses * weight) / jnp.sum(weight)


def token_losses(scores: jax.Array, following: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(scores, following[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - picked
