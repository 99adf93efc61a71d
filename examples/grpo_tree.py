"""A policy-gradient update over one prompt and many answers, packed as a tree and as documents.

    python examples/grpo_tree.py

As in GRPO (arXiv 2402.03300), the answers to a prompt have rewards. An answer's advantage is its
reward minus the mean reward of its group, divided by the standard deviation of the group. The loss
multiplies the log-probabilities of an answer's tokens by this advantage. A tree stores the prompt
once; documents store it once per answer. Loss and gradients are the same up to rounding. Needs only
packax; runs on a CPU or a GPU.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import packax
from packax.demo import model

GROUPS, ANSWERS, PROMPT, ANSWER = 2, 8, 192, 64
CONFIG = model.Config(
    vocabulary=64, layers=2, width=64, heads=4, kv_heads=2, head_dim=16, hidden=128
)


class Batch(NamedTuple):
    """One packed row. A token of an answer is predicted from the token before it on its path; for
    the first token of an answer, that is the last token of the prompt."""

    tokens: np.ndarray  # (1, S)
    positions: np.ndarray
    before: np.ndarray  # (1, S): the index of the token before it on its path
    advantages: np.ndarray  # (1, S), 0 in prompts


def groups_of_answers(rng):
    """Prompts, their answers, and the rewards of answers: here how many of their tokens are
    even."""
    prompts = rng.integers(0, CONFIG.vocabulary, (GROUPS, PROMPT))
    lengths = rng.integers(ANSWER // 2, ANSWER + 1, (GROUPS, ANSWERS))
    answers = [[rng.integers(0, CONFIG.vocabulary, n) for n in row] for row in lengths]
    rewards = np.array([[np.mean(answer % 2 == 0) for answer in row] for row in answers])
    deviation = rewards.std(1, keepdims=True) + 1e-6
    return prompts, answers, (rewards - rewards.mean(1, keepdims=True)) / deviation


def as_tree(prompts, answers, advantages) -> tuple[Batch, packax.masks.MaskExpression]:
    pieces, groups, of_answer, worth = [], [], [], []
    for g, prompt in enumerate(prompts):
        for a, piece in enumerate([prompt, *answers[g]]):
            pieces.append(piece)
            groups.append(np.full(len(piece), g))
            of_answer.append(np.full(len(piece), a - 1))  # -1: the prompt
            worth.append(np.full(len(piece), advantages[g, a - 1] if a else 0.0))
    groups, of_answer = np.concatenate(groups), np.concatenate(of_answer)
    expression = packax.causal() & packax.masks.shared_prefix(groups, of_answer)
    positions = packax.masks.tree_positions(expression)
    before = np.maximum(packax.masks.path_predecessors(expression), 0)
    made = np.concatenate(pieces), positions, before, np.concatenate(worth)
    return Batch(*(np.asarray(x)[None] for x in made)), expression


def as_documents(prompts, answers, advantages) -> tuple[Batch, packax.masks.MaskExpression]:
    pieces, ids, positions, worth = [], [], [], []
    for g, prompt in enumerate(prompts):
        for a, answer in enumerate(answers[g]):
            length = len(prompt) + len(answer)
            pieces += [prompt, answer]
            ids.append(np.full(length, g * ANSWERS + a))
            positions.append(np.arange(length))
            worth.append(np.where(np.arange(length) < len(prompt), 0.0, advantages[g, a]))
    ids = np.concatenate(ids)
    before = np.maximum(np.arange(len(ids)) - 1, 0)
    made = np.concatenate(pieces), np.concatenate(positions), before, np.concatenate(worth)
    return Batch(*(x[None] for x in made)), packax.causal() & packax.documents(ids)


def loss(parameters, batch, expression):
    mask = packax.create_attention_mask(expression)
    scores = model.logits(parameters, batch.tokens, batch.positions, mask, CONFIG)
    scores = jnp.take_along_axis(scores, batch.before[..., None], axis=1)
    log_probability = -model.token_losses(scores, batch.tokens)
    weights = batch.advantages.astype(jnp.float32)
    return -jnp.sum(log_probability * weights) / jnp.sum(weights != 0)


def main() -> None:
    given = groups_of_answers(np.random.default_rng(0))
    parameters = model.initialize(CONFIG, jax.random.key(0))
    step = jax.jit(jax.value_and_grad(loss))
    results = []
    for name, layout in (("tree", as_tree), ("documents", as_documents)):
        batch, expression = layout(*given)
        jax.block_until_ready(step(parameters, batch, expression))  # compiles
        begin = time.perf_counter()
        results.append(jax.block_until_ready(step(parameters, batch, expression)))
        took = 1e3 * (time.perf_counter() - begin)
        tokens = batch.tokens.size
        print(f"{name}: {tokens} tokens, loss {results[-1][0]:.6f}, {took:.1f} ms per step")
    (first, ours), (second, theirs) = results
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    largest = max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs)
    print(f"largest difference: loss {abs(first - second):.1e}, gradients {largest:.1e} of theirs")


if __name__ == "__main__":
    main()
