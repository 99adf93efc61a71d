"""Forward attention on Hopper in Gluon. It computes the same as portable/fwd.py, which the tests
compare it with.

A program computes tiles of WARP_GROUPS x 64 rows of one head until none is left. Its producer warp
(row_producer.py) draws the next tile from a counter, sends it to the consumers, and streams
queries, keys and values through TMA, so the first loads of a tile overlap with the last products of
the previous tile. Each consumer warp group computes 64 rows with wgmma. In step i it issues s_i = q
k_i^T and acc += p_(i-1) v_(i-1) together, and computes the softmax of step i during the second
product (FlashAttention-3, arXiv 2407.08608, section 3.2). Named barriers make the warp groups take
turns at issuing products (section 3.1). Masked steps come first, then one loop without a mask.
With SCHEDULER, for short tiles, another warp draws the tiles.

Head dims are divided into chunks of columns (chunked_mma.py): QK_CHUNK columns of queries and keys,
V_CHUNK columns of values and outputs. If 64 rows of the output do not fit in a warp group's
registers (512), a tile is computed V_PARTS times, each time for another part of the value columns.
The scores are computed again each time.
"""

from common.kv_ranges import BLOCK, LOG2E
from sm90.args import BlockMask, Dropout, KernelScalars, Maps, Mask, RowTileShared
from sm90.chunked_mma import count
from sm90.config import constants
from sm90.fwd_consumer import ForwardArgs, consume, query_slots
from sm90.row_producer import bytes_of_bias, load, produce, schedule
from sm90.tiles import allocate_lines, allocate_tiles, barriers, init_barriers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SAMPLE = gl.constexpr(128)
FEW_KEYS = gl.constexpr(1024)


@gluon.jit
def attends_to_few(q_blocks, mask_batch, q_len):
    """Whether blocks of 64 rows span at most FEW_KEYS keys on average, in a sample of SAMPLE."""
    n = gl.arange(0, SAMPLE, gl.BlockedLayout([1], [32], [4], [0]))
    blocks = (q_len + BLOCK - 1) // BLOCK
    at = n * (blocks // SAMPLE) + n * (blocks % SAMPLE) // SAMPLE
    first = q_blocks + (n % mask_batch).to(gl.int64) * (5 * blocks) + at
    keys = gl.load(first + 3 * blocks) - gl.load(first)
    return gl.sum(gl.maximum(keys, 0) // SAMPLE, 0) <= FEW_KEYS


@gluon.jit
def is_chosen(choice, q_blocks, mask_batch, q_len):
    chosen = choice == 0
    if choice != 0:
        chosen = attends_to_few(q_blocks, mask_batch, q_len) == (choice == 1)
    return chosen


@gluon.jit
def forward_sm90(
    query, key, value, out, lse, row_max, sinks,
    kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, counter,
    slopes, bias, block_mask, q_block_lists, dropout_streams, dropout_rows,
    scale, soft_cap, mask_mode, batch, mask_batch, sink_batch, block_mask_batch, block_mask_heads,
    q_block, kv_block, bias_axes, dropout_threshold, dropout_rows_batch, inverse_keep, choice,
    q_len, kv_len, heads, kv_heads,
    QK_DIM: gl.constexpr, V_DIM: gl.constexpr, QK_CHUNK: gl.constexpr, V_CHUNK: gl.constexpr,
    WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OUT_IN_QUERY: gl.constexpr, V_PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, REMATERIALIZE: gl.constexpr,
    SCHEDULER: gl.constexpr, Q_STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """query, key, value and out are tensor maps (batch, heads, length, dim) with boxes of 64 or
    BLOCK_N rows of one head, and at most QK_DIM or V_DIM columns. `counter` is 0 at launch and must
    not be used by another launch at the same time; if it is null, programs take tiles in turns.

    At most one option is given, and the arguments of the others are None: `soft_cap` (soft_cap.py),
    ALiBi `slopes` for positions that are indices (alibi.py), block lists (block_lists.py), `bias`,
    `row_max`, or dropout (dropout.py). `bias` is a tensor map of an array in the query's dtype or
    float32, whose planes `bias_axes` describes (portable/bias.py); its tiles are loaded with those
    of the keys. `row_max` receives the largest logit of every row. With a bias or dropout, `lse`
    has two numbers per row (portable/row_sums.py): with a bias, logits are in base e; with dropout
    alone, the numbers are the log-sum-exp and 0. Every kernel takes `sinks` (common/sinks.py).

    If `choice` is 1 or 2, two kernels are launched, of which the other does nothing: 1 computes the
    call if its rows attend to few keys (`attends_to_few`), and 2 if to many.
    """
    if choice is not None and QK_DIM == 64:  # the head dim that has both
        batch = gl.where(is_chosen(choice, q_blocks, mask_batch, q_len), batch, 0)
    CHUNKS: gl.constexpr = count(QK_DIM, QK_CHUNK)
    SLOTS: gl.constexpr = query_slots(CHUNKS) if OUT_IN_QUERY else CHUNKS
    V_CHUNKS: gl.constexpr = count(V_DIM // V_PARTS, V_CHUNK)
    PLAIN: gl.constexpr = (
        soft_cap is None and slopes is None and bias is None and block_mask is None
        and row_max is None and dropout_streams is None
    )  # fmt: skip
    config: gl.constexpr = constants(
        # of tiles in shared memory, then of products
        QK_DIM=CHUNKS * QK_CHUNK, V_DIM=V_CHUNKS * V_CHUNK * V_PARTS,
        QK_COLUMNS=QK_DIM, V_COLUMNS=V_DIM, QK_CHUNK=QK_CHUNK, V_CHUNK=V_CHUNK,
        CHUNKS=CHUNKS, SLOTS=SLOTS, V_CHUNKS=V_CHUNKS,
        WARP_GROUPS=WARP_GROUPS, BLOCK_N=BLOCK_N, STAGES=STAGES, V_STAGES=STAGES, DOUT=False,
        OUT_IN_QUERY=OUT_IN_QUERY, V_PARTS=V_PARTS, REMATERIALIZE=REMATERIALIZE,
        SCHEDULER=SCHEDULER == 1, BRANCH=SCHEDULER == 1 or QK_DIM == 96,
        NEAR=QK_DIM == 96, ROWS_FIRST=QK_DIM == 96,
        # slower at 96, and not timed otherwise
        TOGETHER=not PLAIN or (QK_DIM != 64 and QK_DIM != 128),
        Q_STAGES=Q_STAGES, EARLY=EARLY == 1,
        SOFT_CAP=soft_cap is not None, ALIBI=slopes is not None, BIAS=bias is not None,
        BIAS_BYTES=bytes_of_bias(bias, query),
        BLOCK_LISTS=block_mask is not None, ROW_MAX=row_max is not None,
        DROPOUT=dropout_streams is not None,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    bias_s = None
    if config.BIAS:
        bias_s = allocate_tiles(bias.dtype, STAGES * WARP_GROUPS, 64, BLOCK_N)
    q_s = allocate_tiles(dtype, WARP_GROUPS * Q_STAGES * SLOTS, 64, QK_CHUNK)
    k_s = allocate_tiles(dtype, STAGES * CHUNKS, BLOCK_N, QK_CHUNK)
    v_s = allocate_tiles(dtype, STAGES * V_CHUNKS, BLOCK_N, V_CHUNK)
    if OUT_IN_QUERY:  # no room for a separate output: it overwrites the queries
        o_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, V_CHUNK], dtype)
        o_s = q_s.reinterpret(
            dtype, [WARP_GROUPS * SLOTS * QK_CHUNK // V_CHUNK, 64, V_CHUNK], o_tile
        )
    else:
        o_s = allocate_tiles(dtype, WARP_GROUPS * V_CHUNKS, 64, V_CHUNK)
    shared = RowTileShared(
        q_s=q_s, do_s=None, k_s=k_s, v_s=v_s, bias_s=bias_s, o_s=o_s,
        work_s=allocate_lines(gl.int32, 2, 16),
        q_full=barriers(WARP_GROUPS * Q_STAGES), q_empty=barriers(WARP_GROUPS * Q_STAGES),
        k_full=barriers(STAGES), k_empty=barriers(STAGES),
        v_full=barriers(STAGES), v_empty=barriers(STAGES),
        work_full=barriers(2), work_empty=barriers(2),
    )  # fmt: skip
    init_barriers(WARP_GROUPS * Q_STAGES, (shared.q_full, shared.q_empty), (1, 4))
    init_barriers(
        STAGES,
        (shared.k_full, shared.v_full, shared.k_empty, shared.v_empty),
        (1, 1, WARP_GROUPS * 4, WARP_GROUPS * 4),
    )
    init_barriers(2, (shared.work_full, shared.work_empty), (1, WARP_GROUPS * 128 + 32 * SCHEDULER))

    # factors of the scores, before the softmax and in it
    if config.SOFT_CAP:
        first_scale = scale / soft_cap
        scale2 = soft_cap * LOG2E
    elif config.BIAS:
        first_scale = scale
        scale2 = LOG2E
    else:
        first_scale = scale * LOG2E
        scale2 = 1.0 if config.ALIBI else scale * LOG2E
    args = ForwardArgs(
        maps=Maps(query, key, value, None, bias),
        mask=Mask(kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos),
        blocks=BlockMask(
            block_mask, q_block_lists, block_mask_batch, block_mask_heads, q_block, kv_block
        ),
        scalars=KernelScalars(
            mask_mode, batch, mask_batch, q_len, kv_len, heads, kv_heads, scale, soft_cap
        ),
        bias_axes=bias_axes, q_blocks=q_blocks, q_order=q_order, counter=counter,
        programs=gl.num_programs(0),
        shared=shared, out=out, lse=lse, row_max=row_max, sinks=sinks, sink_batch=sink_batch,
        slopes=slopes,
        dropout=Dropout(
            dropout_streams, dropout_rows, dropout_threshold, dropout_rows_batch, inverse_keep
        ),
        first_scale=first_scale, scale2=scale2,
    )  # fmt: skip
    if SCHEDULER:
        gl.static_assert(WARP_GROUPS == 1, "the scheduler needs one warp group")
        gl.warp_specialize(
            [(consume, (0, args, config)), (schedule, (args, config)), (load, (args, config))],
            [1, 1],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif WARP_GROUPS == 2:
        gl.warp_specialize(
            [(consume, (0, args, config)), (consume, (1, args, config)), (produce, (args, config))],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, args, config)),
                (consume, (1, args, config)),
                (consume, (2, args, config)),
                (produce, (args, config)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
