"""Interprets the PTX of a warp or warp group on the CPU, because Gluon has no interpreter.

ex2 and rcp have an error that the caller chooses, up to the bounds of PTX. Registers keep the bits
that they have on a GPU, so that an instruction of another type sees the same bits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

LANES = 32
F32 = np.float32
HALVES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def accumulator(registers, threads=LANES):
    """The row and the column of each register of each thread: see sm90/common.py."""
    thread, i = np.arange(threads)[:, None], np.arange(registers)
    rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    return rows, i // 4 * 8 + 2 * (thread % 4) + i % 2


def bits(x):
    return x.view(np.uint32) if x.dtype == F32 else x.astype(np.uint32)


def wide(x):
    return bits(x).astype(np.uint64)


def floats(x):
    return bits(x).view(F32)


class Warp:
    """Registers are arrays with one number per thread. All threads must take the same branch."""

    def __init__(
        self, ex2_error: float = 0.0, rcp_error: float = 0.0, threads: int = LANES,
        memory: Callable[[np.ndarray], np.ndarray] | None = None,
    ):  # fmt: skip
        """The relative error of ex2 in units of 2^-22, the error of rcp in ulp, and the words that
        are loaded from addresses."""
        self.errors = ex2_error * 2.0**-22, rcp_error
        self.threads, self.memory = threads, memory
        self.executed: set[str] = set()
        self.shared: dict[int, int] = {}  # what is stored: address -> 16 bits

    def run(self, assembly, values):
        lines = re.sub(r"(\w+):(?=\s|$)", r"\1:;",
            assembly.strip().removeprefix("{").removesuffix("}")).split(";")  # fmt: skip
        lines = [line.strip() for line in lines if line.strip()]
        values, at = dict(values), 0
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            while at < len(lines):
                jump = self.step(lines[at], values)
                at = lines.index(f"{jump}:") + 1 if jump else at + 1
        return values

    def step(self, line, values):
        """Executes a line. Returns the label to continue at if it jumps."""
        if line.startswith(".reg") or line.endswith(":"):
            return None
        if line.startswith("@"):
            name, _, line = line[1:].partition(" ")
            taken = ~values[name[1:]] if name.startswith("!") else values[name]
            if not line.startswith("bra"):
                before = dict(values)
                self.step(line, values)
                for register, x in before.items():
                    if values[register] is not x:
                        values[register] = np.where(taken, bits(values[register]), bits(x))
                return None
            assert (taken == taken[0]).all(), "the warp takes two ways"
            if not taken[0]:
                return None
        opcode, _, rest = line.partition(" ")
        self.executed.add(opcode)
        if opcode == "bra":
            return rest
        if opcode.startswith(("st.", "stmatrix.")):
            self.store(
                opcode, *re.fullmatch(r"\[(\S+?)(?:\+(\d+))?\], \{(.*)\}", rest).groups(), values
            )
            return None
        if opcode.startswith(("fence.", "bar.warp.sync")):
            return None
        if pair := re.fullmatch(r"(\w+), \{(\S+), (\S+)\}", rest):
            low, high = (values[pair[i]].astype(np.uint32) for i in (2, 3))
            values[pair[1]] = high << 16 | low
            return None
        if words := re.fullmatch(r"\{(\w+), (\w+)\}, ([$\w]+)", rest):
            word, half = values[words[3]], 32 if opcode == "mov.b64" else 16
            word = word if half == 32 else wide(word)
            values[words[1]] = (word & np.uint64(2**half - 1)).astype(np.uint32)
            values[words[2]] = (word >> np.uint64(half)).astype(np.uint32)
            return None
        if load := re.fullmatch(r"\{?([^}]*?)\}?, \[(\S+?)(?:\+(\d+))?\]", rest):
            address = values[load[2]].astype(np.int64) + int(load[3] or 0)
            for i, name in enumerate(load[1].split(",")):
                values[name.strip()] = self.memory(address + 4 * i)
            return None
        target, *arguments = (x.strip() for x in rest.split(","))
        if opcode == "vote.sync.any.pred":
            assert arguments[1] == "-1"  # all lanes
            values[target] = np.full(self.threads, values[arguments[0]].any())
            return None
        operands = [self.value(x, values) for x in arguments]
        values[target] = getattr(self, opcode.replace(".", "_"))(*operands)
        return None

    def store(self, opcode, base, offset, registers, values):
        address = self.value(base, values).astype(np.int64) + int(offset or 0)
        x = [bits(values[name.strip()]) for name in registers.split(",")]
        for lane, (i, word) in itertools.product(range(self.threads), enumerate(x)):
            if opcode in ("st.shared.v4.b32", "st.shared.v4.f32"):
                at = address[lane] + 4 * i
            else:
                assert opcode == "stmatrix.sync.aligned.m8n8.x4.shared.b16"
                row = address[8 * i + lane // 4]
                assert row % 16 == 0
                at = row + 4 * (lane % 4)
            for half in (0, 1):
                assert at + 2 * half not in self.shared, "two threads, one place"
                self.shared[int(at + 2 * half)] = int(word[lane]) >> 16 * half & 0xFFFF

    def value(self, text, values):
        if text.startswith("0f"):
            return np.full(self.threads, int(text[2:], 16), np.uint32).view(F32)
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", text):
            return np.full(self.threads, int(text, 0), np.int64)
        return values[text]

    @staticmethod
    def mul_f32(a, b):
        return floats(a) * floats(b)

    @staticmethod
    def add_f32(a, b):
        return a + b

    @staticmethod
    def abs_f32(a):
        return np.abs(a)

    @staticmethod
    def max_f32(a, b):
        return np.fmax(a, b)  # ignores a NaN, as PTX does

    @staticmethod
    def setp_gt_f32(a, b):
        return a > b

    @staticmethod
    def setp_nan_f32(a, b):
        return np.isnan(a) | np.isnan(b)

    @staticmethod
    def setp_neu_f32(a, b):
        return a != b

    @staticmethod
    def selp_f32(a, b, p):
        return np.where(p, a, b)

    @staticmethod
    def fma_rn_f32(a, b, c):
        a, b, c = (floats(x).astype(float) for x in (a, b, c))
        return (a * b + c).astype(F32)

    def ex2_approx_ftz_f32(self, a):
        result = (np.exp2(a.astype(float)) * (1 + self.errors[0])).astype(F32)
        return np.where(result < np.finfo(F32).tiny, F32(0), result)

    def rcp_approx_ftz_f32(self, a):
        exact = 1 / a.astype(float)
        result = (exact + self.errors[1] * np.spacing(exact.astype(F32)).astype(float)).astype(F32)
        return np.where(np.abs(result) < np.finfo(F32).tiny, F32(0), result)

    @staticmethod
    def sub_f32(a, b):
        return floats(a) - floats(b)

    @staticmethod
    def neg_f32(a):
        return -floats(a)

    @staticmethod
    def mov_f32(a):
        return a.copy()

    @staticmethod
    def max_s32(a, b):
        """Compares the bits of floats."""
        return np.maximum(a.view(np.int32), b.view(np.int32)).view(F32)

    @staticmethod
    def setp_gt_s32(a, b):
        return a.view(np.int32) > b

    @staticmethod
    def and_pred(a, b):
        return a & b

    @staticmethod
    def or_pred(a, b):
        return a | b

    @staticmethod
    def not_pred(a):
        return ~a

    @staticmethod
    def shfl_sync_bfly_b32(a, lane, clamp, members):
        assert (clamp == 31).all() and (members == -1).all()
        return a[np.arange(LANES) ^ lane]

    @staticmethod
    def shfl_sync_idx_b32(a, lane, clamp, members):
        assert (clamp == 31).all() and (members == -1).all()
        return a[lane]

    def _packed(half):
        def cvt(_, high, low):
            high, low = (
                x.astype(HALVES[half]).view(np.uint16).astype(np.uint32) for x in (high, low)
            )
            return high << 16 | low

        return cvt

    cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32 = _packed("bf16"), _packed("f16")

    # Integer moves: of thread indices, or of the bits of a float.
    @staticmethod
    def mov_u32(a):
        return a.copy()

    @staticmethod
    def mov_b32(a):
        return a.copy()

    @staticmethod
    def and_b32(a, b):
        return bits(a) & bits(b)

    @staticmethod
    def or_b32(a, b):
        return bits(a) | bits(b)

    @staticmethod
    def xor_b32(a, b):
        return bits(a) ^ bits(b)

    @staticmethod
    def lop3_b32(a, b, c, table):
        assert (table == 0x96).all()
        return bits(a) ^ bits(b) ^ bits(c)

    @staticmethod
    def prmt_b32(a, b, selector):
        both = bits(b).astype(np.uint64) << np.uint64(32) | bits(a)
        result = np.zeros(LANES, np.uint32)
        for i in range(4):
            nibble = bits(selector) >> np.uint32(4 * i) & np.uint32(15)
            byte = both >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte >> np.uint64(7), 255, 0)
            byte = np.where(nibble & 8, sign, byte).astype(np.uint32)
            result |= byte << np.uint32(8 * i)
        return result

    @staticmethod
    def selp_b32(a, b, p):
        return np.where(p, bits(a), bits(b))

    @staticmethod
    def setp_ge_u32(a, b):
        return bits(a) >= bits(b)

    @staticmethod
    def setp_ne_u32(a, b):
        return bits(a) != bits(b)

    @staticmethod
    def mul_wide_u32(a, b):
        return wide(a) * wide(b)

    @staticmethod
    def shl_b32(a, b):
        return (wide(a) << np.minimum(wide(b), np.uint64(32))).astype(np.uint32)

    @staticmethod
    def shr_u32(a, b):
        return (wide(a) >> np.minimum(wide(b), np.uint64(32))).astype(np.uint32)

    @staticmethod
    def shf_r_wrap_b32(low, high, by):
        both = wide(high) << np.uint64(32) | wide(low)
        return (both >> (wide(by) & np.uint64(31))).astype(np.uint32)

    @staticmethod
    def mad_lo_u32(a, b, c):
        return bits(a) * bits(b) + bits(c)

    @staticmethod
    def mad_wide_u32(a, b, c):
        return wide(a) * wide(b) + c.astype(np.uint64)

    @staticmethod
    def min_u32(a, b):
        return np.minimum(bits(a), bits(b))

    @staticmethod
    def neg_s32(a):
        return -bits(a)

    @staticmethod
    def bfind_u32(a):
        return np.array([int(x).bit_length() - 1 for x in a], np.int64)

    @staticmethod
    def add_u32(a, b):
        return bits(a) + bits(b)

    @staticmethod
    def sub_s32(a, b):
        return a - b

    @staticmethod
    def cvt_rn_f32_s32(a):
        return a.astype(F32)

    @staticmethod
    def cvt_f32_f16(a):
        return bits(a).astype(np.uint16).view(np.float16).astype(F32)

    @staticmethod
    def cvt_rn_f16x2_e4m3x2(pair):
        both = np.stack([pair & 0xFF, pair >> np.uint32(8)]).astype(np.uint8)
        low, high = both.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint16)
        return high.astype(np.uint32) << np.uint32(16) | low
