"""Shared by the kernels that loop over tiles of rows (forward, dQ): messages from the producer to
the consumers, positions in rings of buffers, turns of the warp groups, and the mask of a step."""

from common.kv_ranges import opaque, position_row
from sm90.args import Mask, RowTile, StepRange
from sm90.block_lists import bits_of_keys
from sm90.common import element_bits, named_barrier, range_bits_asm, select_bits, warp_arrive
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def send_tile_asm(outputs, inputs):
    """The first lane writes the numbers to shared memory, because the same lane arrives at the
    barrier. Operands: address, numbers."""
    address, *numbers = inputs
    t = ["{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0;"]
    t += [f"@p st.shared.s32 [{address[0]}+{4 * k}], {x[0]};" for k, x in enumerate(numbers)]
    return " ".join(t) + " }"


@gluon.constexpr_function
def receive_tile_asm(outputs, inputs):
    """Every lane reads all numbers. Operands: numbers, address."""
    ((address,),) = inputs
    t = [f"ld.shared.s32 {x[0]}, [{address}+{4 * k}];" for k, x in enumerate(outputs)]
    return " ".join(t)


@gluon.jit
def send_tile(work_s, tile):
    kv_range = tile.kv_range
    numbers = (
        work_s, tile.row, tile.head_part, tile.b, kv_range.start, kv_range.steps,
        kv_range.partial, kv_range.full_begin, kv_range.full_end, tile.checked,
    )  # fmt: skip
    gl.inline_asm(send_tile_asm, "r,r,r,r,r,r,r,r,r,r,~{memory}", numbers)


@gluon.jit
def receive_tile(shared, slot, phase):
    mbarrier.wait(shared.work_full.index(slot), phase)
    i32: gl.constexpr = gl.int32
    types: gl.constexpr = (i32, i32, i32, i32, i32, i32, i32, i32, i32)
    constraints: gl.constexpr = "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,~{memory}"
    row, head_part, b, start, steps, partial, full_begin, full_end, checked = gl.inline_asm(
        receive_tile_asm, constraints, (shared.work_s.index(slot),), types
    )
    return RowTile(
        row, head_part, b, StepRange(start, steps, partial, full_begin, full_end), checked
    )


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and its phase."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase


@gluon.jit
def previous_stage(stage, phase, STAGES: gl.constexpr):
    """The previous stage of a ring, and its phase."""
    return gl.where(stage == 0, STAGES - 1, stage - 1), gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def mask_of_batch_row(mask, mask_b, scalars):
    mask_row = mask_b.to(gl.int64) * scalars.q_len
    mask_key = mask_b.to(gl.int64) * scalars.kv_len
    return Mask(
        mask.kv_start + mask_row,
        mask.kv_end + mask_row,
        mask.q_ids + mask_row,
        mask.kv_ids + mask_key,
        mask.q_pos + position_row(mask_row, scalars.mask_mode),
        mask.kv_pos + mask_key,
    )


@gluon.jit
def ranges_of_rows(rows, mask, q_len):
    """The first key of each row's range, and the key after the last."""
    in_bounds = rows < q_len
    lo = gl.load(mask.kv_start + rows, mask=in_bounds, other=0)
    hi = gl.load(mask.kv_end + rows, mask=in_bounds, other=0)
    return lo, hi


@gluon.jit
def pair_bits(rows, start, mask, checked, scalars, N: gl.constexpr, ranges=None):
    """Bits as in common.range_bits_asm: which of the N keys from `start` on the rows attend to.
    `ranges`: of the rows, if they have been read."""
    in_bounds = rows < scalars.q_len
    if ranges is None:
        lo, hi = ranges_of_rows(rows, mask, scalars.q_len)
    else:
        lo, hi = ranges
    bits = gl.inline_asm(
        range_bits_asm, ("=&r", "r", "r", "r"), (lo, hi, start), lo.type, is_pure=True
    )
    if checked != 0:
        kv_len = scalars.kv_len
        q_id = gl.load(mask.q_ids + rows, mask=in_bounds, other=-1)
        bits = bits & element_bits(q_id, mask.kv_ids, start, kv_len, N, "eq")
        if scalars.mask_mode > 1:
            q_at = gl.load(mask.q_pos + rows, mask=in_bounds, other=0)
            bits = bits & element_bits(q_at, mask.kv_pos, start, kv_len, N, "le")
            if scalars.mask_mode > 2:
                q_from = gl.load(
                    mask.q_pos + (opaque(scalars.q_len) + rows), mask=in_bounds, other=0
                )
                bits = bits & element_bits(q_from, mask.kv_pos, start, kv_len, N, "ge")
    return bits


@gluon.jit
def apply_mask(
    s, rows, start, mask, checked, scalars, head_mask, config: gl.constexpr, ranges=None
):
    """Sets the scores of masked pairs to -inf."""
    bits = pair_bits(rows, start, mask, checked, scalars, config.BLOCK_N, ranges)
    if config.BLOCK_LISTS:
        bits = bits & bits_of_keys(head_mask, rows, start, scalars.q_len)
    return select_bits(s, bits, float("-inf"))


@gluon.jit
def ping_pong_wait(W: gl.constexpr, WARP_GROUPS: gl.constexpr):
    """A single warp group takes no turns."""
    if WARP_GROUPS > 1:
        gl.inline_asm(named_barrier("sync", W, 256), "", (), ())


@gluon.jit
def ping_pong_pass(W: gl.constexpr, WARP_GROUPS: gl.constexpr):
    if WARP_GROUPS > 1:
        gl.inline_asm(named_barrier("arrive", (W + 1) % WARP_GROUPS, 256), "", (), ())


@gluon.jit
def stage_of_values(stage, phase, config: gl.constexpr):
    """Stage and phase of the ring of values, for `stage` and `phase` of the ring of keys."""
    V_STAGES: gl.constexpr = config.V_STAGES
    STAGES: gl.constexpr = config.STAGES
    gl.static_assert(V_STAGES == STAGES or (V_STAGES == 1 and STAGES == 2))
    if V_STAGES == STAGES:
        position = stage, phase
    else:  # a single stage, whose phase flips with every tile
        position = opaque(stage * 0), stage
    return position


@gluon.jit
def skip_blocks(count, W: gl.constexpr, shared, stage, phase, config: gl.constexpr):
    """Skips `count` steps: this warp group only takes its turns and releases the tiles."""
    for _i in range(0, count):
        mbarrier.wait(shared.k_full.index(stage), phase)
        ping_pong_wait(W, config.WARP_GROUPS)
        ping_pong_pass(W, config.WARP_GROUPS)
        warp_arrive(shared.k_empty.index(stage))
        v_stage, v_phase = stage_of_values(stage, phase, config)
        mbarrier.wait(shared.v_full.index(v_stage), v_phase)
        warp_arrive(shared.v_empty.index(v_stage))
        stage, phase = next_stage(stage, phase, config.STAGES)
    return stage, phase
