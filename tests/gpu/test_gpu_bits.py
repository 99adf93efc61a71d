"""Results on a GPU that must be equal bit for bit: with changes that must not matter, and mask
arrays compared with XLA's. `pytest -m gpu`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from gpu_kinds import THREE_ROWS, causal_documents
from gpu_runs import Results, Tensors, assert_identical, packed, run, same_each_run, tensors

pytest_plugins = ("gpu_fixtures",)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("garbage", (6e4, -6e4, "max"))
def test_garbage_in_padding_changes_nothing(garbage, kind, deterministic):
    dtype, dims = kind
    padding = (THREE_ROWS == packax.PADDING_SEGMENT_ID)[..., None, None]
    if garbage == "max":
        garbage = float(jnp.finfo(dtype).max)
    clean = tensors(3, 500, 500, 16, 4, dims, dtype)  # more tiles than multiprocessors
    four = [jnp.where(padding, jnp.asarray(garbage, dtype), y) for y in clean[:4]]
    dlse = jnp.where(padding[:, None, :, 0, 0], 1e30, clean.dlse)
    dirty = type(clean)(*four, dlse)
    expression = causal_documents(THREE_ROWS)
    expected, got = (run(y, expression, None, deterministic) for y in (clean, dirty))
    assert_identical(
        same_each_run(got, deterministic),
        same_each_run(expected, deterministic),
        f"padding of {garbage}: ",
    )
    assert np.isfinite(np.asarray(got.dq, np.float32)).all()
    for y in (got.out, got.dq, got.dk, got.dv):
        assert not np.any(np.asarray(y, np.float32)[padding[..., 0, 0]])
    assert np.isneginf(
        np.asarray(got.lse)[np.broadcast_to(padding[:, None, :, 0, 0], got.lse.shape)]
    ).all()


def test_other_documents_change_nothing(kind):
    dtype, dims = kind
    ids = packed(130, 257, 90)
    inside = (ids == 2)[None, :, None, None]
    x = tensors(1, 477, 477, 8, 2, dims, dtype)
    y = tensors(1, 477, 477, 8, 2, dims, dtype, seed=1)
    mixed = type(x)(
        *(jnp.where(inside, a, 100 * b) for a, b in zip(x[:4], y[:4], strict=True)),
        jnp.where(inside[:, :, :, 0].swapaxes(1, 2), x.dlse, y.dlse),
    )
    expression = causal_documents(ids)
    before, after = (run(y, expression, None, True) for y in (x, mixed))
    rows = np.flatnonzero(ids == 2)
    for name in Results._fields:
        axis = 2 if name == "lse" else 1
        a, b = (np.take(np.asarray(getattr(r, name)), rows, axis) for r in (before, after))
        assert_identical(b, a, name)
        a, b = (np.asarray(getattr(r, name), np.float32) for r in (before, after))
        assert not np.array_equal(a, b), f"{name} of the other documents should have changed"


def test_nan_stays_where_numerics_md_says(kind):
    dtype, dims = kind
    ids = packed(384, 300, -84, 116)
    at = np.arange(884)
    x = tensors(1, 884, 884, 4, 2, dims, dtype)
    expression = causal_documents(ids)
    expected = run(x, expression, None, True)

    broken = jnp.asarray(at >= 384)
    wide, sums = broken[None, :, None, None], broken[None, None]
    got = run(
        Tensors(*(jnp.where(wide, jnp.nan, y) for y in x[:4]), jnp.where(sums, jnp.nan, x.dlse)),
        expression,
        None,
        True,
    )
    for name in Results._fields:
        axis = 2 if name == "lse" else 1
        a, b = (np.take(np.asarray(getattr(r, name)), at[:384], axis) for r in (got, expected))
        assert_identical(a, b, f"{name} of a document that shares no tile with the NaNs: ")
        assert np.isnan(np.asarray(getattr(got, name), np.float32)).any()


def test_the_same_bits_every_time(kind, deterministic):
    dtype, dims = kind
    x = tensors(3, 500, 500, 8, 2, dims, dtype)
    expression = causal_documents(THREE_ROWS)
    first = same_each_run(run(x, expression, None, deterministic), deterministic)
    for _ in range(10):
        again = same_each_run(run(x, expression, None, deterministic), deterministic)
        assert_identical(again, first, "second run: ")


# --- Masks: the arrays from CUDA equal those from XLA, integer for integer


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


@pytest.mark.parametrize("length", (1, 2, 63, 64, 65, 127, 129, 1000, 1024, 1025, 5000, 131072))
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
    for name, make in makers.items():
        function = jax.jit(lambda *arrays, make=make: packax.create_attention_mask(make(*arrays)))
        arrays = (rows, other, ramps, lower)
        got, expected = (
            function(*jax.device_put(arrays, device)) for device in (jax.devices()[0], cpu)
        )
        assert next(iter(got.kv_start.devices())).platform == "gpu"
        assert next(iter(expected.kv_start.devices())).platform == "cpu"
        assert_identical(got, expected, f"{name} (rows are {list(patterns)}): ")
