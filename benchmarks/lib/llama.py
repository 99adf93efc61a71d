"""A Llama in plain JAX for training steps: the demo's model with Llama-3-8B's shapes, and AdamW.

Parameters and moments are float32, activations bfloat16. Every layer is rematerialized. The loss is
summed over chunks of the row, so that the logits of a whole row are never in memory. With several
attentions, layers use them in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from packax.demo import model

Tree = dict[str, Any]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
RATE, DECAYS, SMALL, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
LLAMA_3_8B = {
    "vocabulary": 128256,
    "width": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "hidden": 14336,
    "rope_base": 500000.0,
    "dtype": jnp.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class Config(model.Config):
    chunk: int = 4096  # rows of logits in memory at a time, per device
    shards: int = 1  # the number of devices over which the row is sharded

    def matrices(self) -> tuple[int, int]:
        """The numbers of elements of a layer's matrices, and of the unembedding."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.width * (heads + 3 * self.hidden), self.width * self.vocabulary


def config_of(layers: int, **shapes: Any) -> Config:
    return Config(**LLAMA_3_8B | {"layers": layers} | shapes)


def initialize(config: Config, key: jax.Array) -> Tree:
    """The training state: parameters, both moments, and the step count."""
    parameters = model.initialize(config, key)
    return {
        "parameters": parameters,
        "mean": jax.tree.map(jnp.zeros_like, parameters),
        "square": jax.tree.map(jnp.zeros_like, parameters),
        "count": jnp.zeros((), jnp.int32),
    }


def block(
    x: jax.Array, layer: Tree, angles: jax.Array, attention: Attention, config: Config
) -> jax.Array:
    layer = jax.tree.map(lambda w: w.astype(config.dtype), layer)
    y = model.normalize(x, layer["attention_norm"])
    out = attention(*model.heads(layer, y, angles, config))
    x = x + out.reshape(*x.shape[:2], -1) @ layer["attention_out"]
    return x + model.mlp(layer, model.normalize(x, layer["mlp_norm"]))


def loss(
    parameters: Tree,
    batch: Tree,
    attention: Attention | tuple[Attention, ...],
    policy: Any,
    config: Config,
) -> jax.Array:
    """Mean cross entropy, in nats. batch: tokens, targets, positions, each (batch, length)."""
    attentions = attention if isinstance(attention, tuple) else (attention,)
    angles = model.rope_angles(batch["positions"], config)

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
    x = model.normalize(x, parameters["norm"].astype(config.dtype))
    unembedding = parameters["unembedding"].astype(config.dtype)

    @jax.checkpoint
    def chunk(total: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, targets = rows
        logits = (x @ unembedding).astype(jnp.float32)  # the product's cotangent is bfloat16
        return total + jnp.sum(model.token_losses(logits, targets)), None

    def by_chunk(x: jax.Array) -> jax.Array:  # a chunk has rows of every device
        size = min(config.chunk, x.shape[1] // config.shards)
        parts = x.reshape(config.shards, -1, size, *x.shape[2:]).swapaxes(0, 1)
        return parts.reshape(parts.shape[0], -1, *x.shape[2:])

    rows = by_chunk(x), by_chunk(batch["targets"])
    total, _ = jax.lax.scan(chunk, jnp.zeros((), jnp.float32), rows)
    return total / batch["targets"].size


def updated(state: Tree, gradients: Tree) -> Tree:
    """The state after one step of AdamW."""
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
