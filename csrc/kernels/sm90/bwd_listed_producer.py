"""Producer warp of dK and dV with a block mask: as in sm90/bwd_producer.py, for the block lists of
the group's heads.

It is separate, so that no byte of the kernels without a block mask depends on it.
"""

from sm90.block_lists import list_of_keys
from sm90.bwd_producer import ROWS, load_dout, load_keys, load_queries
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def produce_listed(args, config: gl.constexpr):
    """Loads the blocks of every head's list, then one extra block of rows, whose scores (for a tile
    of 64 keys also dP) are started and dropped."""
    tile = args.tile
    load_keys(args, config)
    i = 0
    for g in range(0, tile.group):
        listed, partial, full_count = list_of_keys(args.blocks, args.scalars, tile, g)
        block = gl.load(listed)
        for n in range(0, partial + full_count):
            row = block * ROWS
            # the list is read one step ahead
            block = gl.load(listed + gl.minimum(n + 1, partial + full_count - 1))
            stage = i % 2
            phase = (i // 2) & 1
            stat = (tile.bh + g) * tile.padded + row
            head = tile.kv_head * tile.group + g
            load_queries(args, head, row, stat, stage, phase, (), config)
            load_dout(args, head, row, stat, stage, phase, (), config)
            i += 1
    if i > 0:
        stage = i % 2
        phase = (i // 2) & 1
        stat = tile.bh * tile.padded
        load_queries(args, tile.kv_head * tile.group, 0, stat, stage, phase, (), config)
        if config.HALVES == 1:
            load_dout(args, tile.kv_head * tile.group, 0, stat, stage, phase, (), config)
