"""What the Hopper backward writes to shared memory for its products, instruction by instruction for
a warp, because Gluon has no interpreter.

Guards against a dS of another key or row, and against parts of an LSE or delta that do not sum to
it or are stored in another row.
"""

import sys

import ml_dtypes
import numpy as np
import pytest
from paths import KERNEL_DIR
from ptx_warp import F32, HALVES, LANES, Warp

pytest.importorskip("triton")
sys.path.insert(0, str(KERNEL_DIR))

from sm90 import dq_reduce, lse_by_mma

LANE = np.arange(LANES)


def halfwords(shared, address, n):
    return np.array([shared.get(address + 2 * i, 0) for i in range(n)], np.uint16)


@pytest.mark.parametrize("half", HALVES)
def test_ds_is_stored_where_the_products_read_it(half):
    """Rows of 128 bytes, in which the row's index modulo 8 permutes the pieces of 16 bytes (the
    128-byte swizzle)."""
    rng = np.random.default_rng()
    ds = rng.standard_normal((64, 64)).astype(HALVES[half])  # keys, rows
    base, shared = 3 * 8192, {}
    n = 32  # registers per thread
    names = tuple(f"$r{i}" for i in range(n))
    assembly = dq_reduce.store_ds_asm((), (names, ("$base",)))
    for w in range(4):
        values = {"%tid.x": 128 + 32 * w + LANE, "$base": np.full(LANES, base)}
        for i, name in enumerate(names):
            key = 16 * w + LANE // 4 + 8 * (i // 2 % 2)
            row = i // 4 * 8 + 2 * (LANE % 4) + i % 2
            values[name] = ds[key, row].view(np.uint16)
        warp = Warp()
        warp.run(assembly, values)
        assert not shared.keys() & warp.shared.keys()
        shared |= warp.shared
    assert len(shared) == ds.size
    for key, piece in np.ndindex(64, 8):
        got = halfwords(shared, base + 128 * key + 16 * (piece ^ key % 8), 8)
        np.testing.assert_array_equal(got, ds[key, 8 * piece : 8 * piece + 8].view(np.uint16))


def parts_of(numbers):
    """(64, 16): the parts that one product adds up for each row."""
    values = {"%laneid": LANE, "$at": np.full(LANES, 4096)}
    values |= {f"$x{i}": numbers[i::2].astype(F32) for i in (0, 1)}  # rows 2 * lane + i
    warp = Warp()
    warp.run(lse_by_mma.parts_asm((), (("$x0", "$x1"), ("$at",))), values)
    assert len(warp.shared) == 64 * 16  # overwrites all garbage of the previous block
    return np.stack([halfwords(warp.shared, 4096 + 32 * row, 16) for row in range(64)]).view(
        ml_dtypes.bfloat16
    )


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 100.0, 1e30])
def test_the_parts_of_a_number_sum_to_it(size):
    """Except for what is below half of bfloat16's smallest number, 2^-133."""
    numbers = (np.random.default_rng().standard_normal(64) * size).astype(F32)
    numbers[:4] = [0, -size, lse_by_mma.FAR.value, np.nextafter(F32(size), F32(2 * size))]
    parts = parts_of(numbers)
    got = parts.astype(float).sum(1)
    np.testing.assert_allclose(got, -numbers.astype(float), rtol=0, atol=2.0**-134)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_number_breaks_its_row_alone(broken):
    numbers = np.ones(64, F32)
    numbers[17] = broken
    total = parts_of(numbers).astype(float).sum(1)
    assert not np.isfinite(total[17])
    np.testing.assert_array_equal(np.delete(total, 17), -1)
