"""Inline assembly of the Gluon kernels on the CPU, instruction by instruction: Gluon has no
interpreter.

Guards against a float of dQ at a place where backward_postprocess does not read it, and against a P
or dS at another row or key than its score.
"""

import re
import sys

import numpy as np
import pytest
from paths import KERNEL_DIR
from ptx_warp import F32, HALVES, Warp, accumulator

pytest.importorskip("triton")
sys.path.insert(0, str(KERNEL_DIR))

from sm90 import bwd_chunked_consumer, bwd_postprocess, dq_reduce

TID = np.arange(128)  # of a warp group


def places(registers):
    return tuple(x.T for x in accumulator(registers, 128))


@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_every_float_of_dq_is_stored_where_postprocess_reads_it(columns):
    names = tuple(f"$r{i}" for i in range(columns // 2))
    assembly = dq_reduce.store_registers_asm((), (names, ("$base",)))
    numbers = np.arange(64 * columns, dtype=np.uint32).reshape(64, columns)
    values = dict(zip(names, numbers[places(len(names))], strict=True))
    warps = Warp(threads=128)
    warps.run(assembly, values | {"%tid.x": 128 + TID, "$base": 0 * TID})  # the second warp group
    halves = [warps.shared[2 * n] for n in range(2 * numbers.size)]
    shape, axes = bwd_postprocess.sum_shape(columns), bwd_postprocess.SUM_TO_ROWS.value
    stored = np.array(halves, np.uint16).view(np.uint32)
    stored = stored.reshape([int(n) for n in getattr(shape, "value", shape)])
    np.testing.assert_array_equal(stored.transpose(axes).reshape(64, columns), numbers)


def compute(assembly, operands, lines=None):
    """The threads' 16 result registers. `lines`: the floats in shared memory from address 0."""
    values = {f"${i}": np.broadcast_to(x, 128) for i, x in operands.items()}
    warps = Warp(threads=128, memory=lambda address: lines[address // 4])
    values = warps.run(assembly, values | {"%tid.x": 256 + TID})
    return [values[f"${i}"] for i in range(16)]


def tile(pairs, half):
    """The threads' packed pairs as a tile of 64 keys and 64 rows."""
    found = np.zeros((64, 64), np.uint16)
    halves = [pair >> np.uint32(16 * i) for pair in pairs for i in (0, 1)]
    found[places(32)] = np.stack(halves).astype(np.uint16)
    return found.view(half)


@pytest.mark.parametrize("name", HALVES)
def test_p_and_ds_of_the_tile_of_keys(name):
    """Scores are (keys, rows), so lse2 and delta belong to columns. Elements that the mask clears
    are 0, even if they were NaN."""
    half, rng = HALVES[name], np.random.default_rng()
    s, dp = rng.standard_normal((2, 64, 64), F32)
    lse, delta = rng.standard_normal((2, 64), F32)
    scale, attended = F32(0.7), rng.random((64, 64)) < 0.6
    dp = np.where(attended, dp, F32("nan"))
    want_p = np.exp2(s * scale - lse).astype(half)
    want_ds = np.where(attended, want_p.astype(F32) * (dp - delta), 0).astype(half)
    scores = dict(enumerate(s[places(32)], 16))
    p = compute(bwd_chunked_consumer.p_asm(name), scores | {48: scale, 49: np.int32(0)}, lse)
    operands = dict(enumerate(dp[places(32)], 16)) | dict(enumerate(p, 48)) | {64: np.int32(0)}
    ds = compute(bwd_chunked_consumer.ds_asm(name), operands, delta)
    # As in sm90/common.range_bits_asm: for each of two keys, two bits per octet of rows.
    bits = np.zeros((2, 128), np.uint32)
    for i, of_thread in enumerate(attended[places(32)]):
        bits[i // 2 % 2] |= of_thread.astype(np.uint32) << np.uint32(i // 4 * 2 + i % 2)
    operands = dict(enumerate(ds, 16)) | {32: bits[0], 33: bits[1]}
    p, ds = tile(p, half), tile(compute(bwd_chunked_consumer.clear_bits_asm(), operands), half)
    # In float32 the last bit of a sum may differ, which changes a few roundings.
    for got, want in ((p, want_p), (ds, want_ds)):
        error = np.abs(got.astype(F32) - want.astype(F32))
        assert (error <= 2 * np.finfo(F32).eps + 2.0**-7 * np.abs(want.astype(F32))).all()
        assert (error == 0).mean() > 0.95
    assert (ds[~attended] == 0).all()


@pytest.mark.parametrize("n,threads", [(16, 128), (32, 256)])
def test_partial_sums_are_added_and_loaded_in_the_same_order(n, threads):
    """Both kernels map threads and registers to the elements of a dQ block in the same way."""
    from sm80.bwd import add_asm, load_asm

    texts = [str(getattr(asm(n, threads), "value", asm(n, threads))) for asm in (add_asm, load_asm)]
    places = []
    for text, pattern in zip(
        texts, (r"red\S+ \[p\+(\d+)\], \$(\d+);", r"ld\S+ \$(\d+), \[p\+(\d+)\];"), strict=True
    ):
        assert "mov.u32 t, %tid.x; mul.wide.u32 p, t, 4;" in text and f"add.u64 p, p, ${n};" in text
        places.append({tuple(sorted(map(int, pair))) for pair in re.findall(pattern, text)})
    assert places[0] == places[1] == {(i, i * threads * 4) for i in range(n)}
