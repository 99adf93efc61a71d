"""Calls of packax_forward_tangent_v1: which kernel runs, its arguments, absent tangents, errors.

Runs on a fake libcuda, as test_handlers.py.
"""

from dataclasses import replace
from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import ABSENT, BLOCKS, Array, Sizes, forward, forward_fallback, make_call
from cpp.launches import attention, expect_launches, kernels_of
from cpp.machine import needs_compiler, needs_extension

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]


SIZES = Sizes()


def tangent(m, s=SIZES, has=(1, 1, 1), of=None):
    """`has`: which of tq, tk and tv are present. `of`: a call of the forward, by default plain."""
    f = of or forward(m, s)
    out, lse = f.results["out"], f.results["lse"]
    names = zip(("tq", "tk", "tv"), ("query", "key", "value"), has, strict=True)
    tangents = {name: f.operands[primal] if h else ABSENT for name, primal, h in names}
    operands = {
        name: x for name, x in f.operands.items() if name not in ("q_order_192", "out_init")
    }
    operands |= {"out": out, "lse": lse, **tangents}
    results = {"tout": out, "tlse": lse}
    return make_call("packax_forward_tangent_v1", operands, results, f.attributes)


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


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"tq": lambda x: replace(x, shape=(2, 300, 6, 8))}, "tq"),
        ({"tk": lambda x: replace(x, dtype="float32")}, "tk"),
        ({"tv": lambda x: replace(x, shape=x.shape[1:])}, "tv"),
        ({"out": lambda x: replace(x, shape=(1, *x.shape[1:]))}, "out"),
        ({"lse": lambda x: Array("float32", (2, 6, 300, 2))}, "lse"),
        ({"tout": lambda x: ABSENT}, "tout"),
        ({"tlse": lambda x: ABSENT}, "tlse"),
    ],
)
def test_errors(machine, changes, text):
    call = tangent(machine)
    both = {**call.operands, **call.results}
    failure = machine.run(call.change(**{name: f(both[name]) for name, f in changes.items()}))
    assert failure.code == "InvalidArgument"
    assert failure.message.startswith(f"packax_forward_tangent_v1: {text} ")


def test_what_has_no_kernel(machine):
    call = tangent(machine)
    kv_len = call.operands["key"].shape[1]
    biased = call.change(bias=Array("float32", (1, 1, 1, kv_len)))
    grouped = call.change(first_head=("int32", 0), heads=("int32", 2))
    for changed, text in ((biased, "bias or dropout_threshold"), (grouped, "first_head and heads")):
        failure = machine.run(changed)
        assert failure.code == "Unimplemented" and text in failure.message
