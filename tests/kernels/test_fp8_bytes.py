"""The assembly that makes float16 of bytes of float8_e4m3fn: every byte, in every place of four."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import triton_launch  # noqa: F401  imports the kernels
from ptx_warp import LANES, Warp


class Bits(Warp):
    """With the instructions that it takes."""

    @staticmethod
    def prmt_b32(a, b, selector):
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        made = np.zeros(LANES, np.uint64)
        for place in range(4):
            index = np.uint64(int(selector[0]) >> 4 * place & 0xF)
            byte = both >> index * np.uint64(8) & np.uint64(0xFF)
            made |= byte << np.uint64(8 * place)
        return made.astype(np.uint32)

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
    def mov_b32(a):
        return a


def test_every_byte() -> None:
    every = np.arange(256, dtype=np.uint8)
    want = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 256
    assembly = sys.modules["portable.fp8"].BITS.value.replace("$", "r")
    for turn in range(4):  # so that every byte has every place
        words = np.roll(every, turn).view(np.uint32).reshape(2, LANES)
        made = []
        for word in words:
            values = Bits().run(assembly, {"r2": word})
            made.append(np.stack([values["r0"], values["r1"]], -1).astype(np.uint32))
        got = np.roll(np.concatenate(made).view(np.float16).ravel(), -turn)
        np.testing.assert_array_equal(got.astype(np.float32), want)
        assert np.array_equal(np.signbit(got), np.signbit(want))
