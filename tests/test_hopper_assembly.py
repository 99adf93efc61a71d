"""Inline assembly of the Hopper kernels on the CPU, instruction by instruction: Gluon has no interpreter.

Guards against a float of dS or dQ that lies where backward_finish or a matrix product does not look for it.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "csrc" / "kernels"))

import hopper_dq
import hopper_rows

ROW, COLUMN = 16, 8  # of one warp and one octet of accumulator registers
OPERATIONS = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "add": lambda a, b: a + b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "cvt": lambda a: a,
}


def execute(assembly, thread, **operands):
    """Integer instructions of one thread; memory instructions as (opcode, addresses, registers)."""
    values = {"%tid.x": thread, "%laneid": thread % 32, **operands}
    memory = []

    def value(text):
        return values[text] if text in values else int(text)

    def address(text):
        base, _, offset = text.partition("+")
        return value(base) + int(offset or 0)

    for line in assembly.strip("{} ").split(";"):
        line = re.sub(r"^(@p|\{)", "", line.strip()).strip()
        opcode = line.split(" ")[0].split(".")[0]
        rest = line.partition(" ")[2]
        addresses = [address(x) for x in re.findall(r"\[([^\]]+)\]", rest)]
        if addresses:
            registers = re.search(r"\{([^}]*)\}", rest)
            names = [x.strip() for x in registers[1].split(",")] if registers else []
            memory.append((line.split(" ")[0], addresses, [values.get(x, x) for x in names]))
        elif opcode == "mov" and "{" in rest:  # two halves into one register
            name, halves = re.fullmatch(r"(\w+), \{(.*)\}", rest).groups()
            values[name] = tuple(x.strip() for x in halves.split(","))
        elif opcode in OPERATIONS:
            name, *arguments = (x.strip() for x in rest.split(","))
            values[name] = OPERATIONS[opcode](*map(value, arguments))
        else:
            assert opcode in ("", "setp", "bar", "fence", "cp") or line.startswith(".reg"), line
    return memory


def accumulator(thread, registers):
    """(row, column) of each register: see hopper.py."""
    warp, lane = thread % 128 // 32, thread % 32
    return [
        (ROW * warp + lane // 4 + 8 * (i // 2 % 2), i // 4 * COLUMN + 2 * (lane % 4) + i % 2)
        for i in range(registers)
    ]


def call(function, *operands):
    return function.fn(*operands) if hasattr(function, "fn") else function(*operands)


def rows_of_sum(columns):
    """Float by float, the (row, column) that backward_finish takes from there."""
    shape, axes = hopper_dq.sum_shape(columns), hopper_dq.SUM_TO_ROWS.value
    place = np.arange(64 * columns).reshape([int(n) for n in getattr(shape, "value", shape)])
    place = place.transpose(axes).reshape(64, columns)
    found = np.empty((64 * columns, 2), int)
    found[place] = np.stack(np.indices((64, columns)), -1)
    return found


@pytest.mark.parametrize("columns", [32, 64, 128, 256])
@pytest.mark.parametrize("way", ["store", "red"])
def test_every_float_of_dq_lies_where_finish_looks(columns, way):
    registers = columns // 2
    names = tuple(f"$r{i}" for i in range(registers))
    make = hopper_rows.store_registers_asm if way == "store" else hopper_rows.add_registers_asm
    assembly = make((), (names, ("$base",)))
    want, seen = rows_of_sum(columns), set()
    for thread in range(128, 256):  # of the second warp group
        places = dict(zip(names, accumulator(thread, registers), strict=True))
        for _, (address,), four in execute(assembly, thread, **{"$base": 0}):
            for i, name in enumerate(four):
                assert tuple(want[address // 4 + i]) == places[name], (thread, name)
                seen.add(address // 4 + i)
    assert len(seen) == 64 * columns


@pytest.mark.parametrize("columns", [32, 64])
def test_warps_add_their_own_part(columns):
    """Every byte of the stage is added once, to its own place, by the first thread of the warp that stored it."""
    registers, stage, total = columns // 2, 1 << 20, 1 << 40
    names = tuple(f"$r{i}" for i in range(registers))
    assembly = hopper_rows.add_by_warp_asm((), (names, ("$at",), ("$stage",)))
    plain = hopper_rows.store_registers_asm((), (names, ("$stage",)))
    added = set()
    for warp in range(4):
        stored = set()
        for thread in range(128 + 32 * warp, 160 + 32 * warp):
            operands = {"$at": total, "$stage": stage}
            memory = execute(assembly, thread, **operands)
            stores = [x for x in memory if x[0].startswith("st.shared")]
            assert stores == execute(plain, thread, **operands)
            stored |= {address + i for _, (address,), _ in stores for i in range(16)}
            if thread % 32 == 0:
                bulk = [x for x in memory if x[0].startswith("cp.reduce")]
        for _, (to, source), _ in bulk:
            assert to - total == source - stage
            part = set(range(source, source + 2048))
            assert part <= stored and not part & added
            added |= part
    assert len(added) == 64 * columns * 4
    assert assembly.count(", 2048;") == columns // 32


@pytest.mark.parametrize("rows", [64, 128])
def test_ds_lies_in_the_swizzle_of_matrix_products(rows):
    """(keys, rows) of 16 bits: 64 rows are 128 bytes, whose 16 bytes are permuted by key % 8; the next 64 come 128 keys later."""
    registers = rows // 2
    names = tuple(f"$r{i}" for i in range(registers))
    assembly = hopper_rows.store_ds_asm((), (names, ("$base",)))
    found = {}
    for warp in range(4):
        threads = range(32 * warp, 32 * warp + 32)
        memory = [execute(assembly, thread, **{"$base": 0}) for thread in threads]
        for step in range(len(memory[0])):
            for matrix in range(4):
                for lane, thread in enumerate(threads):
                    places = dict(zip(names, accumulator(thread, registers), strict=True))
                    _, (address,), _ = memory[8 * matrix + lane // 4][step]
                    halves = memory[lane][step][2][matrix]
                    for i, name in enumerate(halves):
                        found[address + 4 * (lane % 4) + 2 * i] = places[name]
    assert len(found) == 64 * rows
    for address, (key, row) in found.items():
        chunk = (row % 64 * 2 // 16) ^ (key % 8)
        assert address == row // 64 * 16384 + key * 128 + chunk * 16 + row * 2 % 16
