"""A model with sliding-window and global layers, under context parallelism.

    python examples/windows_and_global.py                    # all GPUs of this host
    python examples/windows_and_global.py --cpu --devices 4  # fake CPU devices

Two layers with a window are followed by one that attends to all keys, similar to Gemma and gpt-oss.
Both kinds use the same plan. The scan runs over periods of three layers, so that the kind of each
layer is known when the program is traced. The program prints how many keys each kind of layer
fetches, and compares loss and gradients with those of one device. Needs only packax.
"""

from __future__ import annotations

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import packax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

LENGTH, WINDOW, HEADS, KV_HEADS, DIM, PERIODS = 2048, 256, 4, 2, 16, 2
WIDTH = HEADS * DIM
KINDS = ("window", "window", "global")  # of the layers of a period
SHARDING = packax.AttentionSharding(query=P(None, "context"), key_value=P(None, "context"))


def masks_of(segment_ids, **sharded):
    """One of each kind, once per step. Both have the same plan."""
    document = packax.documents(segment_ids)
    expressions = {"window": packax.sliding_window(window=WINDOW), "global": packax.causal()}
    return {
        kind: packax.create_attention_mask(x & document, **sharded)
        for kind, x in expressions.items()
    }


def model(parameters, x, masks):
    def attention(x, weights, mask):
        dims = [HEADS * DIM, (HEADS + KV_HEADS) * DIM]
        parts = jnp.split(x @ weights["query_key_value"], dims, axis=-1)
        query, key, value = (part.reshape(*x.shape[:2], -1, DIM) for part in parts)
        out = packax.flash_attention(query, key, value, mask)
        return x + out.reshape(x.shape) @ weights["out"]

    @jax.checkpoint
    def period(x, weights):
        for n, kind in enumerate(KINDS):
            x = attention(x, jax.tree.map(lambda w, n=n: w[n], weights), masks[kind])
        return x, None

    return jax.lax.scan(period, x, parameters)[0]


def loss(parameters, batch, plan=None):
    sharded = {}
    if plan is not None:
        sharded = {"sharding": SHARDING, "plan": plan}
    masks = masks_of(batch["segment_ids"], **sharded)
    x, target = batch["x"], batch["target"]
    if plan is not None:
        x, target = plan.permute((x, target))
    return jnp.mean((model(parameters, x, masks) - target) ** 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="fake CPU devices, 4 unless --devices")
    parser.add_argument("--devices", type=int, help="how many (default: all)")
    arguments = parser.parse_args()
    if arguments.cpu:  # before jax looks for devices
        flag = f"--xla_force_host_platform_device_count={arguments.devices or 4}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()[: arguments.devices]
    mesh = jax.make_mesh((len(devices),), ("context",), (AxisType.Auto,), devices=devices)

    rng = np.random.default_rng(0)
    lengths = rng.multinomial(LENGTH, [0.5, 0.3, 0.2])
    batch = {
        "segment_ids": np.repeat(np.arange(3), lengths)[None].astype(np.int32),
        "x": rng.standard_normal((1, LENGTH, WIDTH)).astype(np.float32),
        "target": rng.standard_normal((1, LENGTH, WIDTH)).astype(np.float32),
    }
    shapes = {"query_key_value": (HEADS + 2 * KV_HEADS) * DIM, "out": WIDTH}
    parameters = {
        name: rng.standard_normal((PERIODS, len(KINDS), WIDTH, n)).astype(np.float32) / WIDTH**0.5
        for name, n in shapes.items()
    }
    one_device = jax.jit(jax.value_and_grad(loss))(parameters, batch)

    expression = packax.causal() & packax.documents(batch["segment_ids"])
    plan = packax.context_plan(expression, ranks=len(devices), kind="zigzag")
    with jax.set_mesh(mesh):
        masks = masks_of(batch["segment_ids"], sharding=SHARDING, plan=plan)
        several = jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(parameters, batch, plan))
    for kind, mask in masks.items():
        print(f"{kind}: a rank fetches {mask.fetched} keys from other ranks in each layer")
    pairs = zip(jax.tree.leaves(several), jax.tree.leaves(one_device), strict=True)
    error = max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)
    print(f"{len(devices)} devices: loss and gradients equal one device's within {error:.1e}")


if __name__ == "__main__":
    main()
