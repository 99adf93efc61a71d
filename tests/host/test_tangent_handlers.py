"""Calls of packax_forward_tangent_v1: which kernel runs, its arguments, absent tangents, errors.

Runs on a fake libcuda, as test_handlers.py.
"""

from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import BLOCKS, Sizes, forward_alibi, forward_fallback, tangent
from cpp.launches import SIZES as SIZES_OF_SM90
from cpp.launches import attention, expect_launches, kernels_of
from cpp.machine import make_machine, needs_compiler, needs_extension
from cpp.sm90 import maps_of

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]


SIZES = Sizes()


def grid(s):
    return lambda m: [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)]


def flags(has):
    return dict(zip(("has_tq", "has_tk", "has_tv"), has, strict=True))


NO_OPTIONS = {
    "soft_cap": 0.0,
    **dict.fromkeys(("scales_batch", "bias_batch", "block_mask_heads"), 0),
    **dict.fromkeys(("block_mask_batch", "q_block", "kv_block"), 1),
}


def test_plain(machine):
    s = SIZES
    scalars = attention(s, 0.125, 2)
    call = tangent(machine, s)
    kernel = "forward_tangent"
    if not machine.has_kernels([kernel]):
        pytest.skip("only the fallback kernel takes these head dims")
    if machine.has(kernel):
        pytest.skip("the kernel for Hopper takes this call")
    expect_launches(machine, call, scalars, {kernel: grid(s)})


@pytest.mark.parametrize("qk_dim", [64, 128])
@pytest.mark.parametrize("s", SIZES_OF_SM90)
def test_plain_on_sm90(tmp_path, driver, s, qk_dim):
    """All arrays with columns are tensor maps: rows in boxes of 64, keys in boxes of 128."""

    def choose(m):
        return m.has("forward_tangent") and m.variant["qk_dim"] == qk_dim

    machine = make_machine(tmp_path, driver, choose=choose)
    kernel = "forward_tangent_sm90"
    boxes = [box[0] for box in machine.row(kernel, machine.variant["cc"])["tensor_maps"]]
    assert boxes == [64, 128, 128, 64, 64, 128, 128, 64]
    call = tangent(machine, s)
    maps = maps_of(machine, kernel, {**call.operands, **call.results})
    expect_launches(machine, call, {**attention(s, 0.125, 2), **maps}, {kernel: grid(s)})


@pytest.mark.parametrize(
    "changed,kernel",
    [
        ({}, "forward_tangent_sm90"),
        ({"qk_dim": 72, "v_dim": 8}, "forward_tangent_sm90"),
        ({"has_tk": 0}, "forward_tangent_fallback"),
        ({"soft_cap": 2.0}, "forward_tangent_fallback"),
        ({"scales_batch": 1}, "forward_tangent_fallback"),
        ({"block_mask_heads": 1}, "forward_tangent_fallback"),
        ({"qk_dim": 136}, "forward_tangent_fallback"),
        ({"dtype": "tf32"}, "forward_tangent_fallback"),
    ],
    ids=str,
)
def test_selection_on_sm90(machine, changed, kernel):
    call = {"dtype": "bf16", "qk_dim": 128, "v_dim": 128, **flags((1, 1, 1)), **changed}
    built = {row["kernel"] for row in machine.ext.variants() if row["cc"] == 90}
    if "forward_tangent_sm90" not in built or machine.ext.part() not in ("", "archs 90a"):
        pytest.skip("needs a build of all kernels for 9.0")
    assert [name for name, _ in machine.ext.select("forward_tangent", 90, 132, call)] == [kernel]


def test_smaller_head_dims_on_sm90(tmp_path, driver):
    """The kernel with the smallest head dims that cover them, with tensor maps that end at their
    last column."""
    machine = make_machine(tmp_path, driver, choose=lambda m: m.has("forward_tangent"))
    dims = machine.variant["qk_dim"] - 8, machine.variant["v_dim"] - 16
    call = tangent(machine, SIZES, of=forward_alibi(machine, SIZES, (0, 0), dims=dims))
    assert kernels_of(machine, call) == ["forward_tangent_sm90"]


@pytest.mark.parametrize("has", [(1, 0, 0), (0, 1, 1), (0, 0, 1), (0, 0, 0)])
def test_some_tangents(machine, has):
    s = SIZES
    v = machine.variant
    dims = {"qk_dim": v["qk_dim"], "v_dim": v["v_dim"]}
    scalars = {**attention(s, 0.125, 2), **NO_OPTIONS, **flags(has), **dims}
    call = tangent(machine, s, has)
    expect_launches(machine, call, scalars, {"forward_tangent_fallback": grid(s)})


def test_options_and_smaller_head_dims(machine):
    s = SIZES
    dims = machine.variant["qk_dim"] - 8, machine.variant["v_dim"] - 16
    call = tangent(machine, s, of=forward_fallback(machine, s, dims))
    scalars = {
        **attention(s, 0.125, 2),
        "soft_cap": 30.0,
        **dict.fromkeys(("scales_batch", "bias_batch"), 1),
        **dict(zip(("block_mask_batch", "block_mask_heads", "q_block", "kv_block"), BLOCKS,
            strict=True)),
        **flags((1, 1, 1)),
        "qk_dim": dims[0],
        "v_dim": dims[1],
    }  # fmt: skip
    expect_launches(machine, call, scalars, {"forward_tangent_fallback": grid(s)})


def test_the_first_stage_launches_nothing(machine):
    assert machine.run(tangent(machine), INITIALIZE) is None
    assert machine.launches() == []


def test_an_empty_batch(machine):
    s = Sizes(batch=0, mask_batch=1)
    assert kernels_of(machine, tangent(machine, s)) == []
