"""What block_sparse rejects, and its error messages."""

import context
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import PartitionSpec as P

BLOCKS = np.ones((5, 5), bool)


@pytest.mark.parametrize(
    "make,error,message",
    [
        (lambda: packax.masks.block_sparse(np.ones(5, bool), 1), ValueError,
         r"block_mask must have shape \(query blocks, key blocks\), .* but has \(5,\)"),
        (lambda: packax.masks.block_sparse(np.ones((2, 0), bool), 1), ValueError,
         r"but has \(2, 0\)"),
        (lambda: packax.masks.block_sparse(np.ones((5, 5)), 1), ValueError,
         "block_mask must be boolean, but has dtype float64"),
        (lambda: packax.masks.block_sparse(BLOCKS, 0), ValueError,
            "block_size must be a positive .* but is 0"),
        (lambda: packax.masks.block_sparse(BLOCKS, (1, 2, 3)), ValueError, r"but is \(1, 2, 3\)"),
        (lambda: packax.masks.block_sparse(BLOCKS, (1, 2.0)), ValueError, r"but is \(1, 2.0\)"),
        (lambda: packax.masks.block_sparse(BLOCKS, 2**31), ValueError,
            "below 2\\*\\*31, .* but is 2147483648"),
        (lambda: packax.masks.block_sparse(BLOCKS, 2).as_array(9, 11), ValueError,
         r"block_mask has shape \(5, 5\), so 5 blocks of keys, but 11 keys are 6 blocks of 2"),
        (lambda: packax.create_attention_mask(
            packax.masks.block_sparse(BLOCKS, (3, 2)) & packax.documents(np.ones(9, int))),
         ValueError,
         "so 5 blocks of query rows, but 9 query rows are 3 blocks of 3"),
        (lambda: packax.create_attention_mask(packax.masks.block_sparse(BLOCKS, 2), q_len=9),
         ValueError,
         "cannot infer kv_len"),
        (lambda: packax.masks.block_sparse(BLOCKS, 2) & packax.causal()
            & packax.masks.block_sparse(BLOCKS, 2),
         NotImplementedError,
         r"one block_sparse\(...\), and `&` was given two: combine the arrays into one"),
        (lambda: packax.masks.block_sparse(BLOCKS, 2) | packax.causal(), NotImplementedError,
         r"`\|` cannot take block_sparse\(...\), .* it: \(a \| b\) & block_sparse\(...\)"),
        (lambda: packax.create_attention_mask(packax.masks.block_sparse(np.ones((2, 5, 5), bool), 2)
                                              & packax.documents(np.ones((3, 9), int))), ValueError,
         "segment_ids has batch size 3, but block_mask has 2"),
    ],
)  # fmt: skip
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_errors_of_heads_plans_and_meshes():
    query, key = jnp.zeros((2, 70, 4, 8)), jnp.zeros((2, 140, 4, 8))
    with pytest.raises(
        ValueError, match="block_mask of 3 heads, but query has 4: pass one map per query head"
    ):
        expression = packax.masks.block_sparse(np.ones((2, 3, 70, 7), bool), (1, 20))
        packax.flash_attention(query, key, key, expression)
    expression = packax.masks.block_sparse(np.ones((2, 2), bool), 128)
    with jax.set_mesh(context.mesh_of(2, 2, axes=("data", "tensor"))):
        spec = P(None, None, "tensor", None)
        with pytest.raises(
            ValueError, match="the number of heads of block_mask, 3, must be a multiple"
        ):
            packax.create_attention_mask(
                packax.masks.block_sparse(np.ones((1, 3, 2, 2), bool), 128), q_len=256, kv_len=256,
                sharding=packax.AttentionSharding(spec, spec),
            )  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 4, 4), (0, 2, 4, 4)])
def test_a_batch_of_no_rows(shape):
    x = np.ones((0, 16, 2, 8), np.float32)
    out = packax.flash_attention(x, x, x, packax.masks.block_sparse(np.ones(shape, bool), 4))
    assert out.shape == x.shape
    for wrong in ((0, 4), (2, 0, 4), (0, 0, 4, 4)):
        with pytest.raises(ValueError, match="at least 1 of each but of batch"):
            packax.masks.block_sparse(np.ones(wrong, bool), 4)
