"""Inline assembly of the Hopper kernels on the CPU, instruction by instruction: Gluon has no interpreter.

Guards against a float of dQ that lies where backward_finish does not look for it.
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
    "add": lambda a, b: a + b,
    "shl": lambda a, b: a << b,
    "mad": lambda a, b, c: a * b + c,
    "cvt": lambda a: a,
}


def execute(assembly, thread, **operands):
    """Integer instructions of one thread; memory instructions as (address, registers)."""
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
    """(row, column) of each register: see hopper.py."""
    warp, lane = thread % 128 // 32, thread % 32
    return [
        (ROW * warp + lane // 4 + 8 * (i // 2 % 2), i // 4 * COLUMN + 2 * (lane % 4) + i % 2)
        for i in range(registers)
    ]


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
        for address, four in execute(assembly, thread, **{"$base": 0}):
            for i, name in enumerate(four):
                assert tuple(want[address // 4 + i]) == places[name], (thread, name)
                seen.add(address // 4 + i)
    assert len(seen) == 64 * columns
