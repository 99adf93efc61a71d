"""Computes row ranges from segment ids and positions, in O(S) work and without a sort
(docs/internals/mask_format.md).

There are three launches: `documents_init` clears the tables and stores where the first run of each
chunk starts, `documents_runs` inserts all runs into two hash tables, and `documents_rows` looks up
each row's id. A hash collision only widens a hull, and the row is then segment-checked. The
workspace of a batch row has start_a, end_a, start_b, end_b and down (table_size each), run_end
(kv_len), and the first run start of each chunk.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(1024)
NOTHING = tl.constexpr(2147483647)
PADDING = tl.constexpr(-1)


@triton.jit
def slots(ids, table_size, table_shift):
    bits = ids.to(tl.uint32, bitcast=True)
    a = bits & (table_size - 1).to(tl.uint32)
    b = (bits * 0x9E3779B1) >> table_shift.to(tl.uint32)
    return a.to(tl.int32), b.to(tl.int32)


@triton.jit
def workspace_of(workspace, b, kv_len, table_size):
    return workspace + b.to(tl.int64) * (5 * table_size + kv_len + tl.cdiv(kv_len, CHUNK))


@triton.jit
def run_starts(kv_ids, keys, kv_len):
    """The id of each key and whether it starts a run. `kv_len` counts as a start."""
    ids = tl.load(kv_ids + keys, mask=keys < kv_len, other=PADDING)
    before = tl.load(kv_ids + keys - 1, mask=(keys > 0) & (keys <= kv_len), other=PADDING)
    return ids, (keys == 0) | (keys == kv_len) | ((keys < kv_len) & (ids != before))


@triton.jit
def documents_init(kv_ids, workspace, kv_len, table_size):
    chunk = tl.program_id(0)
    b = tl.program_id(1)
    kv_ids += b.to(tl.int64) * kv_len
    table = workspace_of(workspace, b, kv_len, table_size)
    lanes = tl.arange(0, CHUNK)
    for base in range(chunk * CHUNK, 5 * table_size, tl.num_programs(0) * CHUNK):
        at = base + lanes
        part = at // table_size
        tl.store(
            table + at, tl.where((part == 0) | (part == 2), NOTHING, 0), mask=at < 5 * table_size
        )
    keys = chunk * CHUNK + lanes
    tl.store(table + 5 * table_size + keys, tl.zeros([CHUNK], tl.int32), mask=keys < kv_len)
    _, starts = run_starts(kv_ids, keys, kv_len)
    tl.store(table + 5 * table_size + kv_len + chunk, tl.min(tl.where(starts, keys, NOTHING)))


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y)


@triton.jit
def documents_runs(kv_ids, kv_pos, workspace, compare_positions, kv_len, table_size, table_shift):
    chunk = tl.program_id(0)
    b = tl.program_id(1)
    kv_ids += b.to(tl.int64) * kv_len
    kv_pos += b.to(tl.int64) * kv_len
    table = workspace_of(workspace, b, kv_len, table_size)
    run_end = table + 5 * table_size
    firsts = run_end + kv_len
    chunks = tl.cdiv(kv_len, CHUNK)
    lanes = tl.arange(0, CHUNK)

    # where the next run starts, for the last run of this chunk
    later = tl.full([CHUNK], NOTHING, tl.int32)
    for base in range(chunk + 1, chunks, CHUNK):
        at = base + lanes
        later = tl.minimum(later, tl.load(firsts + at, mask=at < chunks, other=NOTHING))
    carry = tl.minimum(tl.min(later), kv_len)

    keys = chunk * CHUNK + lanes
    ids, starts = run_starts(kv_ids, keys, kv_len)
    _, ends = run_starts(kv_ids, keys + 1, kv_len)
    following = tl.associative_scan(tl.where(ends, keys + 1, NOTHING), 0, smaller, reverse=True)
    end = tl.minimum(following, carry)

    slot_a, slot_b = slots(ids, table_size, table_shift)
    run = starts & (keys < kv_len) & (ids != PADDING)
    tl.store(run_end + keys, end, mask=run)
    tl.atomic_min(table + slot_a, keys, mask=run, sem="relaxed")
    tl.atomic_max(table + table_size + slot_a, end, mask=run, sem="relaxed")
    tl.atomic_min(table + 2 * table_size + slot_b, keys, mask=run, sem="relaxed")
    tl.atomic_max(table + 3 * table_size + slot_b, end, mask=run, sem="relaxed")
    if compare_positions != 0:
        inner = (keys > 0) & (keys < kv_len) & ~starts & (ids != PADDING)
        pos = tl.load(kv_pos + keys, mask=inner, other=0)
        before = tl.load(kv_pos + keys - 1, mask=inner, other=0)
        tl.store(
            table + 4 * table_size + slot_a,
            tl.full([CHUNK], 1, tl.int32),
            mask=inner & (pos < before),
        )


@triton.jit
def documents_rows(
    q_ids, kv_ids, q_pos, kv_pos, workspace, lo, hi, segment_checked,
    compare_positions, q_len, kv_len, table_size, table_shift, search_steps,
):  # fmt: skip
    b = tl.program_id(1)
    q_row = b.to(tl.int64) * q_len
    kv_ids += b.to(tl.int64) * kv_len
    kv_pos += b.to(tl.int64) * kv_len
    table = workspace_of(workspace, b, kv_len, table_size)
    run_end = table + 5 * table_size

    rows = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    in_bounds = rows < q_len
    ids = tl.load(q_ids + q_row + rows, mask=in_bounds, other=PADDING)
    slot_a, slot_b = slots(ids, table_size, table_shift)
    real = ids != PADDING
    start = tl.maximum(
        tl.load(table + slot_a, mask=real, other=NOTHING),
        tl.load(table + 2 * table_size + slot_b, mask=real, other=NOTHING),
    )
    end = tl.minimum(
        tl.load(table + table_size + slot_a, mask=real, other=0),
        tl.load(table + 3 * table_size + slot_b, mask=real, other=0),
    )
    found = start < end
    one_run = found & (tl.load(kv_ids + start, mask=found, other=PADDING) == ids)
    one_run &= tl.load(run_end + start, mask=found, other=0) == end
    test = found & ~one_run
    if compare_positions != 0:
        down = tl.load(table + 4 * table_size + slot_a, mask=found, other=0) != 0
        test = found & (down | ~one_run)
        search = found & ~test
        q_pos += q_row * tl.where(compare_positions > 1, 2, 1)
        at = tl.load(q_pos + rows, mask=in_bounds, other=0)
        # first key of the run past the row's upper limit
        left = start
        right = end
        for _ in range(search_steps):
            open_ = search & (left < right)
            middle = left + (right - left) // 2
            before = tl.load(kv_pos + middle, mask=open_, other=0) <= at
            left = tl.where(open_ & before, middle + 1, left)
            right = tl.where(open_ & ~before, middle, right)
        end = tl.where(search, left, end)
        if compare_positions > 1:
            at = tl.load(q_pos + q_len + rows, mask=in_bounds, other=0)
            # first key at or above the row's lower limit
            left = start
            right = end
            for _ in range(search_steps):
                open_ = search & (left < right)
                middle = left + (right - left) // 2
                before = tl.load(kv_pos + middle, mask=open_, other=0) < at
                left = tl.where(open_ & before, middle + 1, left)
                right = tl.where(open_ & ~before, middle, right)
            start = tl.where(search, left, start)
        found = start < end
    tl.store(lo + q_row + rows, tl.where(found, start, 0), mask=in_bounds)
    tl.store(hi + q_row + rows, tl.where(found, end, 0), mask=in_bounds)
    tl.store(segment_checked + q_row + rows, (found & test).to(tl.int32), mask=in_bounds)
