"""Forward attention over row ranges, for every GPU that Triton supports.

Online softmax (FlashAttention-2, arXiv 2307.08691): with m the running maximum of the logits in
base 2 (in base e with a bias array: row_sums.py),
    p = 2^(logit - m),   l = l * alpha + sum(p),   acc = acc * alpha + p v,
    alpha = 2^(m_old - m_new)
The order of the key blocks does not matter, so partial blocks come first and one mask-free loop
processes the rest.

All portable forward kernels of the table are compiled from one function. `forward` supports only a
positive scale (the caller moves a sign into the query). `forward_fallback` supports everything else
that changes scores (scoring.py), block masks, any head dim up to the compiled one, and `row_max`,
the largest logit of each row, unless the pointer is null. `forward_bias` also supports a bias array
(bias.py) and dropout (dropout.py); if its row of the table has one stage, it has one loop for all
blocks. Arguments that a kernel does not support are None (csrc/aot/arguments.py).
"""

import triton
import triton.language as tl
from portable.arithmetic import dot
from portable.block_lists import BlockMask
from portable.dropout import drop
from portable.kv_ranges import (
    columns,
    load_rows,
    segments_of,
    size_of,
    store_rows,
    tile_of_program,
)
from portable.row_sums import LEAST, add_sink, power, sink_of, store_sums
from portable.row_tile import over_keys, row_tile, tile_pointers
from portable.scoring import logits, scoring_of, terms_of
from portable.steps import pair_of, pointers_of


@triton.jit
def attend(state, q, kv, tile, scoring, first_key, inside, FLOAT32_PRODUCTS: tl.constexpr):
    """One block of keys, with kv (N, Dqk) and (N, Dv). `inside` (M, N) is the mask, None if all
    rows attend to all keys."""
    m, l, acc = state
    k, v = kv
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_N: tl.constexpr = k.shape[0]
    keys = first_key + tl.arange(0, BLOCK_N)
    terms = terms_of(scoring, tile.first_row, first_key, keys, BLOCK_M, BLOCK_N, 0)
    x = dot(q, tl.trans(k), None, FLOAT32_PRODUCTS)
    factor = 1.0
    if scoring.scales is not None or scoring.cap is not None or terms.distances is not None:
        _, x = logits(x, terms, scoring)
    elif terms.bias is None:  # the factor is positive: the largest score has the largest logit
        factor = scoring.factor
    else:
        x = x * scoring.factor + terms.bias
    if inside is not None:
        x = tl.where(inside, x, float("-inf"))
    m_new = tl.maximum(m, tl.max(x, 1) * factor)
    p = power(x * factor - m_new[:, None], scoring.bias.array)
    alpha = power(m - m_new, scoring.bias.array)
    l = l * alpha + tl.sum(p, 1)
    p = drop(p, scoring.dropout, scoring.head, tile.rows, first_key, BLOCK_N, 0)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None], FLOAT32_PRODUCTS)
    return m_new, l, acc


@triton.jit
def forward(
    query, key, value, out, lse, row_max, sinks, kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos,
    q_blocks, q_order, block_mask, q_block_lists, scales, slopes, q_bias_pos, kv_bias_pos, bias,
    dropout_streams, dropout_rows, scale, soft_cap, inverse_keep, mask_mode, bias_kind,
    bias_axes, dropout_threshold, dropout_rows_batch, batch, mask_batch, sink_batch, scales_batch,
    bias_batch, block_mask_batch, block_mask_heads, q_block, kv_block, q_len, kv_len, heads,
    kv_heads, row_heads, qk_dim, v_dim,
    QK_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FLOAT32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Rows of query and out are `row_heads` heads apart (None: `heads`), and the kernel processes
    `heads` of them."""
    group = heads // kv_heads
    block_masks = BlockMask(
        block_mask, q_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block, q_len,
        kv_len,
    )  # fmt: skip
    head, kv_head, b, mask_b, row = tile_of_program(
        q_order, batch, mask_batch, tl.cdiv(q_len, 128), group, kv_heads, BLOCK_M
    )
    if row >= q_len:
        return
    tile = row_tile(
        head, b, mask_b, row, kv_start, kv_end, q_blocks, block_masks, dropout_threshold, bias,
        bias_kind, q_len, kv_len, size_of(row_heads, heads), BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    segments = segments_of(q_ids, kv_ids, q_pos, kv_pos, mask_mode, mask_b, q_len, kv_len)
    # rows that attend to nothing are not read
    q_rows = tile_pointers(query, tile, qk_dim, QK_DIM)
    q = load_rows(q_rows, (tile.hi > tile.lo)[:, None], qk_dim, QK_DIM)
    kv_first = (b.to(tl.int64) * kv_len + tile.walk.origin) * kv_heads + kv_head
    pointers = pointers_of(key, value, kv_first, kv_heads, qk_dim, v_dim, QK_DIM, V_DIM, BLOCK_N)
    pair = pair_of(pointers, kv_heads, qk_dim, v_dim, tile.walk.unit, QK_DIM, V_DIM)
    scoring = scoring_of(
        scale, scales, scales_batch, soft_cap, slopes, bias_batch, q_bias_pos, kv_bias_pos, bias,
        bias_kind, bias_axes, dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch,
        inverse_keep, b, heads, head, tile.rows, q_len, kv_len, 0,
    )  # fmt: skip

    # The lowest finite number and not -inf: for a row without a key so far, -inf - m is then -inf
    # and not NaN.
    m = tl.full([BLOCK_M], LEAST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, columns(V_DIM).shape[0]], tl.float32)
    m, l, acc = over_keys(
        attend, (m, l, acc), q, tile, segments, pair, scoring, QK_DIM, V_DIM, BLOCK_N, STAGES,
        FLOAT32_PRODUCTS,
    )  # fmt: skip

    # a block mask may exclude all keys of a row; NaN counts as attended and reaches the result
    attended = (tile.hi > tile.lo) & (l != 0.0)
    sink = sink_of(sinks, sink_batch, b, heads, head)
    l = add_sink(m, l, sink, bias)
    result = tl.where(attended[:, None], acc / tl.where(attended, l, 1.0)[:, None], 0.0)
    if dropout_threshold is not None:
        result *= inverse_keep
    out_rows = tile_pointers(out, tile, v_dim, V_DIM)
    store_rows(out_rows, result.to(out.dtype.element_ty), tile.valid[:, None], v_dim, V_DIM)
    stat = (b.to(tl.int64) * heads + head) * q_len
    store_sums(lse, row_max, stat, tile.rows, tile.valid, m, l, sink, attended, bias)
