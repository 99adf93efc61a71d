"""Block masks under context parallelism: every rank has the mask of its rows, in the plan's order.

Guards against a block mask split where no rank or chunk begins, lists of another rank's rows, and
the mask of another batch row or head.
"""

import jax
import numpy as np
import packax
from context import (
    BATCH,
    HEADS,
    LENGTH,
    ROWS,
    mesh_of,
)
from jax.sharding import PartitionSpec as P

DOCUMENTS = packax.causal() & packax.documents(ROWS)
BLOCK = 100, 48  # these divide no chunk
CHOSEN = np.random.default_rng(100).random((BATCH, HEADS, 11, 22)) < 0.5
EXPRESSION = DOCUMENTS & packax.masks.block_sparse(CHOSEN, BLOCK)


def test_a_plan_balances_what_is_visited():
    """Rows with many keys are adjacent. The cost is the number of 64-key blocks visited by tiles of
    128 rows, over all heads."""
    chosen = np.random.default_rng(5).random((2, HEADS, LENGTH, LENGTH // 64)) < 0.004
    chosen[0, :2, :256] = chosen[1, 3, 512:] = True
    expression = packax.causal() & packax.masks.block_sparse(chosen, (1, 64))
    plan = packax.context_plan(expression, ranks=4, chunk=128, length=LENGTH)
    allowed = np.asarray(expression.as_array(LENGTH, LENGTH))
    tiles = allowed.reshape(2, HEADS, LENGTH // 128, 128, LENGTH // 64, 64).any((3, 5))
    work = tiles.sum((1, 3))  # of each tile
    dealt = np.take_along_axis(work, np.asarray(plan.order), 1).reshape(2, 4, -1).sum(2)
    in_order = work.reshape(2, 4, -1).sum(2)
    assert (dealt.sum(1) == in_order.sum(1)).all()
    assert (dealt.max(1) < 1.25 * dealt.mean(1)).all() and (
        in_order.max(1) > 1.5 * in_order.mean(1)
    ).any()


def test_what_a_rank_holds():
    """Bits and lists of the rank's rows; blocks that fit in what the plan keeps together; specs
    that name the axes of the arrays."""
    mesh = mesh_of(2, 4, axes=("data", "context"))
    sharding = packax.AttentionSharding(query=P("data", "context"), key_value=P("data", "context"))
    plan = packax.context_plan(DOCUMENTS, ranks=4, chunk=128)
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(EXPRESSION, sharding=sharding, plan=plan)
    assert mask.block_size == (4, 48)  # gcd(100, 128)
    rows_per_rank = LENGTH // 4
    specs = sharding.mask_specs(mask)
    for name, shape, spec in (
        ("block_mask", (2, HEADS, rows_per_rank // 4, 1), P("data", None, "context")),
        (
            "q_block_lists",
            (2, HEADS, rows_per_rank // 128, 2 + LENGTH // 64),
            P("data", None, "context"),
        ),
        (
            "kv_block_lists",
            (2, HEADS, LENGTH // 128, 2 + rows_per_rank // 64),
            P("data", None, None, "context"),
        ),
    ):
        x = getattr(mask, name)
        assert x.sharding.shard_shape(x.shape) == shape, name
        assert getattr(specs, name) == x.sharding.spec == spec
    assert packax.create_attention_mask(EXPRESSION).block_size == (100, 48)
