"""The mask arrays hold exactly the integers that docs/internals/mask_format.md defines."""

import jax
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from packax._src.ops import xla_mask

INT_MAX = 2**31 - 1


def ceil(n, size):
    return -(-n // size)


def documents_by_hand(q_ids, kv_ids, q_pos, kv_pos, compare_positions):
    """One batch row, in the four steps of docs/internals/mask_format.md, in Python integers."""
    kv_len = len(kv_ids)
    size = 1
    while size < kv_len:
        size *= 2
    slots = max(1024, 2 * size)
    bits = slots.bit_length() - 1

    def slot_a(i):
        return (int(i) % 2**32) & (slots - 1)

    def slot_b(i):
        return ((int(i) % 2**32) * 0x9E3779B1 % 2**32) >> (32 - bits)

    run_end = [0] * kv_len
    starts = {"a": [INT_MAX] * slots, "b": [INT_MAX] * slots}
    ends = {"a": [0] * slots, "b": [0] * slots}
    falls = [0] * slots
    j = 0
    while j < kv_len:
        end = j
        while end < kv_len and kv_ids[end] == kv_ids[j]:
            end += 1
        if kv_ids[j] != -1:
            run_end[j] = end
            for table, slot in (("a", slot_a(kv_ids[j])), ("b", slot_b(kv_ids[j]))):
                starts[table][slot] = min(starts[table][slot], j)
                ends[table][slot] = max(ends[table][slot], end)
            if any(kv_pos[n] < kv_pos[n - 1] for n in range(j + 1, end)):
                falls[slot_a(kv_ids[j])] = 1
        j = end

    rows = []
    # One upper position limit per row, or an upper and a lower one.
    upper, lower = q_pos if compare_positions == 2 else (q_pos, [None] * len(q_ids))
    for q_id, last, first in zip(q_ids, upper, lower, strict=True):
        a, b = slot_a(q_id), slot_b(q_id)
        lo = max(starts["a"][a], starts["b"][b])
        hi = min(ends["a"][a], ends["b"][b])
        if q_id == -1 or lo >= hi:
            rows.append((0, 0, 0))
            continue
        tested = not (kv_ids[lo] == q_id and run_end[lo] == hi)
        if compare_positions and not tested:
            if falls[a]:
                tested = True
            else:
                hi = next((n for n in range(lo, hi) if kv_pos[n] > last), hi)
                if compare_positions == 2:
                    lo = next((n for n in range(lo, hi) if kv_pos[n] >= first), hi)
        rows.append((lo, hi, int(tested)) if lo < hi else (0, 0, 0))
    return np.array(rows, np.int64).T


def blocks_by_hand(lo, hi, tested, kv_len):
    q_len = len(lo)
    q_blocks = []
    for t in range(ceil(q_len, 64)):
        rows = range(64 * t, min(64 * t + 64, q_len))
        filled = [i for i in rows if lo[i] < hi[i]]
        flags = 1 * any(tested[i] for i in rows)
        flags += 2 * (len(filled) < 64)
        if filled:
            lows, highs = [lo[i] for i in filled], [hi[i] for i in filled]
            entry = [min(lows), max(lows), min(highs), max(highs)]
            if flags & 1:
                entry[1], entry[2] = entry[3], entry[0]
        else:
            entry = [INT_MAX, 0, INT_MAX, 0]
        q_blocks.append([*entry, flags])

    kv_blocks = []
    for c in range(ceil(kv_len, 64)):
        end = min(64 * c + 64, kv_len)
        touching = [t for t, e in enumerate(q_blocks) if e[0] < end and e[3] > 64 * c]
        full = [e[4] == 0 and e[1] <= 64 * c and e[2] >= 64 * c + 64 for e in q_blocks]
        entry = [INT_MAX, 0, INT_MAX, 0]
        if touching:
            entry[:2] = 64 * touching[0], min(64 * (touching[-1] + 1), q_len)
        if any(full):
            first = full.index(True)
            last = first
            while last + 1 < len(full) and full[last + 1]:
                last += 1
            entry[2:] = 64 * first, 64 * (last + 1)
        kv_blocks.append(entry)

    def order(entries, low, high, blocks, keys=False):
        def sort_key(tile):
            merged = entries[blocks * tile : blocks * (tile + 1)]
            first, last = min(e[low] for e in merged), max(e[high] for e in merged)
            work = max(last - first, 0)
            if not keys:
                return (-work, tile)
            if not work:
                return (1, tile)  # nothing to do: last
            span = last - q_blocks[(last - 1) // 64][0]
            return (0, -span, -last, -work, tile)

        return np.array(sorted(range(ceil(len(entries), blocks)), key=sort_key))

    return (
        np.array(q_blocks).T,
        np.array(kv_blocks).T,
        order(q_blocks, 0, 3, 2),
        order(q_blocks, 0, 3, 3),
        order(kv_blocks, 0, 1, 2, keys=True),
    )


compiled_documents = jax.jit(xla_mask.document_ranges, static_argnames="compare_positions")
compiled_blocks = jax.jit(xla_mask.block_bounds, static_argnames="kv_len")


def check_documents(q_ids, kv_ids, q_pos, kv_pos, compare):
    got = compiled_documents(q_ids, kv_ids, q_pos, kv_pos, compare_positions=compare)
    for b, row in enumerate(zip(q_ids, kv_ids, q_pos, kv_pos, strict=True)):
        expected = documents_by_hand(*row, compare)
        for name, x, y in zip(("lo", "hi", "tested"), got, expected, strict=True):
            np.testing.assert_array_equal(x[b], y, err_msg=f"{name}, batch row {b}")
    return [np.asarray(x) for x in got]


@given(st.data(), strategies.lengths, strategies.lengths, st.sampled_from([0, 1, 2]))
def test_documents(data, q_len, kv_len, compare):
    q_ids, kv_ids = data.draw(strategies.ids(q_len, 2)), data.draw(strategies.ids(kv_len, 2))
    q_pos, kv_pos = q_ids, kv_ids
    if compare:
        q_pos = data.draw(strategies.positions(q_len, 2))
        kv_pos = data.draw(strategies.positions(kv_len, 2))
    if compare == 2:
        reach = data.draw(st.sampled_from([0, 3, 50]))
        q_pos = np.stack([q_pos, q_pos - reach], axis=1)
    check_documents(q_ids, kv_ids, q_pos, kv_pos, compare)


@pytest.mark.parametrize("kv_len", [512, 513, 1500])
def test_documents_where_the_tables_grow(kv_len):
    """Both sides of the table size T = 1024, with many ids; some collide and some reappear."""
    rng = np.random.default_rng(kv_len)
    ids = np.repeat(rng.integers(-1, 5000, kv_len), rng.integers(1, 9, kv_len))[None, :kv_len]
    positions = np.cumsum(rng.integers(-1, 9, kv_len))[None]
    check_documents(ids.astype(np.int32), ids.astype(np.int32), positions, positions, True)


def test_colliding_ids_are_tested_and_ordinary_ones_not():
    """Two ids in one slot of both tables: the key range covers both, so rows must be
    segment-checked."""
    slots = xla_mask.table_size(64)

    def slot(i):
        return i % slots, (i * 0x9E3779B1 % 2**32) >> (32 - slots.bit_length() + 1)

    other = next(i for i in range(1, 2**31, slots) if slot(i) == slot(1) and i != 1)
    ids = np.repeat(np.array([1, other, 3], np.int32), [20, 30, 14])[None]
    lo, hi, tested = check_documents(ids, ids, ids, ids, False)
    np.testing.assert_array_equal(tested[0], np.repeat([1, 1, 0], [20, 30, 14]))
    assert (lo[0, 0], hi[0, 0]) == (0, 50)


@given(st.data(), strategies.lengths, strategies.lengths, st.integers(0, 2**32 - 1))
def test_blocks(data, q_len, kv_len, seed):
    rng = np.random.default_rng(seed)
    lo, hi = np.sort(rng.integers(0, kv_len + 1, (2, 2, q_len)), axis=0).astype(np.int32)
    if data.draw(st.booleans()):  # causal and full rows have blocks that need no mask
        lo[:] = 0
        hi[0], hi[1] = np.minimum(np.arange(q_len) + 1, kv_len), kv_len
    empty = (lo >= hi) | (rng.random((2, q_len)) < data.draw(st.sampled_from([0.0, 0.02, 1.0])))
    lo, hi = np.where(empty, 0, lo), np.where(empty, 0, hi)
    tested = (~empty & (rng.random((2, q_len)) < data.draw(st.sampled_from([0.0, 0.01])))) * 1
    check_blocks(lo, hi, tested, kv_len)


def check_blocks(lo, hi, tested, kv_len):
    lo, hi, tested = (np.asarray(x, np.int32) for x in (lo, hi, tested))
    got = compiled_blocks(lo, hi, tested, kv_len=kv_len)
    for b in range(len(lo)):
        expected = blocks_by_hand(lo[b].tolist(), hi[b].tolist(), tested[b].tolist(), kv_len)
        names = ("q_blocks", "kv_blocks", "q_order", "q_order_192", "kv_order")
        for name, x, y in zip(names, got, expected, strict=True):
            assert x.dtype == np.int32
            np.testing.assert_array_equal(x[b], y, err_msg=f"{name}, batch row {b}")


@pytest.mark.parametrize(("q_len", "kv_len"), [(1000, 1000), (640, 300), (130, 900)])
def test_blocks_of_documents(q_len, kv_len):
    """Several tiles, unmasked runs longer than one block, and gaps between them."""
    rng = np.random.default_rng(q_len)
    edges = np.sort(rng.integers(0, kv_len, 3))
    rows = np.arange(q_len)
    start = np.concatenate([[0], edges])[np.searchsorted(edges, rows, side="right")]
    hi = np.minimum(rows + 1, kv_len)
    lo = np.minimum(start, hi)
    lo, hi = np.where(lo < hi, lo, 0), np.where(lo < hi, hi, 0)
    tested = np.zeros_like(lo)
    tested[q_len // 2] = lo[q_len // 2] < hi[q_len // 2]
    wide = np.zeros(q_len), np.full(q_len, kv_len), np.zeros(q_len)
    check_blocks(*(np.stack([x, w]) for x, w in zip((lo, hi, tested), wide, strict=True)), kv_len)


def test_tables_of_4_g_slots_are_made_row_by_row(monkeypatch):
    rng = np.random.default_rng(0)
    q_ids, kv_ids, limits, kv_pos = rng.integers(-1, 5, (4, 3, 50)).astype(np.int32)
    want = xla_mask.document_ranges(q_ids, kv_ids, limits, kv_pos, compare_positions=1)
    monkeypatch.setattr(xla_mask, "_MOST_SLOTS", 2 * 3 * 1024)
    got = xla_mask.document_ranges(q_ids, kv_ids, limits, kv_pos, compare_positions=1)
    np.testing.assert_array_equal(got, want)
