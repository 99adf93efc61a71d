"""Pack documents into rows, build the mask once per step, train two attention layers on them.

    python examples/pack_and_train.py

Needs packax and optax; runs on a CPU or a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packax
from packax import segments

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 4, 2, 64


def initialize(key):
    keys = jax.random.split(key, 5)

    def normal(key, *shape):
        return shape[-2] ** -0.5 * jax.random.normal(key, shape)

    return {
        "embedding": jax.random.normal(keys[0], (256, WIDTH)),
        "query": normal(keys[1], LAYERS, WIDTH, HEADS * HEAD_DIM),
        "key_value": normal(keys[2], LAYERS, WIDTH, 2 * KV_HEADS * HEAD_DIM),
        "out": normal(keys[3], LAYERS, HEADS * HEAD_DIM, WIDTH),
        "unembedding": normal(keys[4], WIDTH, 256),
    }


def loss(parameters, tokens, segment_ids, targets, weights):
    # Row i attends to the tokens of its document up to itself. All layers use one mask.
    mask = packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))
    x = parameters["embedding"][tokens]
    for layer in range(LAYERS):

        def heads(y, count):
            return y.reshape(*y.shape[:2], count, HEAD_DIM).astype(jnp.bfloat16)

        query = heads(x @ parameters["query"][layer], HEADS)
        key, value = jnp.split(x @ parameters["key_value"][layer], 2, axis=-1)
        out = packax.flash_attention(query, heads(key, KV_HEADS), heads(value, KV_HEADS), mask)
        x = x + out.reshape(*x.shape[:2], -1).astype(x.dtype) @ parameters["out"][layer]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ parameters["unembedding"], targets)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def main() -> None:
    rng = np.random.default_rng(0)
    text = np.frombuffer(b"packed documents, one after another. ", np.uint8)
    rows = segments.pack([np.tile(text, n) for n in rng.integers(1, 40, 60)], length=2048)
    targets, weights = segments.next_tokens(rows.tokens, rows.segment_ids)
    print(segments.check_packing(*rows[1:3], targets, tokens=rows.tokens, weights=weights))

    parameters = initialize(jax.random.key(0))
    optimizer = optax.adam(3e-3)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, *batch):
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    for number in range(10):
        chosen = rng.integers(0, len(rows.tokens), 2)
        batch = [x[chosen] for x in (rows.tokens, rows.segment_ids, targets, weights)]
        parameters, state, value = step(parameters, state, *batch)
        print(f"step {number}: loss {value:.3f}")


if __name__ == "__main__":
    main()
