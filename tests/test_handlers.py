"""The four FFI handlers with good buffers: which kernels in which order, grids, every argument.

Guards against an argument in the wrong place of a kernel's parameter list, a grid that misses rows
and a size that wraps around. Runs on a fake libcuda (tests/cpp): needs the built extension and a C
compiler.
"""

import struct
from dataclasses import replace
from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import CALLS, Array, Sizes, backward, blocks, documents, forward, table_size
from cpp.machine import arguments, make_machine, needs_compiler, needs_extension

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
        names = arguments(kernel)
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
def test_forward(portable, s):
    call = forward(portable, s, scale=0.0625, element_test=1)
    grids = {"forward": lambda m: [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)]}
    expect_launches(portable, call, attention(s, 0.0625, 1), grids)
    assert portable.calls("cuTensorMapEncodeTiled") == 0


MAP_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType


def expected_map(array, box, bit21=0):
    """Of a (batch, length, heads, dim) array; sizes, strides and boxes from the innermost axis."""
    rows, columns, swizzle = box
    batch, length = array.shape[:2]
    width = array.shape[2] * array.shape[3]
    return {
        "address": array.address,
        "bit21": int(batch * length * width * 2 - 1 >= 128 * 1024) or bit21,
        "sizes": [width, length, batch],
        "byte_strides": [2 * width, 2 * width * length],
        "box": [columns, rows, 1],
        "steps": [1, 1, 1],
        "type": MAP_TYPES[array.dtype],
        "interleave": 0,
        "swizzle": swizzle,
        "promotion": 2,
        "fill": 0,
        "shape": [batch, length, width],
        "strides": [width * length, width, 1],
    }


def hopper_maps(machine, call, **more):
    boxes = machine.row("forward_hopper", machine.variant["cc"])["tensor_maps"]
    arrays = {**call.operands, **call.results}
    names = ("query", "key", "value", "out")
    return {
        name: expected_map(arrays[name], box, **more)
        for name, box in zip(names, boxes, strict=True)
    }


@pytest.mark.parametrize("qk_dim", [64, 128])
@pytest.mark.parametrize("s", SIZES)
def test_forward_on_hopper(tmp_path, driver, s, qk_dim):
    """Tensor maps in the places of query, key, value and out; the order is that of its tiles."""
    machine = make_machine(
        tmp_path, driver, choose=lambda m: m.has_hopper() and m.variant["qk_dim"] == qk_dim
    )
    row = machine.row("forward_hopper", machine.variant["cc"])
    assert all(box[1:] == (64, 3) for box in row["tensor_maps"])  # 128 bytes of columns
    call = forward(machine, s, scale=0.0625, element_test=1)
    order = {128: "q_order", 192: "q_order_192"}[row["block"]]
    more = {"q_order": call.operands[order].address, **hopper_maps(machine, call)}
    grids = {"forward_hopper": lambda m: [s.heads * s.batch * ceil(s.q_len / m)]}
    expect_launches(machine, call, {**attention(s, 0.0625, 1), **more}, grids)


def test_maps_are_encoded_for_each_call(hopper):
    """The buffers of the next call may lie elsewhere, under the same sizes."""
    call = forward(hopper)
    assert hopper.run(call, INITIALIZE) is None
    assert hopper.calls("cuTensorMapEncodeTiled") == 0
    moved = replace(call.operands["query"], address=0x7700)
    for operand in (call.operands["query"], moved):
        call.operands["query"] = operand
        assert hopper.run(call) is None
    assert [r["params"][0]["address"] for r in hopper.launches()] == [0x10000, 0x7700]


@pytest.mark.parametrize(("version", "bit21"), [(12040, 0), (13010, 0), (13020, 1)])
def test_maps_of_small_tensors(hopper, version, bit21):
    """Under 128 KiB, drivers up to 13.1 set a bit that has to be cleared; later ones are right."""
    hopper.cuda.fake_set_version(version)
    call = forward(hopper, Sizes(batch=1, mask_batch=1, q_len=64, kv_len=64, heads=1, kv_heads=1))
    assert hopper.run(call) is None
    (launch,) = hopper.launches()
    assert launch["params"][:4] == list(hopper_maps(hopper, call, bit21=bit21).values())
    assert launch["params"][0]["bit21"] == bit21


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_edge_of_small_tensors(hopper, more):
    """128 KiB, a row less, a row more."""
    kv_len = 128 * 1024 // (2 * hopper.variant["qk_dim"]) + more
    s = Sizes(batch=1, mask_batch=1, kv_len=kv_len, heads=1, kv_heads=1)
    call = forward(hopper, s)
    assert hopper.run(call) is None
    (launch,) = hopper.launches()
    assert launch["params"][1] == hopper_maps(hopper, call)["key"]
    assert launch["params"][1]["bit21"] == (more > 0)


def map_text(machine, name, array):
    boxes = machine.row("forward_hopper", machine.variant["cc"])["tensor_maps"]
    rows, columns, swizzle = boxes[("query", "key", "value", "out").index(name)]
    batch, length, heads, dim = array.shape
    return (
        f"tensor map of {name}, {array.dtype}[{batch}, {length}, {heads * dim}] in boxes of "
        f"{rows} x {columns}, swizzle {swizzle}"
    )


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
def test_map_of_a_misaligned_buffer(hopper, name):
    call = forward(hopper)
    group = call.results if name == "out" else call.operands
    group[name] = replace(group[name], address=0x12348)
    failure = hopper.run(call)
    kernel = hopper.row("forward_hopper", hopper.variant["cc"])["name"]
    assert failure.code == "InvalidArgument"
    assert failure.message == (
        f"packax_forward_v1: {map_text(hopper, name, group[name])}: "
        f"address 0x12348 is no multiple of 16; {kernel}"
    )
    assert hopper.launches() == []


@pytest.mark.parametrize(
    ("sizes", "name", "why"),
    [
        ({"heads": 1 << 27}, "query", "a size is over 2147483647"),
        (
            {"q_len": 1 << 29, "heads": 1 << 10},
            "query",
            "one row of the batch has 2^40 bytes or more",
        ),
        (
            {"kv_len": 1 << 29, "heads": 1 << 22, "kv_heads": 1 << 22, "q_len": 1},
            "key",
            "one row of the batch has 2^40 bytes or more",
        ),
    ],
)
def test_map_over_the_limits(hopper, sizes, name, why):
    call = forward(hopper, Sizes(**{"batch": 1, "mask_batch": 1, "kv_heads": 1, **sizes}))
    failure = hopper.run(call)
    kernel = hopper.row("forward_hopper", hopper.variant["cc"])["name"]
    assert failure.code == "InvalidArgument"
    assert failure.message == (
        f"packax_forward_v1: {map_text(hopper, name, call.operands[name])}: {why}; {kernel}"
    )


def test_map_that_the_driver_refuses(hopper):
    hopper.fail("cuTensorMapEncodeTiled", 1)
    call = forward(hopper)
    failure = hopper.run(call)
    row = hopper.row("forward_hopper", hopper.variant["cc"])
    assert failure.code == "Internal"
    assert failure.message == (
        "packax_forward_v1: cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE (invalid "
        f"argument); {map_text(hopper, 'query', call.operands['query'])}, address 0x10000; "
        f"{row['name']} (cubin for {row['arch']}) on device 0, Fake GPU 0 "
        f"(compute capability {row['cc'] // 10}.{row['cc'] % 10})"
    )
    assert hopper.launches() == []
    hopper.fail("cuTensorMapEncodeTiled", 0)
    assert hopper.run(call) is None


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
