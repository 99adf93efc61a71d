"""Plans that keep documents local: no collectives for whole documents, and padding of any value.

tests/table compares results and gradients, with other options and on other meshes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packax
import pytest
from context import (
    BATCH,
    CONTEXT,
    LENGTH,
    assert_same,
    in_order,
    mesh_of,
    moved,
    placed,
    results,
    tensors,
)
from local_cases import ROWS, expression_of
from local_plans import greedy


def test_nothing_is_shared():
    """The program then has no collective, forward or backward."""
    ids = np.broadcast_to(np.repeat(np.arange(32), 32), (BATCH, LENGTH))
    expression = packax.causal() & packax.documents(ids)
    plan = greedy(ids, 4)
    assert plan.shared == 0
    expected = jax.jit(results)(*tensors(), packax.create_attention_mask(expression))
    mesh = mesh_of(4, axes=("context",))
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
        inputs = placed(mesh, moved(plan, tensors()), CONTEXT)
        compiled = jax.jit(results).lower(*inputs, mask).compile()
        got = in_order(plan, jax.block_until_ready(compiled(*inputs, mask)))
    text = compiled.as_text()
    for what in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        assert what not in text
    assert_same(got, expected)


@pytest.mark.exhaustive
def test_bfloat16_meets_the_rule_of_the_oracle():
    """With huge values in padding; a split document's gradients are summed over four ranks."""
    ids = ROWS[1]
    inputs = tensors(jnp.bfloat16, batch=1)
    padding = jnp.asarray(ids == -1)[None, :, None, None]
    *rows, dlse = inputs
    rows = [jnp.where(padding, jnp.asarray(1e30, x.dtype), x) for x in rows]
    inputs = (*rows, dlse)
    plan = greedy(ids, 4)

    @jax.jit
    def run(*inputs):
        expression = expression_of("one mask for all")
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
        return in_order(plan, results(*moved(plan, inputs), mask))

    with jax.set_mesh(mesh_of(4, axes=("context",))):
        got = jax.block_until_ready(run(*inputs))
    query, key, value, dout = (jnp.where(padding, 0, x) for x in rows)
    allowed = expression_of("one mask for all").as_array(LENGTH, LENGTH)
    scale = query.shape[3] ** -0.5
    true = oracle.exact(query, key, value, allowed, scale, dout, dlse)
    plain = oracle.plain(query, key, value, allowed, scale, dout, dlse)
    got[1] = jnp.where(allowed.any(-1), got[1], -jnp.inf)
    oracle.check(oracle.Results(*got), true, plain)
