"""The assembly that converts pairs of float8_e4m3fn to float16."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
import triton_launch  # noqa: F401  imports the kernels
from ptx_warp import LANES, Warp


class Bits(Warp):
    """A warp with the instructions of this assembly."""

    @staticmethod
    def prmt_b32(a, b, selector):
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros(LANES, np.uint64)
        for byte_index in range(4):
            index = np.uint64(int(selector[0]) >> 4 * byte_index & 0xF)
            byte = both >> index * np.uint64(8) & np.uint64(0xFF)
            result |= byte << np.uint64(8 * byte_index)
        return result.astype(np.uint32)

    @staticmethod
    def and_b32(a, b):
        return a & b.astype(np.uint32)

    @staticmethod
    def or_b32(a, b):
        return a | b.astype(np.uint32)

    @staticmethod
    def add_u32(a, b):
        return a + b.astype(np.uint32)

    @staticmethod
    def shr_u32(a, b):
        return a >> b.astype(np.uint32)

    @staticmethod
    def shl_b32(a, b):
        return a << b.astype(np.uint32)

    @staticmethod
    def mov_b32(a):
        return a

    @staticmethod
    def cvt_rn_f16x2_e4m3x2(pair):
        both = np.stack([pair & 0xFF, pair >> np.uint32(8)]).astype(np.uint8)
        low, high = both.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint16)
        return high.astype(np.uint32) << np.uint32(16) | low

    def step(self, line, values):
        if not line.startswith("mov.b32 {low, high}, "):
            return super().step(line, values)
        word = self.value(line.rpartition(" ")[2], values)
        values["low"], values["high"] = word & np.uint32(0xFFFF), word >> np.uint32(16)
        return None


@pytest.mark.parametrize("name,unit", [("BITS", 256), ("NATIVE", 1)])
def test_every_byte(name: str, unit: int) -> None:
    """At every position in two pairs."""
    every = np.arange(256, dtype=np.uint8)
    assembly = getattr(sys.modules["portable.fp8"], name).value.replace("$", "r")
    for turn in range(4):
        for words in np.roll(every, turn).view(np.uint32).reshape(2, LANES):
            values = Bits().run(assembly, {"r2": words})
            halves = np.stack([values[f"r{i}"].astype(np.uint32) for i in range(2)])
            got = halves.view(np.float16).reshape(2, LANES, 2)  # byte of a pair, lane, pair
            pairs = words.copy().view(np.uint8).reshape(LANES, 2, 2).transpose(2, 0, 1)
            want = pairs.copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32) / unit
            np.testing.assert_array_equal(got.astype(np.float32), want)
            assert np.array_equal(np.signbit(got), np.signbit(want))
