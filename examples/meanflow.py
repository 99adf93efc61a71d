"""A one-step generative model (MeanFlow, arXiv 2505.13447) of point sets packed into rows.

    python examples/meanflow.py

The model predicts the average velocity u(z, r, t) of points between the times r and t. Its loss
holds a jvp of the model, and so of attention: u must equal v - (t - r) du/dt, whose right side is
under stop_gradient. On a GPU, such a step runs the forward kernel, the kernel for its tangent, and
the backward kernels. A set of points is a document: its points attend to each other only. After
training, one evaluation of the model turns noise into rings of points. Needs packax and optax; runs
on a CPU (in less than a minute) or a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packax

SETS, LENGTH, ROWS = 8, 256, 4  # sets per row, points per row, rows of a batch
LAYERS, HEADS, DIM = 3, 2, 32
WIDTH = HEADS * DIM
STEPS, REPORTED = 250, 25


def draw_sets(rng):
    """Rings of 16 to 48 points with random centers and radii, and the set of each point."""
    points = np.zeros((ROWS, LENGTH, 2), np.float32)
    ids = np.full((ROWS, LENGTH), packax.PADDING_SEGMENT_ID, np.int32)
    for row in range(ROWS):
        start = 0
        for n in range(SETS):
            size = min(int(rng.integers(16, 49)), LENGTH - start)
            angles = rng.uniform(0, 2 * np.pi, size)
            ring = np.stack([np.cos(angles), np.sin(angles)], -1) * rng.uniform(0.8, 1.2)
            points[row, start : start + size] = ring + rng.normal(0, 0.2, 2)
            ids[row, start : start + size] = n
            start += size
    return points, ids


def features(x):
    """Sines and cosines of each coordinate."""
    angles = x[..., None] * jnp.pi * 2.0 ** jnp.arange(-2, 3)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    return jnp.concatenate([x, waves.reshape(*x.shape[:-1], -1)], -1)


def init(key):
    inputs = features(jnp.zeros(4)).shape[0]

    def matrices(number, *shape):
        return jax.random.normal(jax.random.fold_in(key, number), shape) * shape[-2] ** -0.5

    return {
        "in": matrices(0, inputs, WIDTH),
        "layers": {
            "qkv": matrices(1, LAYERS, WIDTH, 3 * WIDTH),
            "out": matrices(2, LAYERS, WIDTH, WIDTH) * 0.1,
            "up": matrices(3, LAYERS, WIDTH, 4 * WIDTH),
            "down": matrices(4, LAYERS, 4 * WIDTH, WIDTH) * 0.1,
        },
        "velocity": matrices(5, WIDTH, 2) * 0.1,
    }


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def average_velocity(weights, mask, z, r, t):
    """u(z, r, t) for points z (B, S, 2) and the times of their sets, (B, S) each."""
    x = features(jnp.concatenate([z, r[..., None], t[..., None]], -1)) @ weights["in"]

    def layer(x, w):
        qkv = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, DIM)
        out = packax.flash_attention(*jnp.split(qkv, 3, axis=2), mask)
        x = x + out.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, weights["layers"])
    return norm(x) @ weights["velocity"]


def loss(weights, points, ids, key):
    mask = packax.create_attention_mask(packax.documents(ids))
    of_times, of_noise = jax.random.split(key)
    times = jax.random.uniform(of_times, (2, ROWS, SETS))
    r, t = (jnp.take_along_axis(x, ids, 1) for x in (times.min(0), times.max(0)))
    noise = jax.random.normal(of_noise, points.shape)
    z = (1 - t[..., None]) * points + t[..., None] * noise
    v = noise - points

    def model(z, r, t):
        return average_velocity(weights, mask, z, r, t)

    tangents = (v, jnp.zeros_like(r), jnp.ones_like(t))
    u, du_dt = jax.jvp(model, (z, r, t), tangents)
    target = jax.lax.stop_gradient(v - (t - r)[..., None] * du_dt)
    real = (ids != packax.PADDING_SEGMENT_ID)[..., None]
    return jnp.sum(jnp.where(real, (u - target) ** 2, 0)) / jnp.sum(real)


def spread(points, ids):
    """The standard deviation of a set's distances to its center, relative to their mean: 0 for
    rings. The mean over all sets."""
    found = []
    for row, own in zip(np.asarray(points), ids, strict=True):
        for n in range(SETS):
            ring = row[own == n]
            if len(ring) >= 16:
                distances = np.linalg.norm(ring - ring.mean(0), axis=-1)
                found.append(distances.std() / distances.mean())
    return np.mean(found)


def main() -> None:
    rng = np.random.default_rng(0)
    weights = init(jax.random.key(0))
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state, points, ids, key):
        value, gradients = jax.value_and_grad(loss)(weights, points, ids, key)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, value

    values = []
    for number in range(STEPS):
        points, ids = draw_sets(rng)
        key = jax.random.key(number + 1)
        weights, state, value = step(weights, state, points, ids, key)
        values.append(value)
        if len(values) == REPORTED:
            print(f"step {number}: loss {np.mean(values):.3f}")
            values.clear()

    @jax.jit
    def one_step(weights, noise, ids):
        mask = packax.create_attention_mask(packax.documents(ids))
        times = jnp.zeros(ids.shape), jnp.ones(ids.shape)
        return noise - average_velocity(weights, mask, noise, *times)

    _, ids = draw_sets(rng)
    noise = rng.standard_normal((ROWS, LENGTH, 2)).astype(np.float32)
    samples = one_step(weights, noise, ids)
    print(f"spread of the distances: noise {spread(noise, ids):.2f}, "
          f"samples {spread(samples, ids):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
