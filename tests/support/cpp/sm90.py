"""The launches that tests expect of a handler on Hopper: tensor maps, the counter, the sections of
the workspace."""

from math import ceil, prod

from cpp.calls import Array
from cpp.launches import attention, expect_launches
from cpp.machine import MULTIPROCESSORS, POINTERS, SHORT_KEYS

MAP_TYPES = {"int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType


def expected_map(array, box, bit21=0):
    """The map over a (batch, length, heads, dim) array, or (batch, length, dim) with one head.
    Sizes, strides and boxes start with the innermost axis."""
    rows, columns, swizzle = box
    batch, length, *heads, dim = array.shape
    (heads,) = heads or (1,)
    width, size = heads * dim, 4 if array.dtype in ("int32", "float32") else 2
    return {
        "address": array.address,
        "bit21": int(batch * length * width * size - size + 1 >= 128 * 1024) or bit21,
        "sizes": [dim, length, heads, batch],
        "byte_strides": [size * width, size * dim, size * width * length],
        "box": [columns, rows, 1, 1],
        "steps": [1, 1, 1, 1],
        "type": MAP_TYPES[array.dtype],
        "interleave": 0,
        "swizzle": swizzle,
        "promotion": 2,
        "fill": 0,
        "shape": [batch, heads, length, dim],
        "strides": [width * length, dim, width, 1],
    }


def sm90_maps(machine, call, **more):
    return maps_of(machine, "forward_sm90", {**call.operands, **call.results}, **more)


def clears(machine, call, s):
    """What is recorded before the launch of a persistent forward kernel."""
    clear = {"memset": [call.results["counter"].address, 0, 1], "stream": machine.xla.stream}
    return [] if s.kv_len <= SHORT_KEYS else [clear]


def expect_forward(machine, s, call, kernel, block, **more):
    """Expects one launch of `kernel`, with tiles of `block` rows in the matching order, after the
    counter is cleared, which calls of few keys do not use. The call has scale 0.375 and mask_mode
    1."""
    assert machine.row(kernel, machine.variant["cc"])["block"] == block
    order = {128: "q_order", 192: "q_order_192"}[block]
    arrays = {**call.operands, **call.results, **more.pop("arrays", {})}
    more |= {"q_order": call.operands[order].address, **maps_of(machine, kernel, arrays)}
    more |= {"counter": 0} if s.kv_len <= SHORT_KEYS else {}
    parts = ceil(machine.variant["v_dim"] / 256)
    tiles = s.heads * s.batch * ceil(s.q_len / block) * parts
    grids = {kernel: lambda m: [min(MULTIPROCESSORS, tiles)]}
    expect_launches(machine, call, more | attention(s, 0.375, 1), grids)
    assert machine.record()[:-1] == clears(machine, call, s)
    assert machine.calls("cuLibraryLoadData") == 1  # not the fallback kernel


def expect_one_backward(machine, s, call, kernel, has_dlse, **more):
    """Expects one kernel for all three gradients, between the preprocess and postprocess kernels.
    The workspace ends with the sum of dQ."""
    sections, end = sm90_sections(machine, s, call.results["workspace"].address)
    assert end == call.results["workspace"].address + 4 * call.results["workspace"].shape[0]
    rows = prod(sections["delta"].shape)
    grids = {
        "backward_preprocess": lambda r: [rows // r],
        kernel: lambda n: [s.kv_heads * s.batch * ceil(s.kv_len / n)],
        "backward_postprocess": lambda r: [rows // r],
    }
    pointers = {name: array.address for name, array in sections.items()}
    scalars = attention(s, 0.375, 1, has_dlse) | {"clear_dq": 1, **more}
    values = {name: {**scalars, **pointers} for name in grids}
    arrays = {**call.operands, **call.results, **sections}
    values[kernel] |= maps_of(machine, kernel, arrays)
    expect_launches(machine, call, values, grids)
    assert machine.calls("cuLibraryLoadData") == 3


def expect_separate_backward(machine, s, call, needs_grad, option="", mask_mode=1, **more):
    """Expects a kernel for dK and dV and one for dQ, if they are needed. Only the counter is
    cleared, which replaces the sum of dQ in the workspace. A program takes a tile of 128 keys or
    half of one, including the half past the last key."""
    sections, _ = sm90_sections(machine, s, call.results["workspace"].address)
    counter, rows = sections["dq_sum"].address, prod(sections["delta"].shape)
    keys, heads = s.kv_heads * s.batch * ceil(s.kv_len / 128), s.heads * s.batch
    grids = {"backward_preprocess": lambda r: [rows // r]}
    if needs_grad & 2:
        grids[f"backward_dkdv_sm90{option}"] = lambda n: [keys * (128 // n)]
    if needs_grad & 1:
        dq = f"backward_dq_sm90{option}"
        grids[dq] = lambda m: [min(MULTIPROCESSORS, heads * ceil(s.q_len / m))]
    scalars = attention(s, 0.375, mask_mode, 1) | {"clear_dq": 0, "counter": counter, **more}
    pointers = {name: array.address for name, array in sections.items()}
    arrays = {**call.operands, **call.results, **sections}
    values = {name: {**scalars, **pointers} for name in grids}
    for kernel in grids.keys() - {"backward_preprocess"}:
        values[kernel] |= maps_of(machine, kernel, arrays)
    expect_launches(machine, call, values, grids)
    clear = {"memset": [counter, 0, 1], "stream": machine.xla.stream}
    record = machine.record()
    assert record.count(clear) == (needs_grad & 1) == len(record) - len(grids)
    assert not needs_grad & 1 or record[-2] == clear
    assert machine.calls("cuLibraryLoadData") == 3  # not the portable kernels


def sm90_sections(machine, s, start, with_bias=False):
    """(name -> section of the workspace as a tensor map sees it, address after the last section),
    as in docs/internals/ffi.md."""
    padded = 64 * ceil(s.q_len / 64)
    rows, dim = s.batch * s.heads * padded, machine.variant["qk_dim"]
    sections = {
        "delta": ("float32", (1, 1, rows)),
        "lse2": ("float32", (1, 1, rows)),
        "lo": ("int32", (1, 1, s.mask_batch * padded)),
        "hi": ("int32", (1, 1, s.mask_batch * padded)),
        **({"top": ("float32", (1, 1, rows))} if with_bias else {}),
        "dq_sum": ("float32", (1, 1, rows * dim)),
    }
    arrays = {}
    for name, (dtype, shape) in sections.items():
        arrays[name] = Array(dtype, shape, start)
        assert (start - 0x90300) % 256 == 0
        start += 4 * prod(shape)
    return arrays, start


def maps_of(machine, kernel, arrays, **more):
    row = machine.row(kernel, machine.variant["cc"])
    names = [n.partition(":")[0] for n in POINTERS[kernel].split() if ":t" in n]
    return {
        name: expected_map(arrays[name], box, **more)
        for name, box in zip(names, row["tensor_maps"], strict=True)
    }
