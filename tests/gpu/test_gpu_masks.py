"""The arrays of masks that a GPU builds equal those of XLA. `pytest -m gpu`."""

from __future__ import annotations

import jax
import numpy as np
import packax
import pytest
from tiers import some

pytestmark = pytest.mark.gpu


def id_patterns(length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    lengths = rng.integers(1, max(2, length // 5), length)
    runs = np.repeat(np.arange(length), lengths)[:length].astype(np.int32)
    return {
        "packed": runs,
        "hashed": (runs.astype(np.uint32) * np.uint32(2654435761)).view(np.int32),
        "colliding": runs * np.int32(4096),
        "reappearing": runs % np.int32(3),
        "random": rng.integers(-2, 4, length).astype(np.int32),
        "padding": np.full(length, -1, np.int32),
        "one": np.zeros(length, np.int32),
    }


def causal_documents(ids, **more):
    return packax.causal() & packax.documents(ids, **more)


LENGTHS = (1025, 65, 5000, 1, 131072, 2, 63, 64, 127, 129, 1000, 1024)


@pytest.mark.parametrize("length", some(LENGTHS, 0, 1, 2, 3))
def test_mask_arrays_equal_those_of_xla(length):
    rng = np.random.default_rng(length)
    cpu = jax.devices("cpu")[0]
    patterns = id_patterns(length, rng)
    rows = np.stack(list(patterns.values()))
    ramps = np.stack(
        [rng.permutation(length) if i % 2 else np.arange(length) for i in range(len(rows))]
    )
    ramps = ramps.astype(np.int32)
    other = np.roll(rows, 1, axis=0)[:, : max(1, length // 2)]
    lower = ramps[:, : other.shape[1]]
    makers = {
        "ids": lambda ids, other, pos, kv_pos: packax.documents(ids),
        "causal": lambda ids, other, pos, kv_pos: causal_documents(ids),
        "positions": lambda ids, other, pos, kv_pos: causal_documents(ids, positions=pos),
        "restarting": lambda ids, other, pos, kv_pos: causal_documents(ids, positions=pos % 50),
        "cross": lambda ids, other, pos, kv_pos: packax.documents(ids, kv_segment_ids=other),
        "cross positions": lambda ids, other, pos, kv_pos: causal_documents(
            ids, kv_segment_ids=other, positions=pos, kv_positions=kv_pos
        ),
        "cut": lambda ids, other, pos, kv_pos: (
            causal_documents(ids) & packax.masks.ranges(pos // 2, pos * 2)
        ),
    }

    @jax.jit  # one program of all masks is compiled faster than one of each
    def build(*arrays):
        return {name: packax.create_attention_mask(make(*arrays)) for name, make in makers.items()}

    arrays = (rows, other, ramps, lower)
    got, expected = (build(*jax.device_put(arrays, device)) for device in (jax.devices()[0], cpu))
    for name, mask in got.items():
        assert next(iter(mask.kv_start.devices())).platform == "gpu"
        assert next(iter(expected[name].kv_start.devices())).platform == "cpu"
        for x, y in zip(jax.tree.leaves(mask), jax.tree.leaves(expected[name]), strict=True):
            np.testing.assert_array_equal(x, y, f"{name} (rows are {list(patterns)})")
