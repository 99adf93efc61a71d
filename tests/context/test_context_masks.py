"""Masks built for the ranks of a mesh: each part equals the mask of that rank's rows alone.

Guards against key bounds taken over other ranks' rows.
"""

import jax
import numpy as np
import packax
import pytest
from calls import Call
from context import BATCH, CONTEXT, LENGTH, expression_of, mesh_of, plan_of
from ranks import OverRanks


def test_every_rank_has_the_hull_of_its_own_rows():
    """Built sharded, the bounds equal those of a mask built from each rank's ranges alone."""
    plan = plan_of("balanced", 4)
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = packax.create_attention_mask(
            expression_of("one mask for all"), sharding=CONTEXT, plan=plan
        )
    rows_per_rank = LENGTH // 4
    for rank in range(4):
        rows = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        lo, hi = (np.asarray(x)[:, rows] for x in (mask.kv_start, mask.kv_end))
        alone = packax.create_attention_mask(packax.masks.ranges(lo, hi), kv_len=LENGTH)
        names = "kv_start", "kv_end", "q_blocks", "kv_blocks", "q_order", "q_order_192", "kv_order"
        for name in names:
            of_rank = np.split(np.asarray(getattr(mask, name)), 4, axis=-1)[rank]
            np.testing.assert_array_equal(
                of_rank, getattr(alone, name), err_msg=f"{name} of {rank}"
            )
    in_order = packax.create_attention_mask(expression_of("one mask for all"))
    in_order = np.broadcast_to(in_order.kv_end, (BATCH, LENGTH))
    np.testing.assert_array_equal(plan.unpermute(mask.kv_end), in_order)


@pytest.mark.parametrize("selector,kind", [("ranges", "balanced"), ("positions", "local")])
def test_stages_of_a_pipeline(selector, kind):
    """vmap with spmd_axis_name, over layers that share a mask whose rows are permuted."""
    call = Call(selector=selector, lengths="512x512", ranks="stages")
    assert OverRanks(call, kind).wrong() == []


def test_mask_of_one_device():
    """Only the call gets the sharding. It shards batch and heads."""
    call = Call(selector="documents", lengths="64x64", ranks="mask of one device")
    assert OverRanks(call, None).wrong() == []
