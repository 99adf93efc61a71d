"""Flax nnx's attention layer on packed documents, with packax as its attention_fn.

    python examples/flax_nnx.py

Needs packax, flax and optax; runs on a CPU or a GPU.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax
import packax
from flax import nnx
from pack_documents import batches, pack, sources
from packax.integrations.flax import dot_product_attention

LAYERS, WIDTH, HEADS, LENGTH = 2, 128, 2, 256  # a head dim of 64


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS,
            in_features=WIDTH,
            dtype=jnp.bfloat16,
            decode=False,
            attention_fn=dot_product_attention,
            rngs=rngs,
        )
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens, positions, mask):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(self.norm(x))


def loss(model, batch):
    mask = packax.create_attention_mask(packax.causal() & packax.documents(batch.segment_ids))
    logits = model(batch.tokens, batch.positions, mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)


@nnx.jit
def step(model, optimizer, batch):
    value, gradients = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, gradients)
    return value


def main() -> None:
    rows = pack(sources(), LENGTH)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    for number, batch in enumerate(batches(rows, 2, steps=8)):
        print(f"step {number}: loss {step(model, optimizer, batch):.3f}")


if __name__ == "__main__":
    main()
