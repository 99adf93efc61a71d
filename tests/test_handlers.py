"""The four FFI handlers with good buffers: which kernels in which order, grids, every argument.

Guards against an argument in the wrong place of a kernel's parameter list, a grid that misses rows
and a size that wraps around. Runs on a fake libcuda (tests/cpp): needs the built extension and a C
compiler.
"""

import struct
from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import CALLS, Array, Sizes, backward, blocks, documents, forward, table_size
from cpp.machine import POINTERS, SCALARS, needs_compiler, needs_extension

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

SIZES = [
    Sizes(),
    Sizes(batch=3, mask_batch=1, q_len=1, kv_len=1, heads=4, kv_heads=4),
    Sizes(batch=1, mask_batch=1, q_len=128, kv_len=129, heads=8, kv_heads=1),
    Sizes(batch=5, mask_batch=5, q_len=1 << 20, kv_len=(1 << 20) + 1, heads=2, kv_heads=1),
]


def expect_launches(machine, call, scalars, grids):
    """Exactly these kernels in this order; `grids`: kernel -> grid as a function of its block."""
    assert machine.run(call) is None
    launches = machine.launches()
    assert [launch["kernel"] for launch in launches] == list(grids)
    values = {**call.addresses(), **scalars}
    for launch, (kernel, grid) in zip(launches, grids.items(), strict=True):
        row = machine.row(kernel, machine.variant["cc"])
        assert launch["grid"] == [*grid(row["block"]), 1, 1][:3], kernel
        assert launch["block"] == [row["threads"], 1, 1]
        assert launch["shared"] == row["shared"]
        assert launch["stream"] == machine.xla.stream
        names = (POINTERS[kernel] + " " + SCALARS[kernel]).replace(":f", "").split()
        got = dict(zip(names, launch["params"], strict=False))
        assert got == {name: values[name] for name in names}, kernel
        assert launch["params"][len(names) :] == [0, 0]  # Triton's scratch pointers


def attention(s, scale, element_test, has_dlse=0):
    return {
        "scale": struct.unpack("f", struct.pack("f", scale))[0],
        "element_test": element_test,
        "has_dlse": has_dlse,
        "batch": s.batch,
        "mask_batch": s.mask_batch,
        "q_len": s.q_len,
        "kv_len": s.kv_len,
        "heads": s.heads,
        "kv_heads": s.kv_heads,
    }


@pytest.mark.parametrize("s", SIZES)
def test_forward(machine, s):
    call = forward(machine, s, scale=0.0625, element_test=1)
    grids = {"forward": lambda m: [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)]}
    expect_launches(machine, call, attention(s, 0.0625, 1), grids)


@pytest.mark.parametrize("has_dlse", [0, 1])
@pytest.mark.parametrize("s", SIZES)
def test_backward(machine, s, has_dlse):
    call = backward(machine, s, scale=-1.5, element_test=2, has_dlse=has_dlse)
    grids = {
        "backward_delta": lambda r: [ceil(s.q_len / r) * s.heads * s.batch],
        "backward_dkdv": lambda n: [s.kv_heads * s.batch * ceil(s.kv_len / 128) * (128 // n)],
        "backward_dq": lambda m: [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)],
    }
    expect_launches(machine, call, attention(s, -1.5, 2, has_dlse), grids)


@pytest.mark.parametrize("compare_positions", [0, 1])
@pytest.mark.parametrize("s", [*SIZES, Sizes(q_len=5, kv_len=512), Sizes(q_len=5, kv_len=513)])
def test_documents(machine, s, compare_positions):
    call = documents(machine, s, compare_positions)
    size = table_size(s.kv_len)
    scalars = {
        "q_len": s.q_len,
        "kv_len": s.kv_len,
        "compare_positions": compare_positions,
        "table_size": size,
        "table_shift": 33 - size.bit_length(),
        "search_steps": s.kv_len.bit_length(),
    }
    grids = {
        "documents_init": lambda n: [ceil(s.kv_len / n), s.mask_batch],
        "documents_runs": lambda n: [ceil(s.kv_len / n), s.mask_batch],
        "documents_rows": lambda n: [ceil(s.q_len / n), s.mask_batch],
    }
    expect_launches(machine, call, scalars, grids)


@pytest.mark.parametrize("s", SIZES)
def test_blocks(machine, s):
    q_blocks, kv_blocks = ceil(s.q_len / 64), ceil(s.kv_len / 64)
    tiles = ceil(max(s.q_len, s.kv_len) / 128)
    grids = {
        "blocks_rows": lambda n: [ceil(q_blocks / n), s.mask_batch],
        "blocks_keys": lambda n: [ceil(kv_blocks / n), s.mask_batch],
        "blocks_order": lambda n: [ceil(tiles / n), s.mask_batch],
    }
    scalars = {"q_len": s.q_len, "kv_len": s.kv_len}
    expect_launches(machine, blocks(machine, s), scalars, grids)


@pytest.mark.parametrize(
    ("name", "mask_batch"),
    [
        ("forward", 0),
        ("forward", 1),
        ("backward", 0),
        ("backward", 1),
        ("documents", 0),
        ("blocks", 0),
    ],
)
def test_empty_batch_launches_nothing(machine, name, mask_batch):
    call = CALLS[name](machine, Sizes(batch=0, mask_batch=mask_batch))
    assert machine.run(call, INITIALIZE) is None
    assert machine.run(call) is None
    assert machine.calls("cuLibraryLoadData") == machine.calls("cuLaunchKernel") == 0


@pytest.mark.parametrize(
    ("element_test", "unread"),
    [(0, ("q_ids", "kv_ids", "q_pos", "kv_pos")), (1, ("q_pos", "kv_pos")), (2, ())],
)
def test_unread_operands_may_be_anything(machine, element_test, unread):
    """What a mask does not have arrives as q_lo once more."""
    call = forward(machine, element_test=element_test)
    call = call.change(**dict.fromkeys(unread, call.operands["q_lo"]))
    assert machine.run(call) is None
    call = backward(machine, element_test=element_test, has_dlse=0)
    call = call.change(dlse=Array("float32", (1,)))
    call = call.change(**dict.fromkeys(unread, call.operands["q_lo"]))
    assert machine.run(call) is None
