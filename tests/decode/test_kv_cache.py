"""kv_cache.write puts every token in its slot, dense and in pages, and changes nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from packax import kv_cache, segments


def prompts():
    """Three prompts in two rows, and sequence ids that are unique across rows."""
    ids = np.stack(
        [segments.from_lengths([5, 1], length=10), segments.from_lengths([9], length=10)]
    )
    sequences = np.where(ids < 0, -1, ids + np.array([[0], [2]]))
    new = np.random.default_rng(0).standard_normal((2, 10, 2, 4)).astype(np.float32)
    return new, sequences, segments.positions(ids)


def expected(cache, new, sequences, positions, place_of):
    cache = cache.copy()
    for row, token in np.argwhere(sequences >= 0):
        place = place_of(sequences[row, token], positions[row, token])
        if place is not None:
            cache[place] = new[row, token]
    return cache


def test_one_sequence_id_for_each_row():
    new = np.random.default_rng(0).standard_normal((2, 4, 2, 4)).astype(np.float32)
    cache, rows = np.zeros((3, 7, 2, 4), np.float32), np.array([[2], [0]])
    positions = np.arange(4) + np.array([[1], [3]])
    want = kv_cache.write(cache, new, np.repeat(rows, 4, 1), positions)
    np.testing.assert_array_equal(kv_cache.write(cache, new, rows, positions), want)


def test_dense():
    new, sequences, positions = prompts()
    cache = np.full((3, 7, 2, 4), 9, np.float32)  # the third prompt is longer
    wanted = expected(cache, new, sequences, positions, lambda b, p: (b, p) if p < 7 else None)
    got = jax.jit(kv_cache.write)(cache, new, sequences, positions)
    np.testing.assert_array_equal(got, wanted)


def test_pages():
    new, sequences, positions = prompts()
    table = np.array([[4, 0, -1], [2, 7, 99], [1, -1, 3]])  # a hole, and a page out of range
    cache = np.full((6, 4, 2, 4), 9, np.float32)

    def place_of(b, p):
        page = table[b, p // 4]
        return (page, p % 4) if 0 <= page < 6 else None

    wanted = expected(cache, new, sequences, positions, place_of)
    got = jax.jit(kv_cache.write)(cache, new, sequences, positions, block_table=table)
    np.testing.assert_array_equal(got, wanted)
    beyond = kv_cache.write(cache, new, sequences, positions + 12, block_table=table)
    np.testing.assert_array_equal(beyond, cache)


@pytest.mark.parametrize("paged", [False, True])
def test_a_packed_step(paged):
    """One row without its axis, with the places that `token_positions` gives."""
    lens, cu = np.array([9, 4, 6, 3]), np.array([1, 2, 2, 6, 8])
    sequences, positions = jax.jit(kv_cache.token_positions, static_argnums=0)(10, lens, cu, 3)
    assert sequences.tolist() == [-1, 0, 2, 2, 2, 2, -1, -1, -1, -1]
    assert positions.tolist() == [0, 8, 2, 3, 4, 5, 0, 0, 0, 0]
    new = np.random.default_rng(0).standard_normal((10, 2, 4)).astype(np.float32)
    cache = np.full((12, 3, 2, 4) if paged else (4, 12, 2, 4), 9, np.float32)
    table = np.random.default_rng(1).permutation(12).reshape(4, 3) if paged else None
    got = kv_cache.write(cache, new, sequences, positions, block_table=table)
    want = kv_cache.write(cache, new[None], sequences[None], positions[None], block_table=table)
    np.testing.assert_array_equal(got, want)
    for at in (1, 2, 5):
        n, p = int(sequences[at]), int(positions[at])
        place = (table[n, p // 3], p % 3) if paged else (n, p)
        np.testing.assert_array_equal(got[place], new[at])
    assert (np.asarray(got) == 9).all((2, 3)).sum() == (31 if paged else 43)


def test_a_packed_step_in_fp8_over_a_mesh_of_heads():
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices("cpu")[:2],
        axis_types=(jax.sharding.AxisType.Explicit,))  # fmt: skip
    new = np.random.default_rng(0).standard_normal((6, 2, 4)).astype(np.float32)
    table, scale = np.array([[3, 1], [0, 2]]), np.exp(new[:4, :, 0])
    at = kv_cache.token_positions(6, np.array([5, 2]), np.array([0, 3, 5]))

    def write(cache, new):
        return kv_cache.write(cache, new, *at, block_table=table, scale=scale)

    cache = jnp.zeros((4, 3, 2, 4), jnp.float8_e4m3fn)
    want = write(cache, new)
    with jax.set_mesh(mesh):
        specs = P(None, None, "tensor"), P(None, "tensor")
        shardings = [jax.NamedSharding(mesh, spec) for spec in specs]
        got = jax.jit(write)(*map(jax.device_put, (cache, new), shardings))
        assert jax.typeof(got).sharding.spec[2] == "tensor"
    np.testing.assert_array_equal(np.float32(got), np.float32(want))
    assert np.abs(np.float32(want)).sum((2, 3)).astype(bool).sum() == 5


@pytest.mark.parametrize("scale", [None, 0.5, np.array([0.5, 2.0], np.float32)])
def test_one_scale_for_all_tokens_of_a_packed_step_in_fp8(scale):
    new = np.random.default_rng(0).standard_normal((6, 2, 4)).astype(np.float32)
    cache = jnp.zeros((2, 3, 2, 4), jnp.float8_e4m3fn)
    at = np.array([[0, 1, 1, 0, -1, 0], [2, 0, 1, 0, 0, 1]])
    got = kv_cache.write(cache, new, *at, scale=scale)
    want = kv_cache.write(cache, new[None], *(x[None] for x in at), scale=scale)
    np.testing.assert_array_equal(np.float32(got), np.float32(want))
    factor = np.ones(2) if scale is None else np.broadcast_to(scale, 2)
    near = np.float32(got)[0, 2] * factor[:, None]
    np.testing.assert_allclose(near, new[0], rtol=0.07, atol=0.01)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_packed_step_over_a_mesh_of_pages(kind):
    """Every device writes the tokens of its pages. No device has all pages."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), devices=jax.devices("cpu")[:8],
        axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)  # fmt: skip
    rng = np.random.default_rng(0)
    new = rng.standard_normal((8, 2, 4)).astype(np.float32)
    table = rng.permutation(12).reshape(4, 3).astype(np.int32)
    lens, cu = np.array([5, 8, 0, 9], np.int32), np.array([0, 1, 4, 4, 7], np.int32)

    def step(cache, new, lens, table):
        at = kv_cache.token_positions(8, lens, cu)
        return kv_cache.write(cache, new, *at, block_table=table)

    cache = jnp.full((12, 4, 2, 4), 9.0)
    want = step(cache, new, lens, table)
    assert (np.asarray(want) != 9).all((2, 3)).sum() == 7
    with jax.set_mesh(mesh):
        specs = P("data", None, "tensor"), P("data", "tensor"), P("data"), P("data")
        args = [
            jax.device_put(x, jax.NamedSharding(mesh, spec))
            for x, spec in zip((cache, new, lens, table), specs, strict=True)
        ]
        compiled = jax.jit(step).lower(*args).compile()
        assert "[12,4,2,4]" not in compiled.as_text()
        np.testing.assert_array_equal(compiled(*args), want)


def test_one_token_of_each_sequence_keeps_the_dtype():
    cache = jnp.zeros((2, 4, 1, 8), jnp.bfloat16)
    got = kv_cache.write(cache, jnp.ones((2, 1, 1, 8)), [[0], [1]], [[3], [0]])
    assert got.dtype == jnp.bfloat16
    assert got[:, :, 0, 0].tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    "shape,tokens,dtype",
    [((2, 0), 1, jnp.float32), ((0, 3), 1, jnp.float8_e4m3fn), ((0, 3), 0, jnp.float32)],
)
def test_a_table_without_entries_writes_nothing(shape, tokens, dtype):
    """As in a decoding step of an empty batch."""
    pages = jnp.ones((4, 2, 1, 8), dtype)
    at = np.zeros((tokens, 1), np.int32)
    got = kv_cache.write(
        pages, jnp.zeros((tokens, 1, 1, 8)), at, at, block_table=jnp.zeros(shape, jnp.int32)
    )
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), 1)
    for rows, room in ((0, 4), (3, 0)):
        none = jnp.ones((rows, room, 1, 8), dtype)
        got = kv_cache.write(none, jnp.zeros((tokens, 1, 1, 8)), at, at)
        assert got.shape == none.shape and got.dtype == dtype
