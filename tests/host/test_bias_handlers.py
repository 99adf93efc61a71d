"""packax_forward_v1 and packax_backward_v1 with a bias array or dropout: kernels, grids, every
argument, errors.

Runs on a fake libcuda, as test_handlers.py.
"""

import struct
from math import ceil, prod

import pytest
from cpp.bias_calls import (
    ALL_AXES,
    THRESHOLD,
    backward_bias,
    bias_alone,
    forward_bias,
)
from cpp.call_frame import INITIALIZE
from cpp.calls import ABSENT, BLOCKS, Array, Sizes
from cpp.launches import attention, expect_launches, kernels_of
from cpp.machine import KERNELS, SM90, make_machine, needs_compiler, needs_extension
from cpp.sm90 import expect_forward, maps_of, sm90_sections

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]
MAKE = {"forward": forward_bias, "backward": backward_bias}


def as_float32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def described(s, axes):
    """The argument bias_axes: above the bits of the axes, the batch rows that share a bias."""
    return axes | (1 if axes & 1 else s.batch) << 3


def scalars_of(s, dims, kind=2, axes=ALL_AXES, threshold=THRESHOLD, rows_batch=1, blocks=BLOCKS):
    of_map = ("block_mask_batch", "block_mask_heads", "q_block", "kv_block")
    return {
        **attention(s, 0.125, 2, has_dlse=1),
        "soft_cap": 30.0, "has_score_grads": 1, "scales_batch": 1, "bias_batch": 1,
        **dict(zip(of_map, blocks, strict=True)),
        "qk_dim": dims[0], "v_dim": dims[1],
        "bias_kind": kind, "bias_axes": described(s, axes),
        "dropout_threshold": threshold - (1 << 32) * (threshold >= 1 << 31),
        "dropout_rows_batch": rows_batch,
        "inverse_keep": as_float32(1 / (1 - threshold / 2**32)),
    }  # fmt: skip


def has(kernel):
    return lambda m: m.ext.find(kernel, m.variant["cc"], m.variant["dtype"], 64, 64)


@pytest.fixture
def hopper(tmp_path, driver):
    """A machine with the kernels for calls whose only option is a bias (Hopper)."""
    return make_machine(tmp_path, driver, choose=has("forward_bias_alone"))


@pytest.fixture
def portable(tmp_path, driver):
    """A machine that has only the general bias kernels, with head dims that they support."""
    return make_machine(
        tmp_path,
        driver,
        choose=lambda m: (
            has("forward_bias")(m)
            and not has("forward_bias_alone")(m)
            and max(m.variant["qk_dim"], m.variant["v_dim"]) <= 256
        ),
    )


@pytest.fixture
def wide(tmp_path, driver):
    """A machine with bias kernels for head dims above 128."""
    return make_machine(
        tmp_path,
        driver,
        choose=lambda m: m.ext.find("forward_bias", m.variant["cc"], m.variant["dtype"], 256, 256),
    )


def grids_of(s, direction, axes=ALL_AXES, suffix=""):
    """The grids of calls in which a separate kernel computes the bias gradient."""

    def rows(m):
        return [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)]

    if direction == "forward":
        return {f"forward_bias{suffix}": rows}
    own = (n if axes >> bit & 1 else 1 for bit, n in enumerate((s.batch, s.heads, s.q_len)))
    batch, heads, of_rows = own
    return {
        "backward_delta_fallback": lambda r: [ceil(s.q_len / r) * s.heads * s.batch],
        f"backward_dkdv_bias{suffix}": lambda n: [
            s.kv_heads * s.batch * ceil(s.kv_len / 128) * (128 // n)
        ],
        f"backward_dq_bias{suffix}": rows,
        f"backward_dbias{suffix}": lambda b: [
            batch * heads * ceil(of_rows / b) * ceil(s.kv_len / b)
        ],
    }


def grids_of_alone(s, direction, axes=ALL_AXES):
    """The grids of the kernels for a bias as the only option."""
    grids = grids_of(s, direction, axes, "_alone")
    if direction == "backward" and axes == ALL_AXES:
        del grids["backward_dbias_alone"]
        grids["backward_dkdv_dbias_alone"] = grids.pop("backward_dkdv_bias_alone")
        grids["backward_dq_of_dbias_alone"] = grids.pop("backward_dq_bias_alone")
    return grids


def dims_of(machine, smaller=0):
    return machine.variant["qk_dim"] - smaller, machine.variant["v_dim"] - smaller


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("axes", [0, 1, 2, 6, 7])
def test_launches(machine, direction, axes):
    s, dims = Sizes(), dims_of(machine, 8)
    call = MAKE[direction](machine, s, dims, axes, rows_batch=1 + axes % 2)
    scalars = scalars_of(s, dims, axes=axes, rows_batch=1 + axes % 2)
    expect_launches(machine, call, scalars, grids_of(s, direction, axes))


@pytest.mark.parametrize("direction", MAKE)
def test_a_bias_of_the_querys_dtype(machine, direction):
    s, dims = Sizes(), dims_of(machine)
    dtype = {"bf16": "bfloat16", "f16": "float16"}[machine.variant["dtype"]]
    call = MAKE[direction](machine, s, dims, dtype=dtype, threshold=1 << 31)
    scalars = scalars_of(s, dims, 1, threshold=1 << 31)
    expect_launches(machine, call, scalars, grids_of(s, direction))


@pytest.mark.parametrize(
    "direction,axes", [("forward", 0), ("forward", 3), *(("backward", x) for x in (0, 3, 6, 7))]
)
def test_a_bias_alone_on_hopper(hopper, direction, axes):
    s, dims = Sizes(kv_len=704), (32, 24)
    hopper.variant = hopper.variant | {"qk_dim": 64, "v_dim": 64}  # which cover `dims`
    call = bias_alone(direction, hopper, s, axes=axes)
    scalars = {**attention(s, 0.125, 2, has_dlse=1), "bias_axes": described(s, axes),
        "qk_dim": dims[0], "v_dim": dims[1]}  # fmt: skip
    expect_launches(hopper, call, scalars, grids_of_alone(s, direction, axes))


@pytest.mark.parametrize("qk_dim", [64, 128, 256])
@pytest.mark.parametrize("s,axes", [(Sizes(kv_len=704), axes) for axes in (4, 5, 6, 7)])
def test_a_bias_with_a_row_for_every_query_on_hopper(tmp_path, driver, s, axes, qk_dim):
    """The forward has a kernel that loads the bias by a tensor map."""
    machine = make_machine(
        tmp_path,
        driver,
        choose=lambda m: m.has("forward_sm90_bias") and m.variant["qk_dim"] == qk_dim,
    )
    call = bias_alone("forward", machine, s, axes=axes, dims=(qk_dim, qk_dim))
    call = call.change(scale=("float32", 0.375), mask_mode=("int32", 1))
    bias = call.operands["bias"]
    planes = Array(bias.dtype, (bias.shape[0] * bias.shape[1], *bias.shape[2:]), bias.address)
    more = {"bias_axes": described(s, axes), "arrays": {"bias": planes}}
    expect_forward(machine, s, call, "forward_sm90_bias", 128, **more)
    if axes == ALL_AXES:
        for other, kernel in (
            ({"axes": 3}, "forward_bias_alone"),
            ({"dims": (qk_dim - 8, qk_dim - 16)}, "forward_sm90_bias"),
            ({"s": Sizes(kv_len=700)}, "forward_bias"),
        ):
            call = bias_alone("forward", machine, **{"s": s, "dims": (qk_dim, qk_dim)} | other)
            assert kernels_of(machine, call) == [kernel]


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("needs_grad", [2, 3])
def test_a_bias_with_an_element_for_every_pair_on_sm90(tmp_path, driver, needs_grad, dim):
    """At these head dims, the dK/dV kernel loads the bias and stores dbias by tensor maps."""
    machine = make_machine(
        tmp_path,
        driver,
        choose=lambda m: m.has("backward_sm90_dbias") and m.variant["qk_dim"] == dim,
    )
    s, more = Sizes(kv_len=704), {"dims": (dim, dim), "needs_grad": needs_grad}
    call = bias_alone("backward", machine, s, algorithm="sm90_separate", **more)
    workspace = call.results["workspace"]
    sections, _ = sm90_sections(machine, s, workspace.address, with_bias=True)
    assert sections["dq_sum"].address + 4 == workspace.address + 4 * workspace.shape[0]
    rows = prod(sections["delta"].shape)
    keys = s.kv_heads * s.batch * ceil(s.kv_len / 128)
    grids = {
        "backward_preprocess_dbias": lambda r: [rows // r],
        "backward_dkdv_sm90_dbias": lambda n: [keys * (128 // n)],
    }
    if needs_grad == 3:
        tiles = s.heads * s.batch * ceil(s.q_len / 128)
        grids["backward_dq_of_dbias_alone"] = lambda m: [tiles * (128 // m)]
    pointers = {name: array.address for name, array in sections.items()}
    scalars = {**attention(s, 0.125, 2, has_dlse=1), "clear_dq": 0, "qk_dim": dim}
    scalars["bias_axes"] = described(s, ALL_AXES)
    values = {name: {**scalars, **pointers} for name in grids}
    arrays = {**call.operands, **call.results, **sections}
    for name, of in (("bias", call.operands["bias"]), ("dbias", call.results["dbias"])):
        planes = (of.shape[0] * of.shape[1], *of.shape[2:])
        arrays[name] = Array(of.dtype, planes, of.address)
    kernel = "backward_dkdv_sm90_dbias"
    values[kernel] |= maps_of(machine, kernel, arrays)
    expect_launches(machine, call, values, grids)
    for other in ({"needs_grad": 1}, {"axes": 3}, {"algorithm": "portable"}):
        other = bias_alone("backward", machine, s, **{"algorithm": "sm90_separate"} | more | other)
        assert kernel not in kernels_of(machine, other)


@pytest.mark.parametrize("kind", ["", "_float32"])
@pytest.mark.parametrize("axes,groups", [(6, 1), (4, 1), (7, 2)])
def test_a_bias_that_rows_share_on_sm90(tmp_path, driver, kind, axes, groups):
    """The workspace has room for two sums of the gradient. Four batch rows share 1 or 2 biases."""
    machine = make_machine(
        tmp_path,
        driver,
        choose=lambda m: m.has("backward_sm90_float32_bias") and m.variant["qk_dim"] == 64,
    )
    s, parts = Sizes(batch=4, mask_batch=4, kv_len=704), 2
    more = {"dtype_of_bias": "float32"} if kind else {}
    call = bias_alone(
        "backward", machine, s, axes=axes, dims=(64, 64), algorithm="sm90_separate", **more
    )
    old = call.operands["bias"]
    bias = Array(old.dtype, (groups, *old.shape[1:]), old.address)
    elements = call.results["workspace"].shape[0]
    room = Array("float32", (elements + 63 + parts * prod(bias.shape),))
    call = call.change(bias=bias, dbias=bias, workspace=room)
    assert kernels_of(machine, call) == SM90[f"backward_sm90{kind}_bias"]
    shared, total = machine.launches()[-2:]
    tiles = ceil(s.q_len / 128) * ceil(s.kv_len / 64)
    assert shared["grid"] == [parts * prod(bias.shape[:2]) * tiles, 1, 1]
    assert total["grid"] == [ceil(prod(bias.shape) / 1024), 1, 1]
    uneven = call.change(workspace=Array("float32", (room.shape[0] - 1,)))
    assert "workspace has" in machine.run(uneven).message
    without = call.change(dbias=ABSENT, workspace=Array("float32", (elements,)))
    assert kernels_of(machine, without) == SM90[f"backward_sm90{kind}_bias"][:3]


@pytest.mark.parametrize(
    "s,axes",
    [
        (Sizes(kv_len=704), 7),
        (Sizes(batch=1, mask_batch=1, kv_len=704), 6),
        (Sizes(heads=1, kv_heads=1, kv_len=704), 5),
        (Sizes(q_len=1, kv_len=704), 3),
    ],
    ids=("all", "one batch row", "one head", "one row"),
)
def test_a_bias_with_an_element_for_every_pair(hopper, s, axes):
    call = bias_alone("backward", hopper, s, axes=axes)
    assert kernels_of(hopper, call) == KERNELS["backward_dbias_of_pairs"]
    call = bias_alone("backward", hopper, s, axes=axes, needs_grad=2)
    assert kernels_of(hopper, call) == KERNELS["backward_dbias_of_pairs"][:2]
    call = bias_alone("backward", hopper, s, axes=axes, needs_grad=1)
    delta, _, dq, dbias = KERNELS["backward_bias_alone"]
    assert kernels_of(hopper, call) == [delta, dq, dbias]


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize(
    "more",
    [
        {"dtype_of_bias": "float32"},
        {"s": Sizes(kv_len=700)},
        {"threshold": THRESHOLD},
        {"has": (1, 0)},
        {"has": (0, 1)},
        {"soft_cap": 30.0},
        {"blocks": BLOCKS},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_bias_and_more_on_hopper(hopper, direction, more):
    more = dict(more)
    call = bias_alone(direction, hopper, more.pop("s", None), axes=3, **more)
    assert kernels_of(hopper, call) == KERNELS[f"{direction}_bias"]


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dims", [(136, 64), (192, 128), (72, 200), (256, 248)], ids=str)
def test_above_head_dim_128(wide, direction, dims, alone):
    """They take kernels for head dim 256, on Hopper also those for a bias as the only option."""
    s, (dtype, cc) = Sizes(kv_len=704), (wide.variant[name] for name in ("dtype", "cc"))
    wide.variant = wide.variant | {"qk_dim": 256, "v_dim": 256}  # which cover `dims`
    kind = {"bf16": "bfloat16", "f16": "float16"}[dtype]
    kernels, grids = KERNELS[f"{direction}_bias"], grids_of(s, direction)
    forward = direction == "forward"
    if not alone:
        call = MAKE[direction](wide, s, dims, dtype=kind)
    else:
        call = bias_alone(direction, wide, s, dims=dims, **({"axes": 3} if forward else {}))
        if wide.ext.find("forward_bias_alone", cc, dtype, 256, 256):
            name = "forward_bias_alone" if forward else "backward_dbias_of_pairs"
            kernels, grids = KERNELS[name], grids_of_alone(s, direction)
    assert wide.run(call) is None
    launches = wide.launches()
    assert [launch["kernel"] for launch in launches] == kernels
    for launch in launches:
        name = wide.ext.find(launch["kernel"], cc, dtype, 256, 256)
        (row,) = (row for row in wide.ext.variants() if row["name"] == name)
        assert launch["shared"] == row["shared"]
        assert launch["grid"] == [*grids[launch["kernel"]](row["block"]), 1, 1]


@pytest.mark.parametrize("direction", MAKE)
def test_a_bias_alone_elsewhere(portable, direction):
    assert kernels_of(portable, bias_alone(direction, portable)) == KERNELS[f"{direction}_bias"]


def test_results_that_a_bias_alone_does_not_give(hopper):
    call = bias_alone("forward", hopper, needs_row_max=1)
    assert kernels_of(hopper, call) == ["forward_bias"]
    call = bias_alone("backward", hopper, score_grads=1)
    assert kernels_of(hopper, call) == KERNELS["backward_bias"]


@pytest.mark.parametrize("needs_grad,dbias", [(1, 0), (2, 0), (0, 1)])
def test_some_gradients_of_a_bias_alone(hopper, needs_grad, dbias):
    call = bias_alone("backward", hopper, needs_grad=needs_grad, dbias=dbias)
    delta, *others = KERNELS["backward_bias_alone"]
    asked = needs_grad & 2, needs_grad & 1, dbias
    expected = [delta, *(k for k, there in zip(others, asked, strict=True) if there)]
    assert kernels_of(hopper, call) == expected


@pytest.mark.parametrize("direction", MAKE)
def test_without_either_it_takes_the_fallback_kernels(portable, direction):
    call = MAKE[direction](portable, axes=None, threshold=0, **({"dbias": 0} if
        direction == "backward" else {}))  # fmt: skip
    assert kernels_of(portable, call) == KERNELS[f"{direction}_fallback"]


@pytest.mark.parametrize("axes,threshold", [(None, THRESHOLD), (7, 0)])
def test_one_of_both(portable, axes, threshold):
    call = forward_bias(portable, axes=axes, threshold=threshold)
    assert kernels_of(portable, call) == ["forward_bias"]
    call = backward_bias(portable, axes=axes, threshold=threshold, dbias=0)
    assert kernels_of(portable, call) == KERNELS["backward_bias"][:3]


def test_the_gradient_of_the_bias_alone(portable):
    call = backward_bias(portable, needs_grad=0, score_grads=0)
    assert kernels_of(portable, call) == ["backward_delta_fallback", "backward_dbias"]


@pytest.mark.parametrize("direction", MAKE)
def test_initialize_loads_what_execute_launches(portable, direction):
    call = MAKE[direction](portable)
    assert portable.run(call, INITIALIZE) is None and portable.record() == []
    assert portable.calls("cuLibraryLoadData") == len(KERNELS[f"{direction}_bias"])
