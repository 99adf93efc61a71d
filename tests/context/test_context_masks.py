"""Masks built for the ranks of a mesh: each part equals the mask of that rank's rows alone.

Guards against key bounds taken over other ranks' rows, and a mask sharded differently than its
specs say.
"""

import dataclasses

import jax
import numpy as np
import packax
import pytest
from context import (
    BATCH,
    BATCH_AXES,
    CONTEXT,
    FULL,
    LENGTH,
    expression_of,
    mesh_of,
    plan_of,
)
from packax._src.core.sharding import layout_of
from tiers import once_each


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
        for name in (
            "kv_start",
            "kv_end",
            "q_blocks",
            "kv_blocks",
            "q_order",
            "q_order_192",
            "kv_order",
        ):
            of_rank = np.split(np.asarray(getattr(mask, name)), 4, axis=-1)[rank]
            np.testing.assert_array_equal(
                of_rank, getattr(alone, name), err_msg=f"{name} of {rank}"
            )
    in_order = packax.create_attention_mask(expression_of("one mask for all"))
    in_order = np.broadcast_to(in_order.kv_end, (BATCH, LENGTH))
    np.testing.assert_array_equal(plan.unpermute(mask.kv_end), in_order)


@pytest.mark.parametrize(
    "kind,plan",
    once_each(
        ["causal", "documents", "positions", "spans of positions", "one mask for all"],
        ["balanced", "zigzag"],  # "zigzag" has one batch row
    ),
)
def test_the_specs_of_a_mask(kind, plan):
    """Kernels read block bounds and orders that XLA does not: every array is sharded as its spec
    says."""
    sharding = dataclasses.replace(FULL, mesh=mesh_of(1, 2, 2, 2))
    mask = packax.create_attention_mask(
        expression_of(kind), q_len=LENGTH, kv_len=LENGTH, sharding=sharding, plan=plan_of(plan, 2)
    )
    layout = layout_of(sharding)
    specs = sharding.mask_specs(mask)
    of_layout = mask.specs(layout.spec, layout.batch, layout.context, layout.heads)
    assert jax.tree.leaves(specs) == jax.tree.leaves(of_layout)
    sizes = {None: 1, BATCH_AXES: 2, "context": 2}
    for x, spec in zip(jax.tree.leaves(mask), jax.tree.leaves(specs), strict=True):
        pieces = [sizes[axes] for axes in (*spec, *[None] * (x.ndim - len(spec)))]
        assert x.sharding.shard_shape(x.shape) == tuple(
            size // n for size, n in zip(x.shape, pieces, strict=True)
        )
