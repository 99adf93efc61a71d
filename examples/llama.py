"""A Llama-style model on packed documents: scan over layers, remat that saves attention results.

    python examples/llama.py

Rotary positions restart in every document; the mask is built once per step, outside the scan. The
backward pass of each layer recomputes everything except attention, whose output and log-sum-exp are
saved by name (`packax.CHECKPOINT_NAMES`). Needs packax and optax; runs on a CPU or a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packax
from pack_documents import Rows, batches, pack, sources

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LENGTH = 4, 128, 4, 2, 64, 256, 256
DTYPE = jnp.bfloat16


def initialize(key):
    shapes = {
        "query": (WIDTH, HEADS * HEAD_DIM),
        "key": (WIDTH, KV_HEADS * HEAD_DIM),
        "value": (WIDTH, KV_HEADS * HEAD_DIM),
        "out": (HEADS * HEAD_DIM, WIDTH),
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    keys = jax.random.split(key, len(shapes) + 1)
    layers = {
        name: shape[0] ** -0.5 * jax.random.normal(key, (LAYERS, *shape))
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    norms = {"attention_norm": jnp.ones((LAYERS, WIDTH)), "mlp_norm": jnp.ones((LAYERS, WIDTH))}
    return {
        "embedding": jax.random.normal(keys[-1], (256, WIDTH)),
        "layers": layers | norms,
        "norm": jnp.ones(WIDTH),
        "unembedding": jnp.zeros((WIDTH, 256)),
    }


def normalized(x, weight):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide * weight).astype(x.dtype)


def rotated(x, positions):
    """Rotary embedding (arXiv 2104.09864), halves paired as in Llama."""
    frequencies = 1e4 ** -jnp.linspace(0, 1, HEAD_DIM // 2, endpoint=False)
    angles = positions[..., None, None] * frequencies
    left, right = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    return turned.astype(x.dtype)


def block(x, layer, mask, positions):
    layer = {name: w if w.ndim == 1 else w.astype(DTYPE) for name, w in layer.items()}
    y = normalized(x, layer["attention_norm"])
    query, key, value = (
        (y @ layer[name]).reshape(*y.shape[:2], -1, HEAD_DIM) for name in ("query", "key", "value")
    )
    query, key = rotated(query, positions), rotated(key, positions)
    out = packax.flash_attention(query, key, value, mask)
    x = x + out.reshape(*x.shape[:2], -1) @ layer["out"]
    y = normalized(x, layer["mlp_norm"])
    return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]


def loss(parameters, batch: Rows, remat: bool):
    mask = packax.create_attention_mask(packax.causal() & packax.documents(batch.segment_ids))

    def layer(x, weights):
        return block(x, weights, mask, batch.positions), None

    if remat:
        keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
        layer = jax.checkpoint(layer, policy=keep)
    x = parameters["embedding"].astype(DTYPE)[batch.tokens]
    x, _ = jax.lax.scan(layer, x, parameters["layers"])
    logits = normalized(x, parameters["norm"]).astype(jnp.float32) @ parameters["unembedding"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)


def main() -> None:
    rows = pack(sources(), LENGTH)
    parameters = initialize(jax.random.key(0))
    optimizer = optax.adamw(3e-3)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, batch):
        value, gradients = jax.value_and_grad(loss)(parameters, batch, True)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value, gradients

    plain = jax.jit(jax.grad(loss), static_argnums=2)
    for number, batch in enumerate(batches(rows, 2, steps=10)):
        new, state, value, gradients = step(parameters, state, batch)
        if number == 1:  # remat changes when things are computed, not the results
            others = plain(parameters, batch, False)
            for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
                largest = max(float(jnp.abs(y).max()), 1e-6)
                np.testing.assert_allclose(x, y, atol=0.02 * largest)
            print("gradients equal those without remat")
        parameters = new
        print(f"step {number}: loss {value:.3f}")


if __name__ == "__main__":
    main()
