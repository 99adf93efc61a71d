"""The demo's model under plain jit, parameters over fsdp and tensor: no shard_map, no sharding=.

Compared with the same model using jax.nn's attention, which XLA partitions natively: packax adds no
collective.
"""

from __future__ import annotations

import collections
import functools
import re

import jax
import numpy as np
import packax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packax.demo import model

BATCH, LENGTH = 4, 128
CONFIG = model.Config(
    vocabulary=64, layers=2, width=64, heads=4, kv_heads=2, head_dim=16, hidden=64
)
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
SPECS = {
    "embedding": P(),
    "layers": {
        "attention_norm": P(),
        "query_key_value": P(None, "fsdp", None),
        "attention_out": P(None, "tensor", "fsdp"),
        "mlp_norm": P(),
        "gate_up": P(None, "fsdp", None),
        "down": P(None, "tensor", "fsdp"),
    },
    "norm": P(),
    "unembedding": P(None, "tensor"),
}


def loss(parameters, batch, mask_of):
    names = ("tokens", "positions", "following", "weight")
    mask = mask_of(packax.causal() & packax.documents(batch["segment_ids"]))
    return model.loss(parameters, *(batch[name] for name in names), mask, CONFIG)


def dense(expression):
    return expression.as_array(LENGTH, LENGTH)[:, None]


def jax_nn(query, key, value, mask):
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def batch_of():
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 4, (BATCH, LENGTH)), 1).astype(np.int32)
    return {
        "tokens": rng.integers(0, 64, (BATCH, LENGTH)).astype(np.int32),
        "following": rng.integers(0, 64, (BATCH, LENGTH)).astype(np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape),
        "weight": np.ones(ids.shape, np.float32),
        "segment_ids": ids,
    }


@pytest.mark.exhaustive
def test_collectives_are_those_of_jax_nn(monkeypatch):
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight CPU devices: see conftest.py")
    mesh = jax.make_mesh(
        (4, 2), ("fsdp", "tensor"), devices=devices, axis_types=(AxisType.Auto,) * 2
    )
    host, batch = model.initialize(CONFIG, jax.random.key(0)), batch_of()
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), SPECS)
    placed = jax.device_put((host, batch), (shardings, NamedSharding(mesh, P("fsdp"))))

    def compiled(mask_of):
        step = jax.value_and_grad(functools.partial(loss, mask_of=mask_of))
        with jax.set_mesh(mesh):
            jitted = jax.jit(step, out_shardings=(None, shardings))
            program = jitted.lower(*placed).compile()
        found = re.findall(rf"\b({'|'.join(KINDS)})(?:-start)?\(", program.as_text())
        return program(*placed), collections.Counter(found)

    got, ours = compiled(packax.create_attention_mask)
    monkeypatch.setattr(model.packax, "flash_attention", jax_nn)
    want, theirs = compiled(dense)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    assert theirs["all-gather"] and theirs["all-reduce"]  # parameters are gathered and summed
    assert all(ours[kind] <= theirs[kind] for kind in KINDS), (ours, theirs)
