"""What block_sparse rejects, and its error messages."""

import context
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import PartitionSpec as P


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
