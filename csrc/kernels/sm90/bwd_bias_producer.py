"""Producer warp of dK and dV with a bias: as in sm90/bwd_producer.py, and with a tile of the bias
for every block of rows.

It is separate, so that no byte of the kernels without a bias depends on it.
"""

from sm90.bwd_producer import load_dout, load_keys, load_queries, next_block, row_of
from sm90.row_producer import plane_of_bias
from sm90.tiles import load_line
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def stage_of_bias(bias, nth):
    """Stage and phase of the tile of the nth block, of whose number the two lowest bits count."""
    if bias.tiles_s.shape[0] == 1:
        stage, phase = nth * 0, nth & 1
    else:
        stage, phase = nth & 1, (nth >> 1) & 1
    return stage, phase


@gluon.jit
def load_bias(args, head, row, stat, nth, config: gl.constexpr):
    """Loads the bias of the nth block, and the largest logits of its rows."""
    bias = args.bias
    tile = args.tile
    ROWS: gl.constexpr = bias.tiles_s.shape[1]
    KEYS: gl.constexpr = bias.tiles_s.shape[2]
    stage, phase = stage_of_bias(bias, nth)
    mbarrier.wait(bias.empty.index(stage), phase ^ 1)
    full = bias.full.index(stage)
    mbarrier.expect(full, ROWS * KEYS * config.BIAS_BYTES + ROWS * 4)
    tile_s = bias.tiles_s.index(stage).reinterpret(bias.map.dtype, [1, ROWS, KEYS], bias.map.layout)
    plane = plane_of_bias(bias.axes, tile.b, head, args.scalars.heads)
    tma.async_load(bias.map, [plane, row, tile.first_key], full, tile_s)
    load_line(bias.top, bias.top_s.index(stage), stat, full)


@gluon.jit
def produce_with_bias(args, config: gl.constexpr):
    """Loads the partial blocks of every head, then the full blocks, then one extra block of rows,
    whose scores and dP are started and dropped."""
    tile = args.tile
    q_range = args.q_range
    load_keys(args, config)
    total = q_range.steps * tile.group
    g = 0
    n = 0
    for i in range(0, gl.where(total > 0, total + 1, 0)):
        stage = i % 2
        phase = (i // 2) & 1
        in_partial = i < q_range.partial * tile.group
        row = row_of(n, in_partial, q_range)
        stat = (tile.bh + g) * tile.padded + row
        head = tile.kv_head * tile.group + g
        load_queries(args, head, row, stat, stage, phase, (), config)
        if i < total:
            load_bias(args, head, row, stat, i, config)
        load_dout(args, head, row, stat, stage, phase, (), config)
        n, g = next_block(n, g, in_partial, q_range, tile.group)
