"""Flax linen's attention layer on packed documents, with packax as its attention_fn.

    python examples/flax_linen.py

nn.scan over layers under nn.remat; the mask is built once per step and passed to all of them. Needs
packax, flax and optax; runs on a CPU or a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import packax
from flax import linen as nn
from pack_documents import batches, pack, sources
from packax.integrations.flax import dot_product_attention

LAYERS, WIDTH, HEADS, LENGTH = 2, 128, 2, 256  # a head dim of 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=HEADS, dtype=jnp.bfloat16, attention_fn=dot_product_attention
        )
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(2 * WIDTH, dtype=jnp.bfloat16)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16)(y), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens, positions, mask):
        x = nn.Embed(256, WIDTH)(tokens) + nn.Embed(LENGTH, WIDTH)(positions)
        keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
        blocks = nn.scan(
            nn.remat(Block, policy=keep),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = blocks()(x, mask)
        return nn.Dense(256)(nn.LayerNorm()(x))


def loss(parameters, model, batch):
    mask = packax.create_attention_mask(packax.causal() & packax.documents(batch.segment_ids))
    logits = model.apply(parameters, batch.tokens, batch.positions, mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)


def main() -> None:
    rows = pack(sources(), LENGTH)
    model = Model()
    first = next(batches(rows, 2, steps=1))
    mask = packax.create_attention_mask(packax.documents(first.segment_ids))
    parameters = jax.jit(model.init)(jax.random.key(0), first.tokens, first.positions, mask)
    optimizer = optax.adam(3e-3)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, batch):
        value, gradients = jax.value_and_grad(loss)(parameters, model, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    for number, batch in enumerate(batches(rows, 2, steps=8)):
        parameters, state, value = step(parameters, state, batch)
        print(f"step {number}: loss {value:.3f}")


if __name__ == "__main__":
    main()
