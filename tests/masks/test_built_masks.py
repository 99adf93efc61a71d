"""A built mask: its repr, the bound of its rows' keys, and what it rejects."""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest

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
    "map": (packax.masks.block_sparse(BLOCKS, (1, 4)) & PACKED & packax.causal(),
        "block_sparse of blocks (1, 4)>"),
    "one_for_all": (packax.causal() & packax.documents(IDS[0]), "documents>"),
}  # fmt: skip


def build(kind):
    return build_of(KINDS[kind][0])


def build_of(expression):
    return packax.create_attention_mask(expression, q_len=S, kv_len=S)


@pytest.mark.parametrize("kind", KINDS)
def test_text(kind):
    mask = build(kind)
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
    """A stack has the largest, or none if a mask has none."""
    near, far, every = (
        packax.create_attention_mask(x, q_len=600, kv_len=600)
        for x in (packax.sliding_window(9), packax.sliding_window(128), packax.causal())
    )
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
