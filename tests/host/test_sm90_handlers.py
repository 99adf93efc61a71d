"""Forward and backward on Hopper: tensor maps, the counter, the workspace, which kernels run.

Guards against a tensor map over the wrong tensor or with the wrong box, a counter that is not
cleared, and a workspace section in the wrong place. Runs on a fake libcuda (tests/support/cpp):
needs the built extension and a C compiler.
"""

from dataclasses import replace
from math import ceil, prod

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import Array, Sizes, backward, forward, forward_alibi, of_head_group
from cpp.launches import SIZES, attention, expect_launches, expect_portable_backward, kernels_of
from cpp.machine import (
    DRIVER,
    KERNELS,
    MULTIPROCESSORS,
    SHORT_KEYS,
    arguments,
    make_machine,
    needs_compiler,
    needs_extension,
)
from cpp.sm90 import (
    clears,
    expect_forward,
    expect_one_backward,
    expect_separate_backward,
    maps_of,
    sm90_maps,
    sm90_sections,
)

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]


@pytest.mark.parametrize("qk_dim", [64, 128])
@pytest.mark.parametrize("s", SIZES)
def test_forward_on_sm90(tmp_path, driver, s, qk_dim):
    """query, key, value and out are tensor maps; the order matches the tile size."""
    machine = make_machine(
        tmp_path, driver, choose=lambda m: m.has_sm90() and m.variant["qk_dim"] == qk_dim
    )
    kernel = machine.forward_of(s)
    row = machine.row(kernel, machine.variant["cc"])
    assert all(box[1:] == (64, 3) for box in row["tensor_maps"])  # 128 bytes of columns
    call = forward(machine, s, scale=0.0625, mask_mode=1)
    order = {64: "q_order", 128: "q_order", 192: "q_order_192"}[row["block"]]
    maps = maps_of(machine, kernel, {**call.operands, **call.results})
    more = {"q_order": call.operands[order].address, **maps}
    more |= {"counter": 0} if s.kv_len <= SHORT_KEYS else {}
    programs = MULTIPROCESSORS * (3 if row["block"] == 64 else 1)
    grids = {kernel: lambda m: [min(programs, s.heads * s.batch * ceil(s.q_len / m))]}
    expect_launches(machine, call, {**attention(s, 0.0625, 1), **more}, grids)
    assert machine.record()[:-1] == clears(machine, call, s)
    sizes = {x: getattr(s, x) for x in ("batch", "q_len", "kv_len", "heads", "kv_heads")}
    sizes |= {x: machine.variant[x] for x in ("dtype", "qk_dim", "v_dim")}
    told = machine.ext.select("forward", 90, MULTIPROCESSORS, {**sizes, "scale": 0.0625}, DRIVER)
    assert [name for name, _ in told] == [kernel]  # what `explain` says


@pytest.mark.parametrize("qk_dim,block", [(64, 192), (128, 128), (192, 128), (256, 128)])
@pytest.mark.parametrize("s", SIZES)
def test_forward_with_largest_logits(tmp_path, driver, s, qk_dim, block):
    machine = make_machine(
        tmp_path,
        driver,
        choose=lambda m: m.has("forward_max_logits") and m.variant["qk_dim"] == qk_dim,
    )
    call = forward_alibi(machine, s, (0, 0), needs_row_max=1)  # without slopes
    call = call.change(scale=("float32", 0.375), mask_mode=("int32", 1))
    row_max = call.addresses()["row_max"]
    expect_forward(machine, s, call, "forward_sm90_max_logits", block, row_max=row_max)


def wide_machine(folder, driver, kernel):
    """A machine of compute capability 9.0 with head dim 512, if the build has this kernel."""

    def has_512(m):
        return m.ext.find(kernel, 90, m.variant["dtype"], 512, 512, DRIVER) is not None

    machine = make_machine(folder, driver, ccs=(90,), choose=has_512)
    machine.variant = {**machine.variant, "cc": 90, "qk_dim": 512, "v_dim": 512}
    return machine


@pytest.mark.parametrize("kernel", ["forward_sm90", "forward_sm90_max_logits"])
@pytest.mark.parametrize("s", SIZES)
def test_forward_of_head_dim_512(tmp_path, driver, s, kernel):
    """Each tile is computed twice, for half of the value columns each, so there are twice as many
    tiles. No portable kernel has this head dim."""

    machine = wide_machine(tmp_path, driver, kernel)
    largest = kernel.endswith("max_logits")
    call = forward_alibi(machine, s, (0, 0), needs_row_max=int(largest))  # without slopes
    call = call.change(scale=("float32", 0.375), mask_mode=("int32", 1))
    more = {"row_max": call.addresses()["row_max"]} if largest else {}
    expect_forward(machine, s, call, kernel, 128, **more)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("q_len", [1, 1536])
def test_forward_of_few_tiles(tmp_path, driver, q_len, dtype):
    """Tiles of 128 rows, at head dim 64 with fewer tiles of 192 rows than multiprocessors. A call
    for some heads uses the same kernel as a call for all."""

    def choose(m):
        return m.has("forward_low_occupancy") and m.variant["dtype"] == dtype

    machine = make_machine(tmp_path, driver, choose=choose)
    assert machine.row("forward_sm90", machine.variant["cc"])["block"] == 192
    assert machine.row("forward_sm90_low_occupancy", machine.variant["cc"])["block"] == 128
    heads = (MULTIPROCESSORS - 1) // ceil(q_len / 192)
    s = Sizes(batch=1, mask_batch=1, q_len=q_len, kv_len=1100, heads=heads, kv_heads=1)
    few = forward(machine, s)
    few_rows = "forward_sm90_low_occupancy"
    for call in (few, of_head_group(few, 0, heads, 0)):
        assert kernels_of(machine, call) == [few_rows]
    every = replace(s, batch=MULTIPROCESSORS)
    # Tiles of 192 rows would round 256 up to 384. They round 512 up to 576, an eighth more.
    for rows, kernel in {
        1: few_rows,
        256: few_rows,
        384: "forward_sm90",
        512: "forward_sm90",
    }.items():
        assert kernels_of(machine, forward(machine, replace(every, q_len=rows))) == [kernel]
    if q_len == 1:
        return
    more = forward(machine, replace(s, heads=heads + 1)).change(row_keys=("int32", 1025))
    for call in (more, of_head_group(few, 1, heads + 1, 0)):
        assert kernels_of(machine, call) == ["forward_sm90"]
    if machine.has("forward_short"):  # each row attends to few of the keys
        for call in (few, more):
            call = call.change(row_keys=("int32", 1024))
            assert kernels_of(machine, call) == ["forward_sm90_short"]


def test_more_tiles_than_the_counter_counts(sm90):
    """Each program increments the counter once after the last tile, which must not overflow."""
    block = sm90.row("forward_sm90", sm90.variant["cc"])["block"]
    most = 2**31 - 1 - 4096
    s = Sizes(batch=1, mask_batch=1, q_len=block, kv_len=SHORT_KEYS + 1, heads=1, kv_heads=1)
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
    assert sm90.run(forward(sm90)) is None  # few keys: nothing to clear
    assert sm90.run(forward(sm90, Sizes(kv_len=SHORT_KEYS))) is None
    failure = sm90.run(forward(sm90, Sizes(kv_len=SHORT_KEYS + 1)))
    assert failure.code == "Internal"
    assert failure.message == (
        "packax_forward_v1: cuMemsetD32Async failed: CUDA_ERROR_INVALID_VALUE (invalid argument), "
        "device 0"
    )
    assert len(sm90.launches()) == 2


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
    call = forward(sm90, Sizes(batch=1, mask_batch=1, q_len=64, kv_len=64, heads=1, kv_heads=1))
    assert sm90.run(call) is None
    (launch,) = sm90.launches()
    assert launch["params"][:4] == list(sm90_maps(sm90, call, bit21=bit21).values())
    assert launch["params"][0]["bit21"] == bit21


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_edge_of_small_tensors(sm90, more):
    """128 KiB, and a row less or more."""
    kv_len = 128 * 1024 // (2 * sm90.variant["qk_dim"]) + more
    s = Sizes(batch=1, mask_batch=1, kv_len=kv_len, heads=1, kv_heads=1)
    call = forward(sm90, s)
    assert sm90.run(call) is None
    (launch,) = sm90.launches()
    assert launch["params"][1] == sm90_maps(sm90, call)["key"]
    assert launch["params"][1]["bit21"] == (more > 0)


def map_text(machine, name, array):
    boxes = machine.row("forward_sm90", machine.variant["cc"])["tensor_maps"]
    rows, columns, swizzle = boxes[("query", "key", "value", "out").index(name)]
    batch, length, heads, dim = array.shape
    return (
        f"tensor map of {name}, {array.dtype}[{batch}, {heads}, {length}, {dim}] in boxes of "
        f"{rows} x {columns}, swizzle {swizzle}"
    )


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
def test_map_of_a_misaligned_buffer(sm90, name):
    call = forward(sm90)
    group = call.results if name == "out" else call.operands
    group[name] = replace(group[name], address=0x12348)
    failure = sm90.run(call)
    kernel = sm90.row(sm90.forward_of(Sizes()), sm90.variant["cc"])["name"]
    assert failure.code == "InvalidArgument"
    assert failure.message == (
        f"packax_forward_v1: {map_text(sm90, name, group[name])}: "
        f"address 0x12348 is no multiple of 16; {kernel}"
    )
    assert sm90.launches() == []


@pytest.mark.parametrize(
    ("sizes", "name", "why"),
    [
        (
            {"q_len": 1 << 29, "heads": 16},
            "query",
            "one row of the batch has 2^40 bytes or more",
        ),
        (
            {"kv_len": 1 << 29, "heads": 1 << 16, "kv_heads": 1 << 16, "q_len": 1},
            "key",
            "one row of the batch has 2^40 bytes or more",
        ),
    ],
)
def test_map_over_the_limits(sm90, sizes, name, why):
    s = Sizes(**{"batch": 1, "mask_batch": 1, "kv_heads": 1, **sizes})
    call = forward(sm90, s)
    failure = sm90.run(call)
    kernel = sm90.row(sm90.forward_of(s), sm90.variant["cc"])["name"]
    assert failure.code == "InvalidArgument"
    assert failure.message == (
        f"packax_forward_v1: {map_text(sm90, name, call.operands[name])}: {why}; {kernel}"
    )


def test_map_that_the_driver_refuses(sm90):
    sm90.fail("cuTensorMapEncodeTiled", 1)
    call = forward(sm90)
    failure = sm90.run(call)
    row = sm90.row(sm90.forward_of(Sizes()), sm90.variant["cc"])
    assert failure.code == "Internal"
    assert failure.message == (
        "packax_forward_v1: cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE (invalid "
        f"argument); {map_text(sm90, 'query', call.operands['query'])}, address 0x10000; "
        f"{row['name']} (cubin for {row['arch']}) on device 0, Fake GPU 0 "
        f"(compute capability {row['cc'] // 10}.{row['cc'] % 10})"
    )
    assert sm90.launches() == []
    sm90.fail("cuTensorMapEncodeTiled", 0)
    assert sm90.run(call) is None


@pytest.mark.parametrize("qk_dim", [64, 128])
@pytest.mark.parametrize("has_dlse", [0, 1])
@pytest.mark.parametrize("s", SIZES)
def test_backward_on_sm90(tmp_path, driver, s, has_dlse, qk_dim):
    """The sections of the workspace, as pointers and as tensor maps; the sum of dQ is the last."""
    machine = make_machine(
        tmp_path, driver, choose=lambda m: m.has_sm90() and m.variant["qk_dim"] == qk_dim
    )
    call = backward(machine, s, scale=0.375, mask_mode=1, has_dlse=has_dlse)
    sections, _ = sm90_sections(machine, s, call.results["workspace"].address)
    maps = maps_of(machine, "backward_sm90", {**call.operands, **call.results, **sections})
    assert "dq_sum" not in maps
    for name in sections.keys() - {"dq_sum"}:
        assert maps[name]["box"] + [maps[name]["swizzle"]] == [64, 1, 1, 1, 0]
    expect_one_backward(machine, s, call, "backward_sm90", has_dlse)


@pytest.mark.parametrize("needs_grad", [0, 1, 2, 3])
@pytest.mark.parametrize("qk_dim,block", [(64, 128), (128, 128), (192, 128), (256, 64)])
@pytest.mark.parametrize("s", SIZES)
def test_backward_apart_on_sm90(tmp_path, driver, s, qk_dim, block, needs_grad):
    machine = make_machine(
        tmp_path, driver, choose=lambda m: m.has_separate() and m.variant["qk_dim"] == qk_dim
    )
    call = backward(
        machine, s, scale=0.375, mask_mode=3, algorithm="sm90_separate", needs_grad=needs_grad
    )
    workspace = call.results["workspace"]
    sections, _ = sm90_sections(machine, s, workspace.address)
    assert sections["dq_sum"].address + 4 == workspace.address + 4 * workspace.shape[0]
    assert machine.row("backward_dkdv_sm90", machine.variant["cc"])["block"] == block
    expect_separate_backward(machine, s, call, needs_grad, mask_mode=3)


@pytest.mark.parametrize("algorithm", ["sm90_separate", "sm90_fused"])
@pytest.mark.parametrize("needs_grad", [0, 1, 2, 3])
@pytest.mark.parametrize("s", SIZES)
def test_backward_of_head_dim_512(tmp_path, driver, s, needs_grad, algorithm):
    """Two programs per 64 keys, one for each half of the columns of dK and dV. Programs of dQ take
    half a tile, including the half past the last row, and use no counter. The operands over which
    dK and dV loop have boxes of 32 rows."""
    machine = wide_machine(tmp_path, driver, "backward_dkdv_sm90_parts")
    call = backward(
        machine, s, scale=0.375, mask_mode=3, algorithm=algorithm, needs_grad=needs_grad
    )
    sections, _ = sm90_sections(machine, s, call.results["workspace"].address)
    rows = prod(sections["delta"].shape)
    keys, tiles = 2 * ceil(s.kv_len / 128), 2 * ceil(s.q_len / 128)  # of 64
    grids = {
        "backward_preprocess": lambda r: [rows // r],
        "backward_dkdv_sm90_parts": lambda n: [s.kv_heads * s.batch * keys * 2 * (64 // n)],
        "backward_dq_sm90_parts": lambda m: [s.heads * s.batch * tiles * (64 // m)],
    }
    for kernel, bit in (("backward_dq_sm90_parts", 1), ("backward_dkdv_sm90_parts", 2)):
        if not needs_grad & bit:
            del grids[kernel]
    pointers = {name: array.address for name, array in sections.items()}
    scalars = attention(s, 0.375, 3, 1) | {"clear_dq": 0}
    values = {name: {**scalars, **pointers} for name in grids}
    arrays = {**call.operands, **call.results, **sections}
    for kernel in grids.keys() - {"backward_preprocess"}:
        values[kernel] |= maps_of(machine, kernel, arrays)
    if needs_grad & 2:
        maps = values["backward_dkdv_sm90_parts"]
        assert [maps[name]["box"][1] for name in ("query", "key", "value", "dout")] == [
            32,
            64,
            64,
            32,
        ]
        assert [maps[name]["box"][0] for name in ("lse2", "delta", "lo", "hi")] == [32] * 4
    expect_launches(machine, call, values, grids)
    assert len(machine.record()) == len(grids)  # nothing is cleared
    assert machine.calls("cuLibraryLoadData") == 3


def test_the_algorithm_says_which_kernels(tmp_path, driver):
    """The workspace must have exactly the size of the algorithm."""
    sm90 = make_machine(tmp_path, driver, choose=lambda m: m.has_separate())
    s = Sizes()
    for algorithm, kernels in (
        ("sm90_fused", sm90.kernels("backward")),
        ("sm90_separate", sm90.kernels("backward_separate")),
        ("portable", KERNELS["backward"]),
    ):
        call = backward(sm90, s, algorithm=algorithm)
        assert kernels_of(sm90, call) == kernels
        (size,) = call.results["workspace"].shape
        for elements in (size - 1, size + 1):
            failure = sm90.run(call.change(workspace=Array("float32", (elements,))))
            assert failure.code == "InvalidArgument"
            assert failure.message == (
                f"packax_backward_v1: workspace has {elements} elements, expected {size} for "
                f'algorithm "{algorithm}"'
            )


@pytest.mark.parametrize("qk_dim", [64, 128, 192, 256])
def test_a_workspace_for_any_kernels(tmp_path, driver, qk_dim):
    """The fused kernel if the build has it; otherwise the separate kernels, which need less
    workspace."""
    sm90 = make_machine(
        tmp_path, driver, choose=lambda m: m.has_sm90() and m.variant["qk_dim"] == qk_dim
    )
    v = sm90.variant
    one = sm90.ext.find("backward_sm90", v["cc"], v["dtype"], v["qk_dim"], v["v_dim"])
    assert sm90.run(backward(sm90)) is None
    expected = sm90.kernels("backward" if one is not None else "backward_separate")
    assert [r["kernel"] for r in sm90.launches()] == expected


@pytest.mark.parametrize("past", [False, True])
def test_the_limit_of_32_bits_on_sm90(sm90, past):
    """The rows of all heads are limited; the sum of dQ may have more elements than 2^31."""
    batch = 2**31 // 64 - (0 if past else 1)  # of one block of 64 rows
    s = Sizes(batch=batch, mask_batch=1, q_len=64, kv_len=64, heads=1, kv_heads=1)
    call = backward(sm90, s)
    if past:
        expect_portable_backward(sm90, call, s)
        return
    assert sm90.run(call) is None
    assert [r["kernel"] for r in sm90.launches()] == sm90.kernels("backward")


@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "dk", "dv", "workspace"])
def test_a_misaligned_buffer_of_the_backward(sm90, name):
    """The error comes before any launch. For the workspace, it names the first mapped section."""
    call = backward(sm90)
    group = call.operands if name in call.operands else call.results
    group[name] = replace(group[name], address=0x12348)
    failure = sm90.run(call)
    assert failure.code == "InvalidArgument"
    said = {"workspace": "lse2, float32[1, 1, "}.get(name, f"{name}, {group[name].dtype}[2, ")
    assert failure.message.startswith(f"packax_backward_v1: tensor map of {said}")
    assert "is no multiple of 16; backward_sm90_" in failure.message
    assert sm90.launches() == []


@pytest.mark.parametrize("needs_grad", [1, 2])
def test_backward_of_some_on_sm90(sm90, needs_grad):
    """The fused kernel always writes dk and dv; only dq needs a postprocess kernel."""
    call = backward(sm90, needs_grad=needs_grad)
    assert sm90.run(call) is None
    kernels = [launch["kernel"] for launch in sm90.launches()]
    finish = ["backward_postprocess"] if needs_grad & 1 else []
    assert kernels == ["backward_preprocess", "backward_sm90", *finish]
    call.results["dk"] = Array("float16", (0,))
    failure = sm90.run(call)
    assert failure.code == "InvalidArgument" and "dk is float16[0], expected" in failure.message


def of_fewer_columns(call):
    """The call with 8 columns of query and key, and 16 of value, fewer."""
    values = ("value", "out", "dout", "dv")

    def narrower(name, a):
        return replace(a, shape=(*a.shape[:-1], a.shape[-1] - (16 if name in values else 8)))

    changed = {
        name: narrower(name, a)
        for name, a in {**call.operands, **call.results}.items()
        if name in ("query", "key", "dq", "dk", *values) and len(a.shape) == 4
    }
    return call.change(**changed)


def test_forward_of_fewer_columns(sm90):
    """Tensor maps end at the call's last column."""
    call = of_fewer_columns(forward(sm90))
    assert kernels_of(sm90, call) == [sm90.forward_of(Sizes())]
    (launch,) = sm90.launches()
    maps = maps_of(sm90, launch["kernel"], {**call.operands, **call.results})
    assert launch["params"][:4] == list(maps.values())
    dim = sm90.variant["qk_dim"]
    assert [x["sizes"][0] for x in launch["params"][:4]] == [dim - 8, dim - 8, *[dim - 16] * 2]


def test_backward_of_fewer_columns(sm90):
    """The sum of dQ has the kernels' columns. If the workspace has fewer, no kernel sums."""
    whole = backward(sm90)
    call = of_fewer_columns(whole)
    assert kernels_of(sm90, whole) == kernels_of(sm90, call) == sm90.kernels("backward")
    launches = {x["kernel"]: x["params"] for x in sm90.launches()}
    dim = sm90.variant["qk_dim"]
    for kernel, columns in (("backward_preprocess", 16), ("backward_postprocess", 8)):
        assert launches[kernel][len(arguments(kernel)) - 1] == dim - columns
    elements = call.results["workspace"].shape[0]
    s = Sizes()
    rows = s.batch * s.heads * 64 * ceil(s.q_len / 64)
    narrow = call.change(workspace=Array("float32", (elements - 8 * rows,)))
    assert "backward_sm90" not in kernels_of(sm90, narrow)
