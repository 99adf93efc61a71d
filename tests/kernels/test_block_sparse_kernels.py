"""The fallback Triton kernels in the interpreter, with a block mask and the build's block lists.

Guards against a list that misses a block, a partial block that is taken for a full one, a head that
reads another's list or block mask, a missing word of bits, and empty rows that put a NaN in a sum.
"""

from __future__ import annotations

import numpy as np
import packax
import pytest
import score_oracle
import triton_interpreter as interpreter
from tiers import some

IDS = np.repeat([4, 7, 4, -1, 9], [90, 60, 40, 20, 90])  # 300 tokens, one id reappears
DIMS = (16, 8)


def random_map(rng, shape, size, lengths, share):
    return rng.random((*shape, *(-(-n // m) for n, m in zip(lengths, size, strict=True)))) < share


@pytest.mark.parametrize(
    "expression,lengths,shape,size,share,tiles",
    some([
        # blocks of 1, 3 or 5, a block mask per batch row and head, rows checked by id
        (packax.documents(IDS), (300, 300), (2, 4), (5, 3), 0.3, ((128, 64), (64, 128), (64, 64))),
        (packax.causal(offset=9), (80, 150), (1, 4), (1, 1), 0.2, ((64, 32), (32, 128), (64, 32))),
        # full blocks, which skip the mask; one block mask for all, or one per batch row
        (packax.causal(), (330, 330), (1, 1), (64, 192), 0.6, ((128, 64), (64, 64), (128, 64))),
        (packax.full(), (150, 330), (2, 1), (1, 64), 0.2, ((128, 32), (64, 64), (64, 64))),
        # one block mask for all batch rows, a mask per batch row; heads with lists of other lengths
        (packax.masks.ranges([[20], [0]], [[300], [250]]), (260, 260), (1, 4), (128, 64), 0.5,
         ((128, 64), (64, 128), (64, 64))),
    ], 1),
)  # fmt: skip
def test_equal_the_oracle(expression, lengths, shape, size, share, tiles):
    q_len, kv_len = lengths
    rng = np.random.default_rng(q_len)
    if isinstance(expression, packax._src.masks.documents.Ranges):
        expression = packax.masks.ranges(
            *(np.repeat(x, q_len, 1) for x in (expression.lo, expression.hi))
        )
    block_mask = random_map(rng, shape, size, lengths, share)
    block_mask[..., -1] = False  # no row attends to the last keys
    expression &= packax.masks.block_sparse(block_mask, size)
    mask = packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len)
    attends = np.asarray(expression.as_array(q_len, kv_len))
    batch, heads, kv_heads = 2, 4, 2
    attends = np.broadcast_to(attends, (batch, heads, q_len, kv_len))

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    query, key = draw(batch, q_len, heads, DIMS[0]), draw(batch, kv_len, kv_heads, DIMS[0])
    value, dout = draw(batch, kv_len, kv_heads, DIMS[1]), draw(batch, q_len, heads, DIMS[1])
    dlse = draw(batch, heads, q_len)
    idle_rows = ~attends.any(3).swapaxes(1, 2)
    dirty, dirty_dout = query.copy(), dout.copy()
    dirty[idle_rows] = dirty_dout[idle_rows] = np.nan
    dirty_dlse = np.where(idle_rows.swapaxes(1, 2), np.nan, dlse).astype(np.float32)
    query[idle_rows] = dout[idle_rows] = 0
    # Blocks of 64 keys without an attended pair are not even read.
    used = attends.any((1, 2))
    used = np.pad(used, ((0, 0), (0, -kv_len % 64))).reshape(batch, -1, 64).any(2).repeat(64, 1)
    unread = ~used[:, :kv_len] & (np.asarray(mask.q_block_lists).shape[0] == batch)
    dirty_key, dirty_value = (np.where(unread[..., None, None], np.nan, x) for x in (key, value))
    dirty_key, dirty_value = (np.ascontiguousarray(x, np.float32) for x in (dirty_key, dirty_value))

    slopes = np.full((1, heads), 0.03, np.float32)
    places = tuple(np.arange(n, dtype=np.int32)[None] for n in lengths)
    lists = map(np.asarray, (mask.block_mask, mask.q_block_lists, mask.kv_block_lists))
    operands = interpreter.Operands.of(mask)
    scale = 0.3
    extras = interpreter.Extras(operands, scale, 2.0, None, slopes, places, (*lists, size))
    forward_tile, dkdv_tile, dq_tile = tiles
    out, lse, top = interpreter.forward_fallback(
        dirty, dirty_key, dirty_value, operands, extras, forward_tile, (16, 16)
    )
    *grads, score_grads = interpreter.backward_fallback(
        dirty, dirty_key, dirty_value, out, lse, dirty_dout, dirty_dlse, operands, extras,
        dkdv_tile, dq_tile, (16, 16),
    )  # fmt: skip
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "scale": np.float32(scale),
        "slopes": slopes[0],
    }
    true, _, largest = score_oracle.true_and_plain(
        arrays, attends, dout, dlse, soft_cap=2.0, places=places
    )
    close = {"atol": 1e-4, "rtol": 1e-4}
    np.testing.assert_allclose(out, true.out, err_msg="out", **close)
    np.testing.assert_allclose(lse, true.lse, err_msg="lse", **close)
    np.testing.assert_allclose(top.max(-1), largest, err_msg="top", **close)
    for name, got in zip(("query", "key", "value"), grads, strict=True):
        np.testing.assert_allclose(got, true.gradients[name], err_msg=name, **close)
    sums, wanted = score_grads.sum((0, 3)), true.gradients["slopes"]
    np.testing.assert_allclose(sums[:, 1], wanted, atol=1e-5 * np.abs(score_grads).sum())
    assert not out[idle_rows].any() and not grads[0][idle_rows].any()
    if 1 in size or share < 0.3:
        assert idle_rows.any() or size == (1, 1)
    full = (
        np.asarray(mask.q_block_lists)[..., 1].sum(),
        np.asarray(mask.kv_block_lists)[..., 1].sum(),
    )
    assert all(full) == (size == (64, 192) or size == (128, 64)), full
