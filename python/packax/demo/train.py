"""The training loop: a jitted step with donated state, and one mask for all layers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import packax
from packax import segments
from packax.demo import model
from packax.demo.data import Rows
from packax.demo.settings import Settings


@dataclasses.dataclass
class Trained:
    parameters: model.Parameters
    losses: list[float]
    tokens_a_second: float  # without the first step, which includes compilation
    compile_seconds: float

    @property
    def first_loss(self) -> float:
        return self.losses[0]

    @property
    def last_loss(self) -> float:
        """Mean over the last tenth of the steps."""
        return float(np.mean(self.losses[-max(1, len(self.losses) // 10) :]))


def batches(rows: Rows, batch: int, seed: int) -> Iterator[model.Batch]:
    """Yields batches forever, shuffled in each epoch. A batch repeats rows if there are too few."""
    following, weight = segments.next_tokens(rows.tokens, rows.segment_ids)
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < batch:
            order.extend(rng.permutation(len(rows.tokens)).tolist())
        chosen, order = order[:batch], order[batch:]
        yield {
            "tokens": rows.tokens[chosen],
            "positions": rows.positions[chosen],
            "segment_ids": rows.segment_ids[chosen],
            "following": following[chosen],
            "weight": weight[chosen],
        }


def make_step(settings: Settings) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    warmup = min(20, max(1, settings.steps // 10))
    steps, rate = max(settings.steps, warmup + 1), settings.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(rate / 10, rate, warmup, steps, rate / 10)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )

    def step(parameters: Any, state: Any, batch: model.Batch) -> tuple[Any, Any, jax.Array]:
        mask = packax.create_attention_mask(
            packax.causal() & packax.documents(batch["segment_ids"])
        )
        loss, gradients = jax.value_and_grad(model.loss)(parameters, batch, mask, settings.model)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    return optimizer, jax.jit(step, donate_argnums=(0, 1))


def train(rows: Rows, settings: Settings, *, quiet: bool = False) -> Trained:
    """Trains from scratch for `settings.steps` steps, or until `settings.seconds` have passed since
    the end of the first step (which includes compilation), but for at least two steps."""
    parameters = jax.jit(model.initialize, static_argnums=0)(
        settings.model, jax.random.key(settings.seed)
    )
    optimizer, step = make_step(settings)
    state = jax.jit(optimizer.init)(parameters)
    feed = batches(rows, settings.batch, settings.seed)

    losses: list[jax.Array] = []
    start = time.perf_counter()
    after_first = start
    with tqdm(total=settings.steps, unit="step", disable=quiet, mininterval=0.5) as progress:
        for number in range(settings.steps):
            parameters, state, loss = step(parameters, state, next(feed))
            losses.append(loss)
            if number == 0:
                loss.block_until_ready()
                after_first = time.perf_counter()
            if number > 0 and number % 5 == 0:  # rarely, so that steps are dispatched ahead
                shown = float(losses[number - 1])
                speed = number * rows_tokens(settings) / (time.perf_counter() - after_first)
                progress.set_postfix_str(f"loss {shown:.3f}, {speed:,.0f} tokens/s", refresh=False)
            progress.update()
            if number > 0 and time.perf_counter() - after_first > settings.seconds:
                break
        jnp.stack(losses).block_until_ready()
    trained = time.perf_counter() - after_first
    speed = (len(losses) - 1) * rows_tokens(settings) / trained if len(losses) > 1 else 0.0
    return Trained(parameters, [float(x) for x in losses], speed, after_first - start)


def rows_tokens(settings: Settings) -> int:
    return settings.batch * settings.seq_len
