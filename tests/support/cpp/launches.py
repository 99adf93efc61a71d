"""The launches that tests expect of a handler: grids and every argument, from the call itself."""

import functools
from dataclasses import replace
from math import ceil, prod

import numpy as np
from aot_modules import ALL
from cpp.call_frame import EXECUTE, INITIALIZE, Array
from cpp.machine import DRIVER, signature
from kernel_sets import MULTIPROCESSORS, forward_programs, forward_tiles, grid_of

SHORT_KEYS = 1024  # kShortKeys, kShortRowKeys in csrc/launch/select_attention.cc
COUNTED_KEYS = 512  # kCountedKeys
MAP_TYPES = {"int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
OF_ROWS = ("query", "out", "dout", "dq")  # arrays with the heads of the query


def kernels_of(machine, call):
    """The names of the kernels that `call` launches, in order."""
    machine.cuda.fake_clear()
    failure = machine.run(call)
    assert failure is None, failure
    return [launch["kernel"] for launch in machine.launches()]


def fields(call):
    """The scalars of csrc/call/operands.h, read from the buffers and attributes of a call."""
    arrays = call.arrays()
    f = {name: value for name, (_, value) in call.attributes.items()}

    def size(name, axis=0):
        shape = arrays[name].shape if name in arrays else (0,)
        return shape[axis] if shape != (0,) else 0

    if "query" not in arrays:
        f["batch"], f["q_len"] = arrays["q_ids" if "q_ids" in arrays else "kv_start"].shape
        f.setdefault("kv_len", size("kv_ids", 1))
        return f
    f["batch"], f["q_len"], f["row_heads"], f["qk_dim"] = arrays["query"].shape
    f["kv_len"], f["kv_heads"], f["v_dim"] = arrays["value"].shape[1:]
    f["mask_batch"] = size("kv_start")
    f["heads"] = f["heads"] or f["row_heads"]
    f["bias_of_indices"] = bool(f["bias_of_indices"])
    short = {"bfloat16": "bf16", "float16": "f16"}
    f["dtype"] = short.get(arrays["query"].dtype, "f32" if f["float32_products"] else "tf32")
    for name, of in (
        *(("scales_batch", "scales"), ("bias_batch", "slopes"), ("sink_batch", "sinks")),
        ("block_mask_batch", "block_mask"),
    ):
        f[name] = size(of)
    f["block_mask_heads"] = size("block_mask", 1)
    for name in ("block_mask_batch", "q_block", "kv_block"):
        f[name] = f[name] or 1
    f["dropout_rows_batch"] = size("dropout_rows") or 1
    f["inverse_keep"] = 1 / (1 - f["dropout_threshold"] / 2**32)
    f["dropout_threshold"] = int(np.uint32(f["dropout_threshold"]).view(np.int32))
    f["bias_kind"] = f["bias_axes"] = 0
    if size("bias"):
        f["bias_kind"] = 2 if arrays["bias"].dtype == "float32" else 1
        own = sum((n > 1) << axis for axis, n in enumerate(arrays["bias"].shape[:3]))
        f["bias_axes"] = own | f["batch"] // size("bias") << 3
    f["row_stats"] = size("row_max") > 0 or size("score_grads") > 0
    f["has_score_grads"], f["has_dlse"] = int(size("score_grads") > 0), int(size("dlse") > 0)
    if "needs_grad" in f:
        f["needs_dq"] = bool(f["needs_grad"] & 1) or f["row_stats"]
        f["needs_dkv"], f["needs_dbias"] = bool(f["needs_grad"] & 2), size("dbias") > 0
    return f | {f"has_{n}": int(size(n) > 0) for n in ("tq", "tk", "tv")}


def sections(call, columns):
    """The sections of the workspace of a backward that has more than delta, as arrays, as in
    docs/internals/ffi.md. `columns`: of the sum of dQ."""
    f, start = fields(call), call.results["workspace"].address
    padded = 64 * ceil(f["q_len"] / 64)
    rows, mask_rows = f["batch"] * f["heads"] * padded, f["mask_batch"] * padded
    sizes = {"delta": rows, "lse2": rows, "lo": mask_rows, "hi": mask_rows}
    sizes |= {"top": rows} if f["bias_kind"] else {}
    found = {}
    for name, n in sizes.items():
        dtype = "int32" if name in ("lo", "hi") else "float32"
        found[name] = Array(dtype, (1, 1, n), start)
        start += 4 * n
    found["dq_sum"] = Array("float32", (1, 1, rows * columns), start)
    found["dbias_sums"] = Array("float32", (0,), start + 4 * 64)
    return found


def expected_map(array, box, row_heads=0, bit21=0):
    """The map over a (batch, length, heads, dim) array, or (batch, length, dim) with one head.
    Sizes, strides and boxes start with the innermost axis. `row_heads`: the heads of a row."""
    rows, columns, swizzle = box
    batch, length, *heads, dim = array.shape
    (heads,) = heads or (1,)
    width, size = (row_heads or heads) * dim, 4 if array.dtype in ("int32", "float32") else 2
    last = size * ((batch * length - 1) * width + heads * dim - 1)
    return {
        "address": array.address,
        "bit21": int(last + 1 >= 128 * 1024) or bit21,
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


def maps_of(machine, kernel, arrays, row_heads=0, **more):
    """The tensor maps among the kernel's arguments."""
    names = [name for name, kind in signature(kernel).items() if kind == "tma"]
    boxes = machine.row(kernel)["tensor_maps"]
    heads = {name: row_heads if name in OF_ROWS else 0 for name in names}
    return {
        name: expected_map(arrays[name], box, heads[name], **more)
        for name, box in zip(names, boxes, strict=True)
    }


def attention_values(machine, call, kernels):
    """Argument -> value for all kernels of a call of attention, its arrays, and the fields."""
    f, arrays = fields(call), call.arrays()
    sums_dq = any(k.startswith(("backward_sm90", "backward_sm80")) for k in kernels)
    # one program has all keys of a head
    copies_dq = "backward_sm90_pairs" in kernels or (
        "backward_sm90" in kernels and f["kv_len"] <= 128
    )
    values = f | {"clear_dq": 2 if copies_dq else int(sums_dq)}
    arrays["delta"] = arrays.get("workspace")
    if kernels[0].startswith("backward_preprocess"):
        arrays |= sections(call, machine.variant["qk_dim"])
        elements = arrays["workspace"].shape[0]
        if f["needs_dbias"]:
            f["dbias"] = arrays["dbias"].shape
            begin = (arrays["dbias_sums"].address - arrays["workspace"].address) // 4
            f["dbias_parts"] = values["dbias_parts"] = (elements - begin) // prod(f["dbias"])
        values["counter"] = arrays["dq_sum"].address
    elif "dbias" in arrays:
        f["dbias"] = arrays["dbias"].shape
    if "bias" in arrays and not f["bias_kind"]:
        values["bias"] = 0
    for name in OF_ROWS:  # begin at the first head of the call
        if name in arrays and arrays[name].shape != (0,):
            batch, length, _, dim = arrays[name].shape
            skipped = f["first_head"] * dim * (4 if arrays[name].dtype == "float32" else 2)
            address = arrays[name].address + skipped
            arrays[name] = Array(arrays[name].dtype, (batch, length, f["heads"], dim), address)
    for name in ("bias", "dbias"):
        if name in arrays and arrays[name].shape != (0,):
            a = arrays[name]
            arrays[name] = replace(a, shape=(a.shape[0] * a.shape[1], *a.shape[2:]))
    addresses = {name: a.address for name, a in arrays.items() if a is not None}
    values = addresses | values
    for name in ("row_max", "row_delta"):  # the kernel writes it only if it has an address
        if name in arrays and arrays[name].shape == (0,):
            values[name] = 0
    few = f["kv_len"] <= SHORT_KEYS or 0 < f.get("row_keys", 0) <= SHORT_KEYS
    plain = kernels == ["forward_sm90"]
    turns = few and not (plain and f["qk_dim"] > 64 and f["kv_len"] <= COUNTED_KEYS)
    if kernels[0].startswith("forward_sm90"):  # a tile for each program
        tiles = forward_tiles(f, machine.row(kernels[0])["block"])
        turns |= tiles <= forward_programs(kernels[0])
    if "counter" in arrays and turns:
        values["counter"] = 0
    return values | {"q_order_192": 0, "choice": 0}, arrays, f


def rounded(x):
    """A float as the fake driver records a float32."""
    return float(f"{np.float32(x):.9g}") if isinstance(x, float) else x


def expect(machine, call, kernels, values=None, grids=None):
    """Runs both stages of `call` and checks that they launch exactly these kernels, in this order.

    `values`: arguments other than those of attention; `grids`: kernel -> grid by its block.
    Loading a kernel in the second stage fails. The machine's variant has the kernels' head dims."""
    machine.cuda.fake_clear()
    failure = machine.run(call, INITIALIZE)
    assert failure is None, failure
    assert machine.record() == []
    machine.fail("cuLibraryLoadData", 1)
    failure = machine.run(call, EXECUTE)
    machine.fail("cuLibraryLoadData", 0)
    assert failure is None, failure
    launches = machine.launches()
    assert [launch["kernel"] for launch in launches] == kernels
    arrays, f = call.arrays(), values or {}
    addresses = {name: a.address for name, a in arrays.items()}
    if values is None:
        values, arrays, f = attention_values(machine, call, kernels)
    wanted = []
    for launch, kernel in zip(launches, kernels, strict=True):
        row = machine.row(kernel)
        grid = grids[kernel](row["block"]) if grids else grid_of(kernel, f, row["block"])
        assert launch["grid"] == [*grid, 1, 1][:3], kernel
        assert launch["block"] == [row["threads"], 1, 1]
        assert launch["shared"] == row["shared"]
        assert launch["stream"] == machine.xla.stream
        own = addresses | values
        own |= maps_of(machine, kernel, arrays, f.get("row_heads", 0))
        if row["block"] == 192:  # the tile size determines the order
            own["q_order"] = addresses["q_order_192"]
        if kernels == ["forward_sm90_short", "forward_sm90"]:  # the mask's data chooses one
            own["choice"] = 1 + kernels.index(kernel)
        names = signature(kernel)
        got = dict(zip(names, launch["params"], strict=False))
        assert got == {name: rounded(own[name]) for name in names}, kernel
        assert launch["params"][len(names) :] == [0, 0]  # Triton's scratch pointers
        if "counter" in names and own["counter"]:
            wanted.append({"memset": [own["counter"], 0, 1], "stream": machine.xla.stream})
        wanted.append(launch)
    assert machine.record() == wanted  # a persistent kernel's counter is cleared before it


@functools.cache
def whole_table(cc):
    """The kernels of a full build that a GPU could load, for `select` and `judge`."""
    return [
        {"name": v.name, "kernel": v.kernel, "dtype": v.dtype, "qk_dim": v.qk_dim,
            "v_dim": v.v_dim, "cc": v.arch.cc, "arch_specific": v.arch.arch_specific,
            "shared": v.shared, "driver": v.driver}
        for v in ALL
        if v.arch.cc // 10 == cc // 10
    ]  # fmt: skip


def selected(ext, target, cc, call_fields, driver=DRIVER):
    """[(kernel, variant)] that a full build would run."""
    table = whole_table(cc)
    return ext.select(target, cc, MULTIPROCESSORS, call_fields, driver, table)
