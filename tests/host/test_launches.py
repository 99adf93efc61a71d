"""What the table of handlers (test_handlers.py) cannot say: the kernels of masks, counters, tensor
maps, the workspace, and the errors of what cannot be launched.

Guards against errors after a part of the kernels was launched. Runs on a fake libcuda
(tests/support/cpp): needs the built extension and a C compiler.
"""

from dataclasses import replace
from functools import partial

import pytest
from cpp.call_frame import EXECUTE, INITIALIZE, Array
from cpp.calls import (
    CALLS,
    EVERY,
    SIZES,
    Sizes,
    backward,
    blocks,
    decode,
    documents,
    forward,
    table_size,
    tangent,
)
from cpp.launches import (
    COUNTED_KEYS,
    SHORT_KEYS,
    expect,
    fields,
    kernels_of,
    maps_of,
    sections,
)
from cpp.machine import make_machine, needs_compiler, needs_extension

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]
stages = pytest.mark.parametrize("stage", [INITIALIZE, EXECUTE])
S = Sizes()
ONE = Sizes(batch=1, mask_batch=1, q_len=64, kv_len=64, heads=1, kv_heads=1)
APART = ("backward_preprocess", "backward_dkdv_sm90", "backward_dq_sm90")


@pytest.fixture
def separate(tmp_path, driver):
    """A machine with all of Hopper's plain kernels."""
    return make_machine(tmp_path, driver, choose=lambda m: m.has("backward_sm90", *APART))


# --- Masks


@pytest.mark.parametrize("compare_positions", [0, 1, 2])
@pytest.mark.parametrize("s", [*SIZES, Sizes(q_len=5, kv_len=512), Sizes(q_len=5, kv_len=513)])
def test_documents(machine, s, compare_positions):
    call, size = documents(machine, s, compare_positions), table_size(s.kv_len)
    table = {"table_size": size, "table_shift": 33 - size.bit_length()}
    steps = {"search_steps": s.kv_len.bit_length()}
    kernels = ["documents_init", "documents_runs", "documents_rows"]
    expect(machine, call, kernels, fields(call) | table | steps)


@pytest.mark.parametrize("s", SIZES)
def test_blocks(machine, s):
    call = blocks(machine, s)
    expect(machine, call, ["blocks_rows", "blocks_keys", "blocks_order"], fields(call))


@pytest.mark.parametrize("mode,unread", [(0, ("q_ids", "kv_ids", "q_pos", "kv_pos")),
    (1, ("q_pos", "kv_pos")), (2, ()), (3, ())])  # fmt: skip
def test_unread_operands_may_be_anything(machine, mode, unread):
    """Arrays that a mask lacks are passed as placeholders (kv_start again) and not read."""
    for make in (forward, backward):
        call = make(machine, mask_mode=mode, has_dlse=0)
        call = call.change(**dict.fromkeys(unread, call.operands["kv_start"]))
        assert machine.run(call) is None


@pytest.mark.parametrize(
    "make,mask_batch",
    [*((make, n) for make in (forward, backward, tangent) for n in (0, 1)),
        *((make, 0) for make in (documents, blocks, CALLS["decode"]))],
)  # fmt: skip
def test_an_empty_batch_launches_nothing(machine, make, mask_batch):
    call = make(machine, Sizes(batch=0, mask_batch=mask_batch))
    assert machine.run(call, INITIALIZE) is None and machine.run(call) is None
    assert machine.calls("cuLibraryLoadData") == machine.calls("cuLaunchKernel") == 0


# --- Counters


def test_more_tiles_than_the_counter_counts(sm90):
    """Each program increments the counter once after the last tile, which must not overflow."""
    block = sm90.row("forward_sm90")["block"]
    most = 2**31 - 1 - 4096
    s = replace(ONE, q_len=block, kv_len=SHORT_KEYS + 1)
    assert sm90.run(forward(sm90, replace(s, batch=most))) is None
    failure = sm90.run(forward(sm90, replace(s, batch=most + 1)))
    assert failure.code == "InvalidArgument"
    assert failure.message == (
        f"packax_forward_v1: batch * heads * ceil(q_len/{block}) is {most + 1}, a GPU takes "
        f"{most} at most; split the batch"
    )
    assert len(sm90.record()) == 2


def test_a_counter_that_is_not_cleared(sm90):
    sm90.fail("cuMemsetD32Async", 1)
    sizes = Sizes(kv_len=COUNTED_KEYS + 1), Sizes(kv_len=SHORT_KEYS)
    for s in sizes:  # nothing to clear
        assert sm90.run(forward(sm90, s)) is None
    failure = sm90.run(forward(sm90, Sizes(kv_len=SHORT_KEYS + 1)))
    assert failure.code == "Internal"
    assert failure.message == (
        "packax_forward_v1: cuMemsetD32Async failed: CUDA_ERROR_INVALID_VALUE (invalid argument), "
        "device 0"
    )
    assert sm90.run(forward(sm90, Sizes(kv_len=COUNTED_KEYS))).code == "Internal"
    assert len(sm90.launches()) == len(sizes)


# --- Tensor maps


def test_maps_are_encoded_for_each_call(sm90):
    """The next call may have other addresses with the same sizes."""
    call = forward(sm90)
    assert sm90.run(call, INITIALIZE) is None
    assert sm90.calls("cuTensorMapEncodeTiled") == 0
    moved = replace(call.operands["query"], address=0x7700)
    for operand in (call.operands["query"], moved):
        call.operands["query"] = operand
        assert sm90.run(call) is None
    assert [r["params"][0]["address"] for r in sm90.launches()] == [0x10000, 0x7700]


@pytest.mark.parametrize(("version", "bit21"), [(12040, 0), (13010, 0), (13020, 1)])
def test_maps_of_small_tensors(sm90, version, bit21):
    """Below 128 KiB, drivers up to 13.1 set a bit that must be cleared; later drivers do not."""
    sm90.cuda.fake_set_version(version)
    call = forward(sm90, ONE)
    (kernel,) = kernels_of(sm90, call)
    maps = list(maps_of(sm90, kernel, call.arrays(), bit21=bit21).values())
    assert sm90.launches()[0]["params"][:4] == maps
    assert maps[0]["bit21"] == bit21


OF_FORWARD = ("query", "key", "value", "out")


def map_text(machine, kernel, name, array):
    boxes = machine.row(kernel)["tensor_maps"]
    rows, columns, swizzle = boxes[OF_FORWARD.index(name)]
    batch, length, heads, dim = array.shape
    return (
        f"packax_forward_v1: tensor map of {name}, {array.dtype}[{batch}, {heads}, {length}, {dim}]"
        f" in boxes of {rows} x {columns}, swizzle {swizzle}"
    )


LARGE = {"batch": 1, "mask_batch": 1, "kv_heads": 1}
TOO_LARGE = "one row of the batch has 2^40 bytes or more"


@pytest.mark.parametrize(
    "name,sizes,why",
    [
        *((x, {}, "address 0x12348 is no multiple of 16") for x in OF_FORWARD),
        ("query", LARGE | {"q_len": 1 << 29, "heads": 16}, TOO_LARGE),
        ("key", LARGE | {"kv_len": 1 << 29, "heads": 1 << 16, "kv_heads": 1 << 16, "q_len": 1},
            TOO_LARGE),
    ],
)  # fmt: skip
def test_what_a_map_cannot_describe(sm90, name, sizes, why):
    (kernel,) = kernels_of(sm90, forward(sm90))
    call = forward(sm90, Sizes(**sizes))
    if not sizes:
        group = call.results if name == "out" else call.operands
        group[name] = replace(group[name], address=0x12348)
    sm90.cuda.fake_clear()
    failure = sm90.run(call)
    assert failure.code == "InvalidArgument"
    text = map_text(sm90, kernel, name, call.arrays()[name])
    assert failure.message == f"{text}: {why}; {sm90.row(kernel)['name']}"
    assert sm90.record() == []


def test_a_map_that_the_driver_refuses(sm90):
    call = forward(sm90)
    (kernel,) = kernels_of(sm90, call)
    sm90.cuda.fake_clear()
    sm90.fail("cuTensorMapEncodeTiled", 1)
    failure, row = sm90.run(call), sm90.row(kernel)
    assert failure.code == "Internal"
    prefix, _, text = map_text(sm90, kernel, "query", call.operands["query"]).partition(": ")
    assert failure.message == (
        f"{prefix}: cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE (invalid argument); "
        f"{text}, address 0x10000; {row['name']} (cubin for {row['arch']}) on device 0, Fake GPU 0 "
        f"(compute capability {row['cc'] // 10}.{row['cc'] % 10})"
    )
    assert sm90.launches() == []
    sm90.fail("cuTensorMapEncodeTiled", 0)
    assert sm90.run(call) is None


@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "dk", "dv", "workspace"])
def test_a_misaligned_buffer_of_the_backward(separate, name):
    """The error comes before any launch. For the workspace, it names the first mapped section."""
    call = backward(separate)
    group = call.operands if name in call.operands else call.results
    group[name] = replace(group[name], address=0x12348)
    failure = separate.run(call)
    assert failure.code == "InvalidArgument"
    said = {"workspace": "lse2, float32[1, 1, "}.get(name, f"{name}, {group[name].dtype}[2, ")
    assert failure.message.startswith(f"packax_backward_v1: tensor map of {said}")
    assert "is no multiple of 16; backward_sm90_" in failure.message
    assert separate.launches() == []


@stages
@pytest.mark.parametrize("algorithm", ["", "sm90_fused", "sm90_separate"])
def test_keys_too_large_for_tensor_maps(separate, stage, algorithm):
    """Nothing is launched, although the backward's first kernel does not read the keys."""
    heads = (1 << 40) // (1 << 29) // (2 * separate.variant["qk_dim"])
    s = replace(ONE, kv_len=1 << 29, heads=heads, kv_heads=heads)
    make = partial(backward, algorithm=algorithm) if algorithm else forward
    failure = separate.run(make(separate, s), stage)
    assert failure.code == "InvalidArgument"
    assert "tensor map of key, " in failure.message and TOO_LARGE in failure.message
    assert separate.record() == []


# --- The workspace


@pytest.mark.parametrize("algorithm", ["sm90_fused", "sm90_separate", "portable"])
def test_the_workspace_has_exactly_the_size_of_the_algorithm(separate, algorithm):
    call = backward(separate, algorithm=algorithm)
    workspace = call.results["workspace"]
    (size,) = workspace.shape
    found = sections(call, separate.variant["qk_dim"])
    rows = {"sm90_fused": found["dq_sum"].shape[2], "sm90_separate": 1}
    if algorithm in rows:  # it ends with the sum of dQ, or a counter
        end = found["dq_sum"].address + 4 * rows[algorithm]
        assert end == workspace.address + 4 * size
        assert all((x.address - workspace.address) % 256 == 0 for x in found.values())
    assert separate.run(call) is None
    for elements in (size - 1, size + 1):
        failure = separate.run(call.change(workspace=Array("float32", (elements,))))
        assert failure.code == "InvalidArgument"
        assert failure.message == (
            f"packax_backward_v1: workspace has {elements} elements, expected {size} for "
            f'algorithm "{algorithm}"'
        )


def test_without_room_for_the_kernels_columns_no_kernel_sums_dq(separate):
    """The sum of dQ has the kernels' columns. If the workspace has fewer, other kernels run."""
    dims = separate.variant["qk_dim"] - 8, separate.variant["v_dim"] - 16
    call = backward(separate, S, dims, columns=dims[0] + 8)
    assert kernels_of(separate, call)[1] == "backward_sm90"
    assert "backward_sm90" not in kernels_of(separate, backward(separate, S, dims))
    call.results["dk"] = Array("float16", (0,))
    failure = separate.run(call)
    assert failure.code == "InvalidArgument" and "dk is float16[0], expected" in failure.message


def test_a_workspace_with_uneven_sums_of_a_bias_gradient(machine):
    call = backward(machine, Sizes(kv_len=704), bias=6, algorithm="sm90_separate", parts=2)
    (size,) = call.results["workspace"].shape
    uneven = call.change(workspace=Array("float32", (size - 1,)))
    assert "workspace has" in machine.run(uneven).message


# --- Grids: the error comes before anything is launched


def refused_grid(machine, call, stage, *words):
    failure = machine.run(call, stage)
    assert failure.code == "InvalidArgument"
    assert all(word in failure.message for word in words), failure.message
    assert machine.record() == []


@stages
def test_grid_too_large(machine, stage):
    name = machine.row("documents_init")["name"]
    refused_grid(
        machine, documents(machine, Sizes(batch=70000, mask_batch=70000)), stage,
        f"packax_documents_v1: {name} would need a grid of (1, 70000), a GPU takes (2147483647, "
        "65535) at most; split the batch",
    )  # fmt: skip
    s = Sizes(batch=1, mask_batch=1, q_len=1 << 29, heads=1 << 16, kv_heads=1)
    call = backward(machine, s, algorithm="portable")
    block = machine.row("backward_delta")["block"]
    refused_grid(machine, call, stage, f"would need a grid of ({2**45 // block}, 1)")
    call = backward(machine, replace(s, batch=1 << 30))
    call = call.change(workspace=Array("float32", (1 << 62,)))
    # sizes saturate instead of wrapping around
    text = f"has {2**62} elements, expected {2**63 - 1} for algorithm"
    refused_grid(machine, call, stage, text)
    s = Sizes(batch=(1 << 31) - 1, q_len=2, heads=1, kv_heads=1)
    call = decode(machine, s, room=1)
    refused_grid(machine, call, stage, f"would need a grid of ({2**32 - 2}, 1)")


@stages
@pytest.mark.parametrize("options", [{}, EVERY | {"blocks": None}], ids=str)
@pytest.mark.parametrize("algorithm", ["sm90_fused", "sm90_separate", "portable"])
def test_a_later_kernel_with_too_large_a_grid(separate, stage, algorithm, options):
    """That for dK and dV, so that the first kernel is not launched either."""
    s = replace(ONE, batch=1 << 10, kv_len=1 << 29)
    call = backward(separate, s, algorithm=algorithm, **options)
    kernel = "backward_dkdv" if options or algorithm != "sm90_fused" else "backward_sm90_"
    refused_grid(separate, call, stage, kernel, "would need a grid of (")
