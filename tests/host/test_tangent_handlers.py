"""Calls of packax_forward_tangent_v1: which kernel runs, its arguments, absent tangents, errors.

Runs on a fake libcuda, as test_handlers.py.
"""

from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import BLOCKS, Sizes, forward_fallback, tangent
from cpp.launches import attention, expect_launches, kernels_of
from cpp.machine import needs_compiler, needs_extension

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
    expect_launches(machine, call, scalars, {kernel: grid(s)})


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
