"""Shared by the context parallelism tests: meshes of CPU devices, inputs, single-device results."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax._src.dispatch import runtime_tokens
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packings import ids_of, positions_of

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 4, 1024, 4, 2, 8
AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")

CONTEXT = packax.AttentionSharding(query=P(None, "context"), key_value=P(None, "context"))
# Documents of very different lengths, padding inside and at the end, an id that reappears.
ROWS = np.stack(
    [
        ids_of((0, LENGTH)),
        ids_of((3, 500), (1, 20), (-1, 9), (2, 300), (-1, 195)),
        ids_of((5, 90), (6, 200), (5, 334), (-2, 400)),
        ids_of(*((n, 32) for n in range(32))),
    ]
)


def mesh_of(*sizes: int, kind: str = "Auto", axes: tuple[str, ...] = AXES):
    count = int(np.prod(sizes))
    devices = jax.devices("cpu")
    if len(devices) < count:
        pytest.skip(f"needs {count} CPU devices: see conftest.py")
    types = (getattr(AxisType, kind),) * len(sizes)
    return jax.make_mesh(sizes, axes, devices=devices[:count], axis_types=types)


def plan_of(kind, shards, ids=ROWS):
    return kind and packax.context_plan(
        packax.causal() & packax.documents(ids), ranks=shards, kind=kind
    )


def tensors(
    dtype=jnp.float32, *, heads=HEADS, kv_heads=KV_HEADS, batch=BATCH, length=LENGTH, seed=0
):
    """query, key, value and the cotangents of output and log-sum-exp. They are numpy arrays, which
    a plan permutes without compiling anything."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    return (
        normal(batch, length, heads, DIM),
        normal(batch, length, kv_heads, DIM),
        normal(batch, length, kv_heads, DIM),
        normal(batch, length, heads, DIM),
        normal(batch, heads, length).astype(np.float32),
    )


def expression_of(kind: str) -> Any:
    positions = np.stack([positions_of(row) for row in ROWS])
    backwards = np.stack([positions_of(row[::-1]) for row in ROWS])
    return {
        "causal": packax.causal,
        "documents": lambda: packax.causal() & packax.documents(ROWS),
        "one mask for all": lambda: packax.causal() & packax.documents(ROWS[1]),
        "positions": lambda: packax.causal() & packax.documents(ROWS, positions=positions),
        "spans of positions": lambda: (
            packax.masks.spans(np.roll(ROWS[1], 50), packax.causal() & packax.chunked(96))
            & packax.documents(ROWS, positions=backwards)
        ),
    }[kind]()


def run_to_end(function):
    """Runs to completion, including callbacks, so that no error reaches another test."""
    try:
        jax.block_until_ready(function())
    finally:
        try:
            jax.effects_barrier()
        finally:
            runtime_tokens.clear()  # jax 0.10 raises an error again at every later barrier


def results(query, key, value, dout, dlse, mask, sharding=None, **keywords):
    """out, lse and the gradients of query, key and value. lse is 0 for rows without a key."""

    def attention(*tensors):
        return packax.flash_attention(
            *tensors, mask, return_lse=True, sharding=sharding, **keywords
        )

    (out, lse), pullback = jax.vjp(attention, query, key, value)
    return jnp.asarray(out), jnp.where(jnp.isfinite(lse), lse, 0), *pullback((dout, dlse))


def moved(plan, inputs):
    """The inputs of `results` in the plan's order, or unchanged without a plan."""
    if plan is None:
        return inputs
    return [plan.permute(x, 2 if n == 4 else 1) for n, x in enumerate(inputs)]


def in_order(plan, got):
    """Outputs of `results` for inputs from `moved`, back in sequence order."""
    if plan is None:
        return got
    return [plan.unpermute(x, 2 if n == 1 else 1) for n, x in enumerate(got)]


def specs_of(sharding):
    """The specs of the inputs of `results`."""
    batch, context, heads = [*sharding.query, None, None][:3]
    rows = sharding.query, sharding.key_value, sharding.key_value, sharding.query
    return *rows, P(batch, heads, context)


def placed(mesh, inputs, sharding):
    """The inputs of `results`, placed on the mesh."""
    pairs = zip(inputs, specs_of(sharding), strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def assert_same(got, expected, tolerance=1e-5):
    names = ("out", "lse", "dq", "dk", "dv")
    for name, x, y in zip(names, got, expected, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)


def collectives(text):
    """(operation, number of result elements) for every collective in compiled HLO."""
    found = re.findall(
        r"= \(?\w+\[([\d,]*)\]\S* "
        r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
        text,
    )
    return [(what, int(np.prod([int(n) for n in shape.split(",") if n]))) for shape, what in found]
