"""The assembly that converts pairs of float8_e4m3fn to float16."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
import triton_launch  # noqa: F401  imports the kernels
from ptx_warp import LANES, Warp


@pytest.mark.parametrize("name,unit", [("BITS", 256), ("NATIVE", 1)])
def test_every_byte(name: str, unit: int) -> None:
    """At every position in two pairs."""
    every = np.arange(256, dtype=np.uint8)
    assembly = getattr(sys.modules["portable.fp8"], name).value.replace("$", "r")
    for turn in range(4):
        for words in np.roll(every, turn).view(np.uint32).reshape(2, LANES):
            values = Warp().run(assembly, {"r2": words})
            halves = np.stack([values[f"r{i}"].astype(np.uint32) for i in range(2)])
            got = halves.view(np.float16).reshape(2, LANES, 2)  # byte of a pair, lane, pair
            pairs = words.copy().view(np.uint8).reshape(LANES, 2, 2).transpose(2, 0, 1)
            want = pairs.copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32) / unit
            np.testing.assert_array_equal(got.astype(np.float32), want)
            assert np.array_equal(np.signbit(got), np.signbit(want))
