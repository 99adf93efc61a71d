"""A built mask: its dense array, its repr, and vmap over its batch.

Guards against a mask whose arrays differ from its expression, and against a vmap over a mask, as
Equinox models use, that fails or mixes rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from tiers import some

B, S, HEADS = 2, 9, 2
IDS = np.array([[0, 0, 0, 1, 1, 1, 0, 0, -1], [3, 3, 3, 3, 5, 5, 5, -1, -1]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 1, 4, 0], [0, 1, 2, 3, 2, 1, 0, 0, 0]], np.int32)
BLOCKS = np.random.default_rng(1).random((B, HEADS, S, 3)) < 0.6
PACKED = packax.documents(IDS, positions=POSITIONS)
KINDS = {  # expression, and what repr says of it after a transformation
    "ranges": (packax.masks.ranges(IDS, IDS + 4), "ranges of keys, without documents"),
    "ids": (packax.sliding_window(4) & packax.documents(IDS), "documents>"),
    "positions": (packax.causal() & PACKED, "an upper limit, as of causal>"),
    "window": (packax.sliding_window(2, 1) & PACKED, "two limits, as of a window>"),
    "keys": (packax.documents(IDS, kv_segment_ids=IDS[::-1], positions=POSITIONS,
        kv_positions=IDS) & packax.causal(), "documents"),
    "map": (packax.masks.block_sparse(BLOCKS, (1, 4)) & PACKED & packax.causal(),
        "block_sparse of blocks (1, 4)>"),
    "map_of_rows": (
        packax.masks.block_sparse(BLOCKS[:, 0], (1, 4)) & packax.documents(IDS),
        "block_sparse",
    ),
    "map_of_all": (
        packax.masks.block_sparse(BLOCKS[:1], (1, 4)) & packax.documents(IDS),
        "block_sparse",
    ),
    "one_for_all": (packax.causal() & packax.documents(IDS[0]), "documents>"),
}  # fmt: skip


def build(kind):
    return build_of(KINDS[kind][0])


def build_of(expression):
    return packax.create_attention_mask(expression, q_len=S, kv_len=S)


@pytest.mark.parametrize("kind", some(KINDS, 0, 2, 4, 6, 8))
def test_as_array_and_text(kind):
    mask = build(kind)
    expected = np.asarray(KINDS[kind][0].as_array(S, S))
    expected = expected if expected.ndim > 2 else expected[None]
    np.testing.assert_array_equal(mask.as_array(), expected)
    np.testing.assert_array_equal(jax.jit(lambda m: m.as_array())(mask), expected)
    first, second = repr(mask).splitlines()
    assert second == f" built from {KINDS[kind][0]!r}>"
    transformed = repr(jax.tree.map(lambda x: x, mask))
    size = sum(x.nbytes for x in jax.tree.leaves(mask))
    batch = 1 if kind == "one_for_all" else B
    assert first == f"<AttentionMask: batch {batch}, 9 queries, 9 keys, {size:,} bytes"
    same, second = transformed.splitlines()
    assert same == first and second.startswith(" built from ") and KINDS[kind][1] in second


def test_text_of_windows_of_several_sizes():
    """The text shows the window, and masks of several windows share one compiled program."""
    one, other = (build_of(packax.causal() & packax.sliding_window(n)) for n in (2, 4))
    assert "built from causal() & sliding_window(2)>" in repr(one)
    assert jax.tree.structure(one) == jax.tree.structure(other)


def test_the_bound_of_a_row_s_keys():
    """Rounded up; a stack has the largest, or none if a mask has none."""
    near, far, every = (
        packax.create_attention_mask(x, q_len=600, kv_len=600)
        for x in (packax.sliding_window(9), packax.sliding_window(128), packax.causal())
    )
    assert (near.row_keys, far.row_keys, every.row_keys) == (128, 256, 0)
    assert packax.masks.stack_masks([near, far])[0].row_keys == 256
    assert packax.masks.stack_masks([near, every])[0].row_keys == 0


def test_as_array_is_for_small_lengths():
    mask = packax.create_attention_mask(packax.causal(), q_len=4097, kv_len=4096)
    with pytest.raises(ValueError, match="4097 x 4096 booleans, but makes at most 16777216"):
        mask.as_array()


def test_text_of_trees_of_anything():
    mask = build("map")
    assert "2 x" not in repr(jax.eval_shape(lambda: mask))
    assert repr(jax.eval_shape(lambda: mask)) == repr(jax.tree.map(lambda x: x, mask))
    assert "kv_start=0" in repr(jax.tree.map(lambda x: 0, mask))
    assert "no batch axis" in repr(jax.tree.map(lambda x: x[0], mask))


@pytest.mark.parametrize("kind", some(KINDS, 0, 4, 8))
def test_vmap_over_the_batch(kind):
    """As Equinox maps a model of one row: results and gradients equal those without vmap."""
    mask = build(kind)
    rng = np.random.default_rng(0)
    shapes = (B, S, HEADS, 8), (B, S, 1, 8), (B, S, 1, 8), (B, S, HEADS, 8)
    *tensors, dout = (jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes)

    def one(query, key, value, mask):
        return packax.flash_attention(query[None], key[None], value[None], mask)[0]

    def together(axes):
        return lambda *x: jax.vmap(one, (0, 0, 0, axes))(*x, mask)

    expected, transpose = jax.vjp(lambda *x: packax.flash_attention(*x, mask), *tensors)
    in_axes = [mask.vmap_axes()]
    if kind == "one_for_all":
        in_axes.append(None)
    elif kind != "map_of_all":  # whose block mask has no batch axis to map
        in_axes.append(0)
    for axes in in_axes:
        got, gradients = jax.vjp(together(axes), *tensors)
        for x, y in zip((got, *gradients(dout)), (expected, *transpose(dout)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_vmap_of_a_mask_that_is_not_mapped_or_of_a_batch_inside():
    mask, query = build("ids"), jnp.ones((B, S, HEADS, 8))

    def one(query, mask):
        return packax.flash_attention(query[None], query[None], query[None], mask)

    with pytest.raises(ValueError, match=r"map the mask too, with in_axes=mask.vmap_axes\(\)"):
        jax.vmap(one, (0, None))(query, mask)
    with pytest.raises(ValueError, match=r"without a batch axis.* query has batch size 2"):
        jax.vmap(packax.flash_attention, (None, None, None, 0))(query, query, query, mask)


def test_no_hash():
    """With a hash by identity, a mask as a static argument of jit would recompile for every
    mask."""
    mask = build("ids")
    with pytest.raises(TypeError, match=r"an AttentionMask has no hash.* ordinary argument"):
        hash(mask)
    query = jnp.ones((B, S, HEADS, 8))
    static = jax.jit(lambda m: packax.flash_attention(query, query, query, m), static_argnums=0)
    with pytest.raises((TypeError, ValueError), match=r"no hash|[Nn]on-hashable"):
        static(mask)
