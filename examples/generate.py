"""Generate from prompts of many lengths: one packed prefill, then a loop over a key/value cache.

    python examples/generate.py

The model alternates layers that attend to a window and layers that attend to everything. One scan
runs them all: in the prefill with a stack of two masks, in decoding with a first key for each row.
Keys and values of the packed prompts are written into a dense cache, and into pages in arbitrary
order; both give the same tokens. Finally, a full forward pass over prompts and answers gives the
same logits at every token. Weights are random. Needs only packax; runs on a CPU or a GPU.
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import packax
from packax import kv_cache, segments
from packax.demo import model

CONFIG = model.Config(
    vocabulary=64, layers=4, width=64, heads=4, kv_heads=2, head_dim=16, hidden=128
)
WINDOW, END, NEW, TEMPERATURE = 24, 0, 24, 0.8  # END stops a sequence
LOCAL = jnp.array([1, 1, 0, 1])  # the kind of each layer: 1 attends to the last WINDOW keys
PAGE = 16


class Cache(NamedTuple):
    """All layers': (layers, B, length, Hkv, D), or (layers, pages, PAGE, Hkv, D) with a table."""

    key: jax.Array
    value: jax.Array
    table: jax.Array | None = None

    def write(self, key, value, sequence_ids, positions):
        """The cache with keys and values of all layers written, (layers, R, T, Hkv, D) each."""
        put = partial(
            kv_cache.write, sequence_ids=sequence_ids, positions=positions, block_table=self.table
        )
        return Cache(jax.vmap(put)(self.key, key), jax.vmap(put)(self.value, value), self.table)


def run_layers(parameters, tokens, positions, attend, scanned):
    """Logits, and the second result of `attend` for each layer.

    `attend(query, key, value, part)` gets the layer's part of `scanned`, and returns the output and
    anything to collect from all layers.
    """
    angles = model.rope_angles(positions, CONFIG)

    def layer(x, of_layer):
        weights, part = of_layer
        y = model.normalize(x, weights["attention_norm"])
        out, kept = attend(*model.heads(weights, y, angles, CONFIG), part)
        x = x + out.reshape(*x.shape[:2], -1) @ weights["attention_out"]
        return x + model.mlp(weights, model.normalize(x, weights["mlp_norm"])), kept

    x = parameters["embedding"][tokens]
    x, kept = jax.lax.scan(layer, x, (parameters["layers"], scanned))
    return model.normalize(x, parameters["norm"]) @ parameters["unembedding"], kept


@jax.jit
def forward(parameters, tokens, sequence_ids, positions):
    """Logits of a packed batch, and the keys and values of all layers."""
    document = packax.documents(sequence_ids)
    kinds = packax.causal() & document, packax.sliding_window(window=WINDOW) & document
    stack = packax.masks.stack_masks([packax.create_attention_mask(x) for x in kinds])

    def attend(query, key, value, kind):
        return packax.flash_attention(query, key, value, stack[kind]), (key, value)

    return run_layers(parameters, tokens, positions, attend, LOCAL)


@partial(jax.jit, donate_argnames="cache")
def decode(parameters, tokens, lengths, cache):
    """Logits of one token per sequence, at position `lengths`, and the cache including it."""
    place = lengths[:, None]
    row = jnp.arange(len(lengths))[:, None]

    def attend(query, key, value, part):
        kind, key_cache, value_cache = part
        key_cache, value_cache = (
            kv_cache.write(of_layer, new, row, place, block_table=cache.table)
            for of_layer, new in ((key_cache, key), (value_cache, value))
        )
        starts = jnp.where(kind == 1, jnp.maximum(lengths - WINDOW + 1, 0), 0)
        out = packax.decode_attention(
            query, key_cache, value_cache, lengths + 1, block_table=cache.table, kv_starts=starts
        )
        return out, (key_cache, value_cache)

    scanned = LOCAL, cache.key, cache.value
    logits, kept = run_layers(parameters, tokens[:, None], place, attend, scanned)
    return logits[:, 0], Cache(*kept, cache.table)


@jax.jit
def sample(logits, key):
    """(B,) tokens sampled from logits (B, vocabulary)."""
    return jax.random.categorical(key, logits / TEMPERATURE).astype(jnp.int32)


def generate(parameters, prompts, cache, key):
    """(answers, the logits from which their tokens were sampled): two lists of arrays."""
    sizes = np.array([len(prompt) for prompt in prompts])
    packed = segments.pack(prompts, length=64)
    # Ids over all rows: the prompt of each token, from `source`.
    sequence_ids = np.append(np.repeat(np.arange(len(sizes)), sizes), -1)[packed.source]
    logits, new = forward(parameters, packed.tokens, sequence_ids, packed.positions)
    cache = cache.write(*new, sequence_ids, packed.positions)
    ends = sizes[sequence_ids] - 1 == packed.positions  # the last tokens of prompts; never padding
    row, place = np.nonzero(ends & (sequence_ids >= 0))
    logits = logits[row, place][np.argsort(sequence_ids[row, place])]

    lengths, done = jnp.asarray(sizes), jnp.zeros(len(sizes), bool)
    tokens, seen = [], []
    for step in range(NEW):
        token = jnp.where(done, END, sample(logits, jax.random.fold_in(key, step)))
        tokens.append(token)
        seen.append(logits)
        done |= token == END
        if done.all():
            break
        # Finished sequences keep writing after their end, which nothing reads.
        logits, cache = decode(parameters, token, lengths, cache)
        lengths = lengths + ~done
    tokens, seen = np.stack(tokens, 1), np.stack(seen, 1)
    counts = [int(np.argmax(x == END)) + 1 if (x == END).any() else len(x) for x in tokens]
    cut = list(zip(counts, tokens, seen, strict=True))
    return [x[:n] for n, x, _ in cut], [x[:n] for n, _, x in cut]


def caches(count, length):
    """A dense cache, and one in pages in arbitrary order."""
    shape = (CONFIG.layers, count, length, CONFIG.kv_heads, CONFIG.head_dim)
    blocks = length // PAGE
    table = np.random.default_rng(1).permutation(count * blocks).reshape(count, blocks)
    paged = (CONFIG.layers, count * blocks, PAGE, *shape[3:])
    yield "dense", Cache(jnp.zeros(shape), jnp.zeros(shape))
    yield "paged", Cache(jnp.zeros(paged), jnp.zeros(paged), jnp.asarray(table))


def main() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, CONFIG.vocabulary, n) for n in (40, 3, 17, 1, 29, 8)]
    parameters = model.initialize(CONFIG, jax.random.key(0))
    of_caches = []
    for name, cache in caches(len(prompts), length=80):
        begin = time.perf_counter()
        answers, logits = generate(parameters, prompts, cache, jax.random.key(1))
        of_caches.append(answers)
        took = time.perf_counter() - begin
        stopped = sum(x[-1] == END for x in answers)
        print(
            f"{name}: {len(prompts)} prompts, {sum(map(len, answers))} new tokens, {stopped} "
            f"sequences stopped by themselves, {took:.1f} s including compilation"
        )
        # The full forward pass over packed prompts and answers: its logits for each new token.
        whole = [np.concatenate(x) for x in zip(prompts, answers, strict=True)]
        sizes = [len(x) for x in whole]
        ids = segments.from_lengths(np.array(sizes))[None]
        full, _ = forward(parameters, np.concatenate(whole)[None], ids, segments.positions(ids))
        starts = np.cumsum([0, *sizes[:-1]])
        largest = 0.0
        for n, (start, prompt, answer) in enumerate(zip(starts, prompts, answers, strict=True)):
            first = start + len(prompt) - 1
            rows = np.asarray(full[0, first : first + len(answer)])
            largest = max(largest, float(np.abs(rows - logits[n]).max()))
            for step, token in enumerate(answer):  # sample() draws noise for the whole batch
                draw = np.zeros((len(prompts), CONFIG.vocabulary), np.float32)
                draw[n] = rows[step]
                drawn = sample(jnp.asarray(draw), jax.random.fold_in(jax.random.key(1), step))
                assert drawn[n] == token, (name, n, step)
        print(f"{name}: the full forward draws the same tokens, logits within {largest:.1e}")
        assert largest < 1e-4
    for dense, paged in zip(*of_caches, strict=True):
        np.testing.assert_array_equal(dense, paged)


if __name__ == "__main__":
    main()
