"""A program written for kvax, run on packax: one line differs.

    -import kvax
    +import packax.kvax as kvax

It packs documents, trains two causal attention layers on them, and, on more than one device, splits
the sequence over a context axis. It makes the same calls as with kvax, in the same order.

    python examples/from_kvax.py                        # all GPUs of this host, or one CPU
    python examples/from_kvax.py --cpu --devices 4      # four fake CPU devices: context parallelism

If kvax is installed and you change the line back, it runs kvax on a GPU. Needs packax and optax.
"""

from __future__ import annotations

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packax.kvax as kvax

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 64, 4, 2, 64, 64
QUERY_SPECS = ("data", "context", None, None)
KV_SPECS = ("data", None, None, None)


def attention_layer(weights, x, positions, segment_ids, kv_positions, kv_segment_ids, mask):
    def heads(weight, count):
        return (x @ weight).reshape(*x.shape[:2], count, HEAD_DIM).astype(jnp.bfloat16)

    out = kvax.ops.flash_attention(
        query=heads(weights["query"], HEADS),
        key=heads(weights["key"], KV_HEADS),
        value=heads(weights["value"], KV_HEADS),
        query_positions=positions,
        query_segment_ids=segment_ids,
        kv_positions=kv_positions,
        kv_segment_ids=kv_segment_ids,
        mask=mask,
        scale=HEAD_DIM**-0.5,
    )
    return x + out.reshape(*x.shape[:2], -1).astype(x.dtype) @ weights["out"]


def transformer(parameters, tokens, positions, segment_ids, *, permute):
    x = parameters["tokens"][tokens] + parameters["positions"][positions]
    kv_positions, kv_segment_ids = positions, segment_ids
    if permute:  # rows only: the positions and ids of keys stay in order
        x, positions, segment_ids = kvax.utils.permute_tokens_context_parallelism(
            (x, positions, segment_ids)
        )
    mask = kvax.ops.create_attention_mask(
        positions, segment_ids, kv_positions, kv_segment_ids, calc_bwd_mask=True
    )
    policy = jax.checkpoint_policies.save_only_these_names("attention_outputs")
    layer = jax.checkpoint(attention_layer, policy=policy)
    for weights in parameters["layers"]:
        x = layer(weights, x, positions, segment_ids, kv_positions, kv_segment_ids, mask)
    if permute:
        x = kvax.utils.unpermute_tokens_context_parallelism(x)
    return x @ parameters["unembedding"]


def loss(parameters, tokens, positions, segment_ids, *, permute=False):
    logits = transformer(parameters, tokens, positions, segment_ids, permute=permute)
    following, following_ids = (jnp.roll(x, -1, axis=1) for x in (tokens, segment_ids))
    counts = (following_ids == segment_ids) & (segment_ids != kvax.utils.PADDING_SEGMENT_ID)
    counts = counts.at[:, -1].set(False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
    return jnp.sum(losses * counts) / jnp.sum(counts)


def initialize(length, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 3 + 4 * LAYERS))

    def normal(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    sizes = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    return {
        "tokens": normal(VOCABULARY, WIDTH),
        "positions": normal(length, WIDTH),
        "unembedding": normal(WIDTH, VOCABULARY),
        "layers": [
            {name: normal(WIDTH, n * HEAD_DIM) for name, n in sizes.items()}
            | {"out": normal(HEADS * HEAD_DIM, WIDTH)}
            for _ in range(LAYERS)
        ],
    }


def packed_rows(batch, length, rng):
    """tokens, positions and segment ids (batch, length): counting sequences, then padding."""
    tokens, positions = np.zeros((2, batch, length), np.int32)
    segment_ids = np.full((batch, length), kvax.utils.PADDING_SEGMENT_ID, np.int32)
    for row in range(batch):
        start, document = 0, 0
        while start < length - length // 8:
            size = min(int(rng.integers(2, length // 2)), length - start)
            place, index = slice(start, start + size), np.arange(size)
            step, first = rng.integers(1, 4), rng.integers(VOCABULARY)
            tokens[row, place] = (first + step * index) % VOCABULARY
            positions[row, place], segment_ids[row, place] = index, document
            start, document = start + size, document + 1
    return tokens, positions, segment_ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="fake CPU devices")
    parser.add_argument("--devices", type=int, help="how many (default: all GPUs, one CPU)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.cpu:  # before jax looks for devices
        flag = f"--xla_force_host_platform_device_count={arguments.devices or 1}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()[: arguments.devices]
    data = 2 if len(devices) % 4 == 0 else 1
    mesh = jax.sharding.Mesh(np.reshape(devices, (data, -1)), ("data", "context"))
    permute = mesh.shape["context"] > 1
    print(f"mesh       {dict(mesh.shape)} on {len(devices)} x {devices[0].device_kind}")

    rng = np.random.default_rng(0)
    parameters = initialize(arguments.seq_len)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, *batch):
        value, gradients = jax.value_and_grad(loss)(parameters, *batch, permute=permute)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    with mesh, kvax.utils.attention_specs(query_specs=QUERY_SPECS, kv_specs=KV_SPECS):
        for number in range(arguments.steps):
            batch = packed_rows(4, arguments.seq_len, rng)
            parameters, state, value = step(parameters, state, *batch)
            if number % 5 == 0 or number == arguments.steps - 1:
                print(f"step {number:3}   loss {float(value):.4f}")


if __name__ == "__main__":
    main()
