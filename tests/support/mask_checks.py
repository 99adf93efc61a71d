"""Checks the pairs that a mask's arrays allow against its expression."""

import numpy as np


def attended(mask, use_test=True):
    """The pairs that the arrays allow, by the rules of docs/internals/mask_format.md."""
    index = np.arange(mask.kv_len)
    lo, hi = np.asarray(mask.kv_start)[..., None], np.asarray(mask.kv_end)[..., None]
    allowed = (lo <= index) & (index < hi)
    if use_test and mask.mask_mode >= 1:
        kv_ids = mask.q_ids if mask.kv_ids is None else mask.kv_ids
        allowed &= np.asarray(mask.q_ids)[..., None] == np.asarray(kv_ids)[:, None]
    if use_test and mask.mask_mode >= 2:
        limits = np.asarray(mask.q_pos)
        upper, lower = (limits[:, 0], limits[:, 1]) if mask.mask_mode == 3 else (limits, None)
        kv_pos = np.asarray(mask.q_pos if mask.kv_pos is None else mask.kv_pos)[:, None]
        allowed &= upper[..., None] >= kv_pos
        if lower is not None:
            allowed &= lower[..., None] <= kv_pos
    return allowed


def check(mask, expression):
    dense = np.asarray(expression.as_array(mask.q_len, mask.kv_len))
    dense = np.broadcast_to(dense, (mask.kv_start.shape[0], mask.q_len, mask.kv_len))
    np.testing.assert_array_equal(attended(mask), dense)
    # Where no row of a block is segment-checked, the ranges alone must be exact: there the kernels
    # load no ids.
    segment_checked = (np.asarray(mask.q_blocks)[:, 4] & 1).repeat(64, axis=1)[:, : mask.q_len] != 0
    ranges_only = attended(mask, use_test=False)
    np.testing.assert_array_equal(ranges_only[~segment_checked], dense[~segment_checked])
    empty = np.asarray(mask.kv_start) >= np.asarray(mask.kv_end)
    assert not np.asarray(mask.kv_start)[empty].any() and not np.asarray(mask.kv_end)[empty].any()


def kernel_operands(mask):
    """A mask's arrays by name, as kernels get them: kv_start replaces absent ids and positions."""
    unread = dict.fromkeys(("q_ids", "kv_ids", "q_pos", "kv_pos"), mask.kv_start)
    operands = unread | mask.operands("forward") | mask.operands("backward")
    return {name: np.array(x) for name, x in operands.items()}
