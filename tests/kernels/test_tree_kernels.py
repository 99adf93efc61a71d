"""The fallback Triton kernels in the interpreter with packed trees: lists that exclude siblings,
full blocks, and the subtree check in partial blocks.

Guards against a tile that skips the check although its list has a block that it attends in part.
"""

from __future__ import annotations

import itertools

import numpy as np
import packax
import pytest
import score_oracle
import trees
import triton_interpreter as interpreter
from tiers import some

DIMS, HEADS, KV_HEADS = (16, 8), 4, 2
TREES = {
    "prompt and answers": (trees.prompt_and_answers(170, 3, 50), "causal"),
    "deep": (trees.of_lengths([130, 30, 1, 60, 60, 40], [-1, 0, 1, 1, 0, -1]), "alone"),
    "window": (trees.random_tree(3, 300, 9), "window"),
}


@pytest.mark.parametrize(
    "name,tiles",
    some(
        itertools.product(
            TREES, [((128, 64), (64, 128), (64, 64)), ((64, 32), (32, 64), (64, 64))]
        ),
        0,
    ),
)
def test_equal_the_oracle(name, tiles):
    tree, joined = TREES[name]
    expression, length = trees.expression(tree, joined), len(tree.ids)
    mask = packax.create_attention_mask(expression)
    attends = trees.meaning(tree, joined)[None]
    rng = np.random.default_rng(length)

    def draw(*shape):
        return rng.standard_normal((1, length, *shape)).astype(np.float32)

    query, key = draw(HEADS, DIMS[0]), draw(KV_HEADS, DIMS[0])
    value, dout = draw(KV_HEADS, DIMS[1]), draw(HEADS, DIMS[1])
    dlse = rng.standard_normal((1, HEADS, length)).astype(np.float32)
    slopes = np.full((1, HEADS), 0.03, np.float32)
    places = 2 * (np.arange(length, dtype=np.int32)[None],)
    lists = map(np.asarray, (mask.block_mask, mask.q_block_lists, mask.kv_block_lists))
    operands = interpreter.Operands.of(mask)
    extras = interpreter.Extras(operands, 0.3, 2.0, None, slopes, places, (*lists, mask.block_size))
    forward_tile, dkdv_tile, dq_tile = tiles
    out, lse, _ = interpreter.forward_fallback(
        query, key, value, operands, extras, forward_tile, (16, 16)
    )
    *grads, _ = interpreter.backward_fallback(
        query, key, value, out, lse, dout, dlse, operands, extras, dkdv_tile, dq_tile, (16, 16)
    )
    arrays = {"query": query, "key": key, "value": value, "scale": np.float32(0.3)}
    arrays["slopes"] = slopes[0]
    true, _, _ = score_oracle.true_and_plain(
        arrays, attends, dout, dlse, soft_cap=2.0, places=places
    )
    close = {"atol": 1e-4, "rtol": 1e-4}
    np.testing.assert_allclose(out, true.out, err_msg="out", **close)
    np.testing.assert_allclose(lse, true.lse, err_msg="lse", **close)
    for name, got in zip(("query", "key", "value"), grads, strict=True):
        np.testing.assert_allclose(got, true.gradients[name], err_msg=name, **close)
