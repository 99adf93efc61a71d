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

pytest.importorskip("triton")
sys.path.insert(0, str(KERNEL_DIR))

import ml_dtypes
from sm90 import bwd_chunked_consumer, bwd_postprocess, dq_reduce

ROW, COLUMN = 16, 8  # rows of a warp, columns of eight accumulator registers
OPERATIONS = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "add": lambda a, b: a + b,
    "shl": lambda a, b: a << b,
    "mad": lambda a, b, c: a * b + c,
    "cvt": lambda a: a,
}


def execute(assembly, thread, **operands):
    """Runs one thread's integer instructions; returns memory accesses as (address, registers)."""
    values = {"%tid.x": thread, **operands}
    memory = []

    def value(text):
        return values[text] if text in values else int(text)

    def address(text):
        base, _, offset = text.partition("+")
        return value(base) + int(offset or 0)

    for line in assembly.strip("{} ").split(";"):
        line = line.strip()
        opcode = line.split(" ")[0].split(".")[0]
        rest = line.partition(" ")[2]
        moved = re.fullmatch(r"\[([^\]]+)\], \{([^}]*)\}", rest)
        if moved:
            memory.append((address(moved[1]), moved[2].split(", ")))
        elif opcode in OPERATIONS:
            name, *arguments = (x.strip() for x in rest.split(","))
            values[name] = OPERATIONS[opcode](*map(value, arguments))
        else:
            assert not line or line.startswith(".reg"), line
    return memory


def accumulator(thread, registers):
    """The (row, column) of each register: see sm90/common.py."""
    warp, lane = thread % 128 // 32, thread % 32
    return [
        (ROW * warp + lane // 4 + 8 * (i // 2 % 2), i // 4 * COLUMN + 2 * (lane % 4) + i % 2)
        for i in range(registers)
    ]


def rows_of_sum(columns):
    """For each float of the sum, the (row, column) that backward_postprocess reads it as."""
    shape, axes = bwd_postprocess.sum_shape(columns), bwd_postprocess.SUM_TO_ROWS.value
    index = np.arange(64 * columns).reshape([int(n) for n in getattr(shape, "value", shape)])
    index = index.transpose(axes).reshape(64, columns)
    found = np.empty((64 * columns, 2), int)
    found[index] = np.stack(np.indices((64, columns)), -1)
    return found


@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_every_float_of_dq_is_stored_where_postprocess_reads_it(columns):
    registers = columns // 2
    names = tuple(f"$r{i}" for i in range(registers))
    assembly = dq_reduce.store_registers_asm((), (names, ("$base",)))
    want, seen = rows_of_sum(columns), set()
    for thread in range(128, 256):  # the second warp group
        places = dict(zip(names, accumulator(thread, registers), strict=True))
        for address, four in execute(assembly, thread, **{"$base": 0}):
            for i, name in enumerate(four):
                assert tuple(want[address // 4 + i]) == places[name], (thread, name)
                seen.add(address // 4 + i)
    assert len(seen) == 64 * columns


def as_float(bits):
    return np.uint32(bits).view(np.float32)


def as_bits(number):
    return int(np.float32(number).view(np.uint32))


def packed(half, high, low):
    return int(half(high).view(np.uint16)) << 16 | int(half(low).view(np.uint16))


HALVES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# Operations on 32-bit registers, whatever their type.
ARITHMETIC = {
    "mov.u32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "add.u32": lambda a, b: a + b,
    "setp.ne.u32": lambda a, b: a != b,
    "selp.b32": lambda a, b, p: a if p else b,
    "neg.f32": lambda a: as_bits(-as_float(a)),
    "sub.f32": lambda a, b: as_bits(as_float(a) - as_float(b)),
    "mul.f32": lambda a, b: as_bits(as_float(a) * as_float(b)),
    "fma.rn.f32": lambda a, b, c: as_bits(
        np.float64(as_float(a)) * as_float(b) + np.float64(as_float(c))
    ),
    "ex2.approx.ftz.f32": lambda a: as_bits(np.exp2(as_float(a))),
    "cvt.f32.f16": lambda a: as_bits(np.uint16(a).view(np.float16)),
    **{
        f"cvt.rn.{name}x2.f32": lambda a, b, half=half: packed(half, as_float(a), as_float(b))
        for name, half in HALVES.items()
    },
}


def compute(assembly, thread, operands, lines=()):
    """One thread's result registers. `lines`: the floats in shared memory from address 0."""
    values = {"%tid.x": thread, **{f"${i}": x for i, x in operands.items()}}

    def value(text):
        return values[text] if text in values else int(text, 0)

    for line in filter(None,
        (x.strip("{ }") if ".reg" in x else x.strip() for x in assembly.split(";"))):  # fmt: skip
        line = line.removesuffix("}").strip()
        if not line or line.startswith(".reg"):
            continue
        if line.startswith("@p "):
            if not values["p"]:
                continue
            line = line[3:]
        opcode, _, rest = line.partition(" ")
        if opcode == "ld.shared.v2.f32":
            first, second, base, offset = re.fullmatch(r"\{(\w+), (\w+)\}, \[(\w+)\+(\d+)\]",
                rest).groups()  # fmt: skip
            at = (values[base] + int(offset)) // 4
            values[first], values[second] = as_bits(lines[at]), as_bits(lines[at + 1])
        elif opcode == "mov.b32":
            low, high, source = re.fullmatch(r"\{(\w+), (\w+)\}, (\$?\w+)", rest).groups()
            values[low], values[high] = value(source) & 0xFFFF, value(source) >> 16
        else:
            name, *arguments = (x.strip() for x in rest.split(","))
            values[name] = ARITHMETIC[opcode](*map(value, arguments))
    return [values[f"${i}"] for i in range(16)]


def tile(pairs, thread, half, of):
    """Store one thread's packed pairs at their elements of a tile of 64 keys and 64 rows."""
    for i, (key, row) in enumerate(accumulator(thread, 32)):
        bits = pairs[i // 2] >> 16 * (i % 2) & 0xFFFF
        of[key, row] = np.uint16(bits).view(half)


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_p_and_ds_of_the_tile_of_keys(name):
    """Scores are (keys, rows), so lse2 and delta belong to columns. Elements that the mask clears
    are 0, even if they were NaN."""
    half, rng = HALVES[name], np.random.default_rng()
    s, dp = rng.standard_normal((2, 64, 64), np.float32)
    lse, delta = rng.standard_normal((2, 64), np.float32)
    scale, attended = np.float32(0.7), rng.random((64, 64)) < 0.6
    dp = np.where(attended, dp, np.float32("nan"))
    want_p = np.exp2(s * scale - lse).astype(half)
    want_ds = np.where(attended, want_p.astype(np.float32) * (dp - delta), 0).astype(half)
    p, ds = np.zeros((2, 64, 64), half)
    for thread in range(256, 384):
        places = accumulator(thread, 32)
        scores = {16 + i: as_bits(s[at]) for i, at in enumerate(places)}
        operands = scores | {48: as_bits(scale), 49: 0}
        p_pairs = compute(bwd_chunked_consumer.p_asm(name), thread, operands, lse)
        tile(p_pairs, thread, half, p)
        operands = {16 + i: as_bits(dp[at]) for i, at in enumerate(places)}
        operands |= {48 + i: pair for i, pair in enumerate(p_pairs)} | {64: 0}
        pairs = compute(bwd_chunked_consumer.ds_asm(name), thread, operands, delta)
        # As in sm90/common.range_bits_asm: for each of two keys, two bits per octet of rows.
        bits = [0, 0]
        for i, at in enumerate(places):
            bits[i // 2 % 2] |= int(attended[at]) << (i // 4 * 2 + i % 2)
        operands = {16 + i: pair for i, pair in enumerate(pairs)} | {32: bits[0], 33: bits[1]}
        tile(compute(bwd_chunked_consumer.clear_bits_asm(), thread, operands), thread, half, ds)
    # In float32 the last bit of a sum may differ, which changes a few roundings.
    for got, want in ((p, want_p), (ds, want_ds)):
        error = np.abs(got.astype(np.float32) - want.astype(np.float32))
        allowed = 2 * np.finfo(np.float32).eps + 2.0**-7 * np.abs(want.astype(np.float32))
        assert (error <= allowed).all()
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
