"""Masks for kernels in the interpreter, with the arrays that the FFI handler passes."""

from __future__ import annotations

import numpy as np
import packax
import triton_interpreter as interpreter
from mask_checks import kernel_operands


def packed(*lengths: int) -> np.ndarray:
    """Segment ids of one row: the index of each length; a negative length is padding."""
    return np.concatenate(
        [np.full(abs(n), i if n > 0 else -1) for i, n in enumerate(lengths)]
    ).astype(np.int32)


def positions(ids: np.ndarray, kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    if kind == "restart":
        start = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
        return (np.arange(len(ids)) - np.repeat(start, np.diff(np.r_[start, len(ids)]))).astype(
            np.int32
        )
    if kind == "in pairs":
        return np.arange(len(ids), dtype=np.int32) // 2
    return rng.integers(-5, 50, len(ids)).astype(np.int32)


def mask_of(
    expression: packax._src.masks.expressions.MaskExpression, q_len: int, kv_len: int
) -> interpreter.Operands:
    """The mask operands as the FFI handler passes them. The mask kernels compute the blocks,
    so this tests them too."""
    mask = packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len)
    names = ("kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks")
    ops = kernel_operands(mask)
    lo, hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks = (ops[name] for name in names)
    segment_checked = np.repeat(q_blocks[:, 4] & 1, 64, axis=1)[:, : lo.shape[1]] & (hi > lo)
    operands = interpreter.Operands(
        lo,
        hi,
        segment_checked.astype(np.int32),
        kv_len,
        mask.mask_mode,
        (q_ids, kv_ids),
        (q_pos, kv_pos),
    )
    np.testing.assert_array_equal(operands.kv_blocks, mask.kv_blocks)
    return operands


def drawn(rng, attends, heads, kv_heads, dims, garbage, idle_keys=None):
    """The operands of attention with these pairs, (B, H, Sq, Skv); the same with garbage in rows
    and keys without a pair, whose content must not matter; and which rows (B, Sq, H) these are."""
    batch, _, q_len, kv_len = attends.shape
    sizes = {"query": (q_len, heads, 0), "key": (kv_len, kv_heads, 0)}
    sizes |= {"value": (kv_len, kv_heads, 1), "dout": (q_len, heads, 1)}
    clean = {
        name: rng.standard_normal((batch, n, h, dims[d])).astype(np.float32)
        for name, (n, h, d) in sizes.items()
    }
    clean["dlse"] = rng.standard_normal((batch, heads, q_len)).astype(np.float32)
    idle_rows = ~attends.any(3).swapaxes(1, 2)
    keys = ~attends.any((1, 2)) if idle_keys is None else idle_keys
    dirty = {name: x.copy() for name, x in clean.items()}
    for name, idle in (("query", idle_rows), ("dout", idle_rows), ("key", keys), ("value", keys)):
        clean[name][idle], dirty[name][idle] = 0, garbage
    if np.isnan(garbage):
        dirty["dlse"][idle_rows.swapaxes(1, 2)] = garbage
    return clean, dirty, idle_rows


def restarting(ids: np.ndarray) -> np.ndarray:
    return positions(ids, "restart")


IDS3 = np.stack(
    [packed(70, 3, 97, 1, 29), packed(40, -30, 77, -9, 44), np.arange(200, dtype=np.int32) // 7 % 9]
)

ATTENTION = {
    "documents": (packax.causal() & packax.documents(IDS3[0]), 200, 200, 4, 2),
    "three rows": (packax.causal() & packax.documents(IDS3), 200, 200, 4, 1),
    "checked by id": (packax.documents(IDS3[2]), 200, 200, 2, 2),
    "checked by position": (
        packax.causal() & packax.documents(IDS3[0], positions=positions(IDS3[0], "random")),
        200, 200, 2, 1),
    "checked by two limits": (
        packax.sliding_window(9, 4) & packax.documents(
            np.stack([IDS3[2], IDS3[0]]), positions=positions(IDS3[0], "random")), 200, 200, 2, 1),
    "restarting positions": (
        packax.causal() & packax.documents(IDS3[1], positions=restarting(IDS3[1])), 200, 200, 2, 1),
    "longer keys": (packax.full(), 70, 333, 8, 1),
    "longer queries": (packax.causal(), 333, 70, 2, 2),
    "one row": (packax.full(), 1, 130, 4, 4),
    "ranges with empty rows": (
        packax.masks.ranges(np.arange(150) % 90, np.arange(150) % 60 + 30), 150, 100, 2, 1),
    "short": (packax.causal() & packax.documents(IDS3[0, :90]), 90, 90, 4, 2),
}  # fmt: skip
