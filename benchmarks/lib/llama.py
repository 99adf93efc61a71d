"""A Llama in plain JAX, for training steps: shapes of Llama-3-8B, layers in a scan, AdamW in
float32.

Parameters and moments are float32, activations bfloat16. Every layer is rematerialised; the loss
is summed over chunks of the row, so that no logits of a whole row are in memory. With several
attentions, layers use them in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = dict[str, Any]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
RATE, DECAYS, SMALL, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 14336
    vocabulary: int = 128256
    rope_base: float = 500000.0
    chunk: int = 4096  # rows of logits at a time, on each device
    shards: int = 1  # of the row
    dtype: Any = jnp.bfloat16

    def matrices(self) -> tuple[int, int]:
        """Elements of a layer's matrices, and of the last one."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.width * (heads + 3 * self.hidden), self.width * self.vocabulary


def initialize(config: Config, key: jax.Array) -> Tree:
    """The training state: parameters, both moments, and the number of steps made."""
    width, queries = config.width, config.heads * config.head_dim
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int) -> jax.Array:
        return shape[-2] ** -0.5 * jax.random.normal(next(keys), shape)

    layers = config.layers
    parameters = {
        "embedding": jax.random.normal(next(keys), (config.vocabulary, width)),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "query_key_value": normal(
                layers, width, queries + 2 * config.kv_heads * config.head_dim
            ),
            "out": normal(layers, queries, width),
            "mlp_norm": jnp.ones((layers, width)),
            "gate_up": normal(layers, width, 2 * config.hidden),
            "down": normal(layers, config.hidden, width),
        },
        "norm": jnp.ones(width),
        "unembedding": normal(width, config.vocabulary),
    }
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return {
        "parameters": parameters,
        "mean": zeros,
        "square": jax.tree.map(jnp.zeros_like, parameters),
        "count": jnp.zeros((), jnp.int32),
    }


def normalized(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


def rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    left, right = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    return turned.astype(x.dtype)


def block(
    x: jax.Array, layer: Tree, angles: jax.Array, attention: Attention, config: Config
) -> jax.Array:
    layer = jax.tree.map(lambda w: w.astype(config.dtype), layer)
    y = normalized(x, layer["attention_norm"]) @ layer["query_key_value"]
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    query, key, value = (
        part.reshape(*x.shape[:2], -1, config.head_dim)
        for part in jnp.split(y, [queries, queries + keys], -1)
    )
    out = attention(rotated(query, angles), rotated(key, angles), value)
    x = x + out.reshape(*x.shape[:2], -1) @ layer["out"]
    gate, up = jnp.split(normalized(x, layer["mlp_norm"]) @ layer["gate_up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ layer["down"]


def loss(
    parameters: Tree,
    batch: Tree,
    attention: Attention | tuple[Attention, ...],
    policy: Any,
    config: Config,
) -> jax.Array:
    """Mean cross entropy, in nats. batch: tokens, targets, positions, each (batch, length)."""
    attentions = attention if isinstance(attention, tuple) else (attention,)
    frequencies = config.rope_base ** -jnp.linspace(0, 1, config.head_dim // 2, endpoint=False)
    angles = batch["positions"][..., None, None] * frequencies

    def period(x: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
        for n, attention in enumerate(attentions):

            def layer(x: jax.Array, weights: Tree, attention: Attention = attention) -> jax.Array:
                return block(x, weights, angles, attention, config)

            x = jax.checkpoint(layer, policy=policy)(x, jax.tree.map(lambda w, n=n: w[n], weights))
        return x, None

    x = parameters["embedding"].astype(config.dtype)[batch["tokens"]]
    periods = jax.tree.map(
        lambda w: w.reshape(-1, len(attentions), *w.shape[1:]), parameters["layers"]
    )
    x, _ = jax.lax.scan(period, x, periods)
    x = normalized(x, parameters["norm"])
    unembedding = parameters["unembedding"].astype(config.dtype)

    @jax.checkpoint
    def chunk(total: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, targets = rows
        logits = (x @ unembedding).astype(jnp.float32)  # so that their cotangent is bfloat16, too
        picked = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
        return total + jnp.sum(jax.nn.logsumexp(logits, 1) - picked), None

    def by_chunk(x: jax.Array) -> jax.Array:  # of each device's rows
        size = min(config.chunk, x.shape[1] // config.shards)
        parts = x.reshape(config.shards, -1, size, *x.shape[2:]).swapaxes(0, 1)
        return parts.reshape(parts.shape[0], -1, *x.shape[2:])

    rows = by_chunk(x), by_chunk(batch["targets"])
    total, _ = jax.lax.scan(chunk, jnp.zeros((), jnp.float32), rows)
    return total / batch["targets"].size


def updated(state: Tree, gradients: Tree) -> Tree:
    """AdamW."""
    count = state["count"] + 1
    first, second = DECAYS
    mean = jax.tree.map(lambda m, g: first * m + (1 - first) * g, state["mean"], gradients)
    square = jax.tree.map(
        lambda s, g: second * s + (1 - second) * g * g, state["square"], gradients
    )
    unbiased = [1 - decay ** count.astype(jnp.float32) for decay in DECAYS]

    def moved(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        size = jnp.sqrt(s / unbiased[1]) + SMALL
        return p - RATE * (m / unbiased[0] / size + WEIGHT_DECAY * p)

    parameters = jax.tree.map(moved, state["parameters"], mean, square)
    return {"parameters": parameters, "mean": mean, "square": square, "count": count}
