"""The bits of dropout in the Hopper kernels, instruction by instruction for each warp of a tile,
because Gluon has no interpreter.

Guards against a word of Philox other than that of the pair of row and key, against bits that a
thread takes from the wrong neighbour, and against a probability that another's bit clears.
"""

import sys

import numpy as np
import pytest
from paths import KERNEL_DIR
from philox import philox
from ptx_warp import LANES, Warp

pytest.importorskip("triton")
sys.path.insert(0, str(KERNEL_DIR))

from sm90 import dropout

STREAM = 0xDEADBEEF, 0xFFFFFFFF, 0x80000007, 5  # two words of the key, batch row, head
THRESHOLDS = [1, 0x19999999, 0x80000000, 0xFFFFFFFF]
LANE = np.arange(LANES)


def kept(numbers, keys, threshold):
    """Of rows with these numbers (axis 0)."""
    counters = np.broadcast_arrays(keys // 4, numbers[:, None], STREAM[3], STREAM[2])
    words = philox(counters, STREAM[:2])
    return np.choose(np.broadcast_to(keys % 4, words[0].shape), words) >= threshold


def of_accumulator(bits, columns):
    """The elements of a warp's 16 rows of an accumulator, from two words of bits of each lane."""
    found = np.zeros((16, columns), bool)
    for r, i in np.ndindex(2, columns // 4):
        found[LANE // 4 + 8 * r, i // 2 * 8 + 2 * (LANE % 4) + i % 2] = bits[r] >> i & 1
    return found


def run(assembly, operands):
    warp = Warp(memory=lambda address: np.array(STREAM, np.uint32)[address // 4])
    values = {f"${i}": np.broadcast_to(x, LANES) for i, x in operands.items()}
    values = warp.run(assembly, values | {"%laneid": LANE})
    return [values[f"${r}"].astype(np.uint32) for r in (0, 1)]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("n", [64, 128])
def test_bits_of_a_tile_of_rows(n, threshold):
    rng = np.random.default_rng()
    numbers = rng.integers(0, 2**31, 16)
    first = 4 * int(rng.integers(0, 2**28))
    rows = {2 + r: numbers[LANE // 4 + 8 * r] for r in (0, 1)}
    operands = rows | {4: 0, 5: first, 6: threshold}
    got = of_accumulator(run(dropout.row_keep_bits_asm(n), operands), n)
    np.testing.assert_array_equal(got, kept(numbers, first + np.arange(n)[None], threshold))


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_bits_of_a_tile_of_keys(threshold):
    rng = np.random.default_rng()
    numbers = rng.integers(0, 2**31, 64)
    keys = 16 * int(rng.integers(0, 2**26)) + np.arange(16)
    operands = {2 + r: keys[LANE // 4 + 8 * r] for r in (0, 1)}
    operands |= {4: numbers[:32], 5: numbers[32:], 6: 0, 7: threshold}
    got = of_accumulator(run(dropout.key_keep_bits_asm(), operands), 64)
    np.testing.assert_array_equal(got, kept(numbers, keys[None], threshold).T)


@pytest.mark.parametrize("n", [32, 64])
def test_dropped_pairs_are_cleared(n):
    """n: pairs per thread are n / 2, of the n columns of a thread's two rows."""
    rng = np.random.default_rng()
    bits = rng.integers(0, 2**32, (2, LANES), np.uint32)
    pairs = rng.integers(0, 2**32, (n // 2, LANES), np.uint32)
    names = [[f"{kind}{i}" for i in range(n // 2)] for kind in ("o", "x")]
    values = dict(zip(names[1], pairs, strict=True)) | {"b0": bits[0], "b1": bits[1]}
    assembly = dropout.keep_pairs_asm((names[0],), (names[1], ("b0", "b1")))
    values = Warp().run(assembly, values)
    for i in range(n // 2):
        low, high = (bits[i % 2] >> np.uint32(i // 2 * 2 + half) & 1 for half in (0, 1))
        want = pairs[i] & (low * np.uint32(0xFFFF) | high * np.uint32(0xFFFF0000))
        np.testing.assert_array_equal(values[f"o{i}"], want)
