"""Serve prompts of many lengths: a loop that reads prompts in chunks while other sequences decode.

    python examples/generate.py

Each step has the same sizes: room for a few new tokens of a few sequences, over one pool of pages.
Sequences that decode have one token each, and prompts that are being read share what room is left.
A prompt that begins like an earlier one takes over the pages of the beginning, and does not compute
them again. Finished sequences return their pages and make room for waiting prompts. One program
runs every step.

The model alternates layers that attend to a window and layers that attend to everything, in one
scan. At the end, a full forward pass over prompts and answers gives the same logits and draws the
same tokens. Weights are random. Needs only packax; runs on a CPU or a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from functools import partial
from typing import Any

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
PAGE, PAGES, BLOCKS = 16, 64, 10  # keys per page, pages in all and per sequence
TOKENS, SEQUENCES = 32, 4  # of a step
KEY = jax.random.key(1)


@dataclasses.dataclass
class Sequence:
    number: int
    prompt: np.ndarray
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # tokens whose keys are in the cache
    answer: list[int] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        return np.append(self.prompt, self.answer).astype(np.int32)

    @property
    def done(self) -> bool:
        return len(self.answer) == NEW or self.answer[-1:] == [END]


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


@partial(jax.jit, donate_argnames="cache")
def step(parameters, tokens, kv_lens, table, cu_q_lens, count, cache):
    """Logits of the last new token of each sequence, and the cache with all new tokens."""
    places = kv_cache.token_positions(len(tokens), kv_lens, cu_q_lens, count)
    _, positions = places

    def attend(query, key, value, part):
        kind, *caches = part
        key_pages, value_pages = (
            kv_cache.write(pages, new[0], *places, block_table=table)
            for pages, new in zip(caches, (key, value), strict=True)
        )
        starts = jnp.where(kind == 1, jnp.maximum(positions - WINDOW + 1, 0), 0)
        out = packax.ragged_paged_attention(
            query[0], key_pages, value_pages, kv_lens, table, cu_q_lens, count, kv_starts=starts
        )
        return out[None], (key_pages, value_pages)

    logits, cache = run_layers(parameters, tokens[None], positions[None], attend, (LOCAL, *cache))
    return logits[0, jnp.maximum(cu_q_lens[1:] - 1, 0)], cache


@jax.jit
def sample(logits, numbers, places):
    """One token from each row of logits. The noise depends on the sequence and the position."""
    keys = jax.vmap(lambda n, p: jax.random.fold_in(jax.random.fold_in(KEY, n), p))(numbers, places)
    return jax.vmap(jax.random.categorical)(keys, logits / TEMPERATURE)


class Server:
    """Host code: which tokens a step has, and in which pages their keys are."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters
        shape = (CONFIG.layers, PAGES, PAGE, CONFIG.kv_heads, CONFIG.head_dim)
        self.cache = jnp.zeros(shape), jnp.zeros(shape)
        self.free = list(range(PAGES))
        self.known: dict[bytes, int] = {}  # the page after which a prompt has these tokens
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.shared = 0  # tokens that were not computed again

    def admit(self) -> None:
        """Waiting prompts begin if there is a place, with the known pages of their beginning."""
        while self.waiting and len(self.running) < SEQUENCES:
            sequence = self.waiting[0]
            need = -(-(len(sequence.prompt) + NEW) // PAGE)
            pages = []
            # The last token of a prompt is computed in any case: its logits are needed.
            for n in range(PAGE, len(sequence.prompt), PAGE):
                page = self.known.get(sequence.prompt[:n].tobytes())
                if page is None:
                    break
                pages.append(page)
            if len(self.free) < need - len(pages):
                return
            self.waiting.popleft()
            sequence.cached = PAGE * len(pages)
            self.shared += sequence.cached
            sequence.pages = pages + [self.free.pop() for _ in range(need - len(pages))]
            self.running.append(sequence)

    def step(self) -> tuple[int, int]:
        """Runs one step. The number of sequences that decoded, and of prompt tokens."""
        self.admit()
        left = [len(x.tokens) - x.cached for x in self.running]
        decoding = sum(bool(x.answer) for x in self.running)
        room = TOKENS - decoding
        counts = []
        for sequence, n in zip(self.running, left, strict=True):
            counts.append(1 if sequence.answer else min(n, room))
            room -= 0 if sequence.answer else counts[-1]

        tokens = np.zeros(TOKENS, np.int32)
        kv_lens = np.zeros(SEQUENCES, np.int32)
        table = np.zeros((SEQUENCES, BLOCKS), np.int32)
        cu_q_lens = np.zeros(SEQUENCES + 1, np.int32)
        cu_q_lens[1:] = np.cumsum(counts + [0] * (SEQUENCES - len(counts)))
        for n, (sequence, more) in enumerate(zip(self.running, counts, strict=True)):
            new = sequence.tokens[sequence.cached :][:more]
            tokens[cu_q_lens[n] : cu_q_lens[n + 1]] = new
            sequence.cached += more
            kv_lens[n] = sequence.cached
            table[n, : len(sequence.pages)] = sequence.pages
        logits, self.cache = step(
            self.parameters, tokens, kv_lens, table, cu_q_lens, len(counts), self.cache
        )
        numbers = np.zeros(SEQUENCES, np.int32)
        numbers[: len(counts)] = [x.number for x in self.running]
        drawn, logits = np.asarray(sample(logits, numbers, kv_lens)), np.asarray(logits)
        for n, sequence in enumerate(self.running):
            if sequence.cached == len(sequence.tokens) and counts[n]:
                sequence.answer.append(int(drawn[n]))
                sequence.logits.append(logits[n])
            for end in range(PAGE, min(sequence.cached, len(sequence.prompt)) + 1, PAGE):
                self.known.setdefault(
                    sequence.prompt[:end].tobytes(), sequence.pages[end // PAGE - 1]
                )
        kept = set(self.known.values())
        for sequence in [x for x in self.running if x.done]:
            self.running.remove(sequence)
            self.free += [page for page in sequence.pages if page not in kept]
        return decoding, sum(counts) - decoding


@jax.jit
def forward(parameters, tokens, sequence_ids, positions):
    """Logits of a packed batch, without a cache."""
    document = packax.documents(sequence_ids)
    kinds = packax.causal() & document, packax.sliding_window(window=WINDOW) & document
    stack = packax.masks.stack_masks([packax.create_attention_mask(x) for x in kinds])

    def attend(query, key, value, kind):
        return packax.flash_attention(query, key, value, stack[kind]), None

    return run_layers(parameters, tokens, positions, attend, LOCAL)[0]


def main() -> None:
    rng = np.random.default_rng(0)
    parameters = model.initialize(CONFIG, jax.random.key(0))
    beginning = rng.integers(1, CONFIG.vocabulary, 40)  # of every second prompt
    prompts = [rng.integers(1, CONFIG.vocabulary, n) for n in (50, 3, 17, 1, 29, 8, 70, 5)]
    prompts[::2] = [np.append(beginning, x) for x in prompts[::2]]
    server = Server(parameters)
    sequences = [Sequence(n, x.astype(np.int32)) for n, x in enumerate(prompts)]
    server.waiting.extend(sequences)
    begin = time.perf_counter()
    steps = []
    while server.waiting or server.running:
        steps.append(server.step())
    took = time.perf_counter() - begin
    mixed = sum(decoding > 0 and tokens > 0 for decoding, tokens in steps)
    print(
        f"{len(prompts)} prompts, {sum(len(x.answer) for x in sequences)} new tokens, "
        f"{sum(x.answer[-1] == END for x in sequences)} sequences stopped by themselves, "
        f"{server.shared} prompt tokens shared"
    )
    print(
        f"{len(steps)} steps, {mixed} of them with prompts and decoding, {step._cache_size()} "
        f"program, {took:.1f} s including compilation"
    )

    # The full forward pass over packed prompts and answers: its logits for each new token.
    sizes = [len(x.tokens) for x in sequences]
    ids = segments.from_lengths(np.array(sizes))[None]
    tokens = np.concatenate([x.tokens for x in sequences])[None]
    full = np.asarray(forward(parameters, tokens, ids, segments.positions(ids))[0])
    starts = np.cumsum([0, *sizes[:-1]])
    largest = 0.0
    for start, x in zip(starts, sequences, strict=True):
        places = len(x.prompt) + np.arange(len(x.answer))
        rows = full[start + places - 1]
        largest = max(largest, float(np.abs(rows - x.logits).max()))
        drawn = sample(jnp.asarray(rows), np.full(len(places), x.number), places)
        np.testing.assert_array_equal(drawn, x.answer)
    print(f"the full forward draws the same tokens, logits within {largest:.1e}")
    assert largest < 1e-4


if __name__ == "__main__":
    main()
