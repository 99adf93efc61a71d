"""A tiny model like Grug's trains to the same losses with packax as with Levanter's own attention.

    python tests/peers/levanter_training.py [--steps 20]

Six layers, five with a window and the last without; packed and padded rows; FSDP and context
parallelism on four fake CPU devices with axes of Explicit type, so that no call names a layout.
Levanter's reference runs the layers one by one. packax does so, too, and once more in a scan over
layers that selects one of two masks, each built once per step. Prints the first and last losses and
the largest relative difference; exits with 1 if that is above 1e-5. Needs marin-levanter.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P
from levanter.grug.attention import AttentionMask, attention
from packax.integrations import levanter

BATCH, LENGTH, VOCAB, WIDTH, HEADS, KV_HEADS, DIM, WINDOW = 4, 128, 64, 32, 4, 2, 8, 16
WINDOWS = (WINDOW,) * 5 + (None,)
TOKENS = P("fsdp", "context")
BOUND = 1e-5


def parameters(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    layers = len(WINDOWS)
    shapes = {
        "embed": (VOCAB, WIDTH),
        "query": (layers, WIDTH, HEADS * DIM),
        "key": (layers, WIDTH, KV_HEADS * DIM),
        "value": (layers, WIDTH, KV_HEADS * DIM),
        "out": (layers, HEADS * DIM, WIDTH),
    }
    arrays = {name: rng.standard_normal(shape) * 0.2 for name, shape in shapes.items()}
    return {  # sharded over the second to last dimension, as in FSDP
        name: jax.device_put(jnp.asarray(x, jnp.float32), P(*[None] * (x.ndim - 2), "fsdp"))
        for name, x in arrays.items()
    }


def batches(seed: int, steps: int) -> list[tuple[jax.Array, jax.Array]]:
    """Tokens that repeat every quarter of the row, and ids of documents with padding."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        tokens = np.tile(rng.integers(0, VOCAB, (BATCH, LENGTH // 4)), 4)
        ids = np.sort(rng.integers(0, 5, (BATCH, LENGTH)), axis=1)
        for row, padding in enumerate(rng.integers(1, 40, BATCH)):
            ids[row, LENGTH - padding :] = -1
        found.append(
            tuple(jax.device_put(jnp.asarray(x, jnp.int32), TOKENS) for x in (tokens, ids))
        )
    return found


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layer(x: jax.Array, weights: dict[str, jax.Array], attend: object) -> jax.Array:
    whole = {name: reshard(w, P()) for name, w in weights.items()}  # FSDP gathers what it uses
    y = normalized(x)
    q, k, v = (
        (y @ whole[name]).reshape(BATCH, LENGTH, -1, DIM) for name in ("query", "key", "value")
    )
    return x + attend(q, k, v).reshape(BATCH, LENGTH, -1) @ whole["out"]


def model(params: dict[str, jax.Array], tokens: jax.Array, ids: jax.Array, how: str) -> jax.Array:
    table = reshard(params["embed"], P())
    x = table.at[tokens].get(out_sharding=TOKENS)
    weights = {name: w for name, w in params.items() if name != "embed"}
    mask = AttentionMask.causal().with_segment_ids(ids)
    if how == "packax in a scan":
        whole, window = (
            levanter.build_mask(mask, LENGTH, sliding_window=size) for size in (None, WINDOW)
        )

        def body(x, inputs):
            layer_weights, is_global = inputs
            chosen = jax.tree.map(lambda a, b: jnp.where(is_global, a, b), whole, window)
            attend = functools.partial(levanter.attention, mask=chosen)
            return layer(x, layer_weights, attend), None

        is_global = jnp.asarray([size is None for size in WINDOWS])
        x, _ = jax.lax.scan(body, x, (weights, is_global))
    else:
        implementation = "packax" if how == "packax" else "reference"
        for n, size in enumerate(WINDOWS):
            attend = functools.partial(
                attention, mask=mask.with_sliding_window(size), implementation=implementation
            )
            x = layer(x, jax.tree.map(lambda w, n=n: w[n], weights), attend)
    return normalized(x) @ table.T


def loss_of(params, tokens, ids, how):
    logits = jax.nn.log_softmax(model(params, tokens, ids, how))
    logits, tokens, ids = (reshard(x, P("fsdp")) for x in (logits, tokens, ids))
    counts = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).astype(jnp.float32)
    hits = jax.nn.one_hot(tokens[:, 1:], VOCAB) * logits[:, :-1]
    return -jnp.sum(hits.sum(-1) * counts) / jnp.sum(counts)


def train(how: str, steps: int) -> list[float]:
    step = jax.jit(jax.value_and_grad(functools.partial(loss_of, how=how)))
    params, losses = parameters(0), []
    for tokens, ids in batches(1, steps):
        loss, gradients = step(params, tokens, ids)
        params = jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients)
        losses.append(float(loss))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    levanter.install()
    mesh = jax.make_mesh((2, 2), ("fsdp", "context"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        losses = {how: train(how, steps) for how in ("reference", "packax", "packax in a scan")}
    want, worst = np.asarray(losses["reference"]), 0.0
    for how, found in losses.items():
        difference = float(np.max(np.abs(np.asarray(found) / want - 1)))
        worst = max(worst, difference)
        print(f"{how}: {found[0]:.6f} to {found[-1]:.6f}, at most {difference:.1e} from reference")
    return int(not worst <= BOUND)


if __name__ == "__main__":
    sys.exit(main())
