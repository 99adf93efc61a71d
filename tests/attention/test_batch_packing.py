"""Batch rows shorter than a tile, packed as documents of one row: when it applies, that results and
gradients do not change, and what the kernels receive.

Guards against a row that attends to keys of another batch row, masks shared by all batch rows, and
lse or gradients of the wrong row.
"""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from lowered import calls, text_of
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import lowering


def shapes(batch, q_len, kv_len, heads=8, kv_heads=2):
    return [
        jax.ShapeDtypeStruct((batch, n, h, 64), jnp.bfloat16)
        for n, h in ((q_len, heads), (kv_len, kv_heads))
    ]


@pytest.mark.parametrize(
    "batch,q_len,kv_len,expected",
    (
        (2048, 1, 1, True),
        (128, 64, 64, True),
        (127, 64, 64, False),  # 1016 tiles, below the threshold
        (128, 65, 64, False),
        (128, 64, 128, True),
        (128, 64, 129, False),
        (2048, 1, 4096, False),
        (1, 64, 64, False),
        (1 << 23, 64, 64, True),  # the longest row that the kernels accept
        ((1 << 23) + 1, 64, 64, False),
        ((1 << 22) + 1, 64, 128, False),
    ),
)
def test_when(batch, q_len, kv_len, expected):
    assert lowering.worth_packing(*shapes(batch, q_len, kv_len)) is expected


def test_one_row_of_many_heads_stays():
    assert not lowering.worth_packing(*shapes(1, 16, 16, heads=4096))


def test_sizes_that_are_not_known_yet():
    (batch, length) = jax.export.symbolic_shape("b, s")
    assert not lowering.worth_packing(*shapes(batch, 16, 16))
    assert not lowering.worth_packing(*shapes(2048, length, 16))
    assert not lowering.worth_packing(*shapes(2048, 16, length))


def test_blocks_are_tested_where_a_row_of_theirs_was():
    """Blocks are segment-checked only where one of their rows was. No XLA path reads these bits,
    only the kernels."""
    ids = np.zeros((9, 20), np.int32)
    ids[[2, 8], 7:9] = 1  # ids that reappear later in the row
    mask = packax.create_attention_mask(packax.documents(ids))
    query, key = (jnp.zeros((9, 20, h, 16)) for h in (2, 1))
    operands = Operands(query, key, key, **mask.operands("forward"))
    q_blocks = lowering.one_row(AttentionSpec(mask_mode=1), operands)["q_blocks"]
    rows = np.repeat(np.isin(np.arange(9), [2, 8]), 20)
    rows = np.pad(rows, (0, 192 - 180)).reshape(3, 64)
    np.testing.assert_array_equal(q_blocks[0, 4] & 1, rows.any(1))
    assert not rows.any(1).all()


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("kind", ("full", "documents"))
def test_what_the_kernels_get(kind):
    def loss(query, key, value, ids):
        expression = packax.documents(ids) if kind == "documents" else packax.full()
        return packax.flash_attention(query, key, value, expression).astype(jnp.float32).sum()

    query, key = shapes(2048, 49, 49)
    ids = jax.ShapeDtypeStruct((2048, 49), jnp.int32)
    ffi_calls = calls(text_of(jax.grad(loss, (0, 1, 2)), query, key, key, ids))
    attention = [x for x in ffi_calls if "ward" in x[0]]
    assert [x[0] for x in attention] == ["packax_forward_v1", "packax_backward_v1"]
    rows, keys = f"1x{2048 * 49}x8x64xbf16", f"1x{2048 * 49}x2x64xbf16"
    assert attention[0][2][:3] == attention[1][2][:3] == [rows, keys, keys]
    assert attention[1][3][:3] == [rows, keys, keys]
    assert attention[0][2][3] == f"1x{2048 * 49}xi32"


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("how", ("shard_map", "sharding"))
def test_each_device_merges_its_own(how):
    mesh = jax.make_mesh(
        (8,), ("data",), devices=jax.devices("cpu")[:8], axis_types=(jax.sharding.AxisType.Auto,)
    )
    spec = jax.P("data")

    def step(query, key, value):
        if how == "shard_map":
            return packax.flash_attention(query, key, value, packax.causal())
        sharding = packax.AttentionSharding(query=spec, key_value=spec)
        return packax.flash_attention(query, key, value, packax.causal(), sharding=sharding)

    def gradients(query, key, value):
        out, pullback = jax.vjp(step, query, key, value)
        return pullback(out)

    if how == "shard_map":
        gradients = jax.shard_map(
            gradients, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=True
        )
    placed = jax.sharding.NamedSharding(mesh, spec)
    query, key = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in shapes(8 * 1024, 33, 33)
    )
    with jax.set_mesh(mesh):
        ffi_calls = calls(text_of(gradients, query, key, key))
    attention = [x for x in ffi_calls if "ward" in x[0]]
    assert [x[0] for x in attention] == ["packax_forward_v1", "packax_backward_v1"]
    assert all(x[2][0] == f"1x{1024 * 33}x8x64xbf16" for x in attention)


@pytest.mark.usefixtures("extension")
def test_places_and_maps_stay_those_of_a_row():
    query, key = shapes(128, 32, 32)
    slopes = jax.ShapeDtypeStruct((8,), jnp.float32)

    def alibi(query, key, value, slopes):
        return packax.flash_attention(query, key, value, packax.causal(), bias=packax.alibi(slopes))

    def blocks(query, key, value):
        chosen = packax.masks.block_sparse(np.ones((1, 1, 1, 1), bool), (32, 32))
        return packax.flash_attention(query, key, value, packax.causal() & chosen)

    for ffi_calls in (
        calls(text_of(alibi, query, key, key, slopes)),
        calls(text_of(blocks, query, key, key)),
    ):
        assert ffi_calls[-1][0] == "packax_forward_v1"
        assert ffi_calls[-1][2][0] == "128x32x8x64xbf16"
