"""One of several processes that train a step together: `python processes.py OUT`, in an environment
that jax.distributed.initialize() detects. A single process can import `step` for comparison.

Query, key and value are computed from parameters sharded over fsdp and tensor. The batch is sharded
over fsdp, the sequence over context. Each process feeds only the rows of its devices.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import packax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, DIM = 4, 256, 16, 4, 2, 8
AXES = ("fsdp", "context", "tensor")
SPEC = P(*AXES, None)
SHARDING = packax.AttentionSharding(query=SPEC, key_value=SPEC)
SPECS = {"query": P("fsdp", "tensor"), "key_value": P("fsdp", "tensor"), "out": P("tensor", "fsdp")}


def parameters():
    rng = np.random.default_rng(0)
    sizes = {
        "query": (WIDTH, HEADS * DIM),
        "key_value": (WIDTH, KV_HEADS * 2 * DIM),
        "out": (HEADS * DIM, WIDTH),
    }
    return {name: rng.standard_normal(s).astype(np.float32) / 4 for name, s in sizes.items()}


def batch():
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32),
        "segment_ids": np.sort(rng.integers(-1, 4, (BATCH, LENGTH)), 1).astype(np.int32),
    }


def loss(weights, batch, sharding=None):
    expression = packax.causal() & packax.documents(batch["segment_ids"])
    if sharding is None:
        rows, mask = batch, packax.create_attention_mask(expression)
    else:
        rows, mask, _ = packax.context.shard_batch(batch, expression, sharding=sharding)
    x = rows["x"]
    query = (x @ weights["query"]).reshape(*x.shape[:2], HEADS, DIM)
    both = (x @ weights["key_value"]).reshape(*x.shape[:2], KV_HEADS, 2 * DIM)
    out = packax.flash_attention(query, both[..., :DIM], both[..., DIM:], mask)
    return jnp.mean((out.reshape(*x.shape[:2], -1) @ weights["out"] - x) ** 2)


def step(weights, batch, sharding=None):
    return jax.value_and_grad(loss)(weights, batch, sharding)


def main(out: str) -> None:
    jax.distributed.initialize()
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    everything = batch()

    def fed(rows, mesh=mesh):
        sharding = NamedSharding(mesh, P("fsdp"))
        return {
            name: jax.make_array_from_process_local_data(sharding, x[rows], x.shape)
            for name, x in everything.items()
        }

    with jax.set_mesh(mesh):
        rows = packax.context.process_rows(SHARDING, BATCH)
        local_batch = fed(rows)
        packax.context.check_same_rows(local_batch)
        placed = {
            name: jax.make_array_from_callback(
                x.shape, NamedSharding(mesh, SPECS[name]), x.__getitem__
            )
            for name, x in parameters().items()
        }
        shardings = {name: NamedSharding(mesh, s) for name, s in SPECS.items()}
        value, gradients = jax.jit(step, static_argnums=2, out_shardings=(None, shardings))(
            placed, local_batch, SHARDING
        )
        whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(gradients)
    spread, all_of_them = mesh, rows  # if context spans processes, they share rows
    if jax.process_count() == 2:
        axes = ("context", "fsdp", "tensor")
        spread = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
        all_of_them = np.arange(BATCH)
    refused = []
    # Rows chosen by process, not by the mesh; and arrays that each process has for itself.
    for wrong in (
        fed((all_of_them + jax.process_index()) % BATCH, spread),
        [jnp.zeros(3)],
    ):
        try:
            packax.context.check_same_rows(wrong)
        except ValueError as error:
            refused.append(str(error))
    arrays = {name: np.asarray(x.addressable_data(0)) for name, x in whole.items()}
    np.savez(out, loss=np.float32(value), rows=rows, refused=refused, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
