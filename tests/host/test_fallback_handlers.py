"""Calls that take the fallback kernels: the smallest kernel that covers the head dims, its
arguments, errors.

Runs on a fake libcuda, as test_handlers.py.
"""

import itertools
from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import (
    BLOCKS,
    Sizes,
    backward_fallback,
    forward_fallback,
)
from cpp.launches import attention, expect_launches, kernels_of
from cpp.machine import KERNELS, make_machine, needs_compiler, needs_extension

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]


def scalars_of(s, dims, batches=(1, 1), soft_cap=30.0, blocks=BLOCKS):
    return {
        **attention(s, 0.125, 2, has_dlse=1),
        "soft_cap": soft_cap,
        "has_score_grads": 1,
        "scales_batch": batches[0],
        "bias_batch": batches[1],
        **dict(
            zip(
                ("block_mask_batch", "block_mask_heads", "q_block", "kv_block"), blocks, strict=True
            )
        ),
        "qk_dim": dims[0],
        "v_dim": dims[1],
    }


def grids_of(s):
    return {
        "forward_fallback": lambda m: [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)],
        "backward_delta_fallback": lambda r: [ceil(s.q_len / r) * s.heads * s.batch],
        "backward_dkdv_fallback": lambda n: [
            s.kv_heads * s.batch * ceil(s.kv_len / 128) * (128 // n)
        ],
        "backward_dq_fallback": lambda m: [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)],
    }


def only(direction, grids):
    return {kernel: grid for kernel, grid in grids.items() if kernel.startswith(direction)}


MAKE = {"forward": forward_fallback, "backward": backward_fallback}


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize(
    "smaller,batches,blocks",
    [(0, (1, 1), BLOCKS), (8, (2, 2), (2, 1, 1, 1)), (24, (2, 1), (1, 1, 512, 999))],
)
def test_launches(machine, direction, smaller, batches, blocks):
    """Multiples of 8 just below the compiled head dims use the same kernels."""
    s = Sizes()
    v = machine.variant
    dims = v["qk_dim"] - smaller, v["v_dim"] - smaller
    call = MAKE[direction](machine, s, dims, batches, blocks=blocks)
    grids = only(direction, grids_of(s))
    expect_launches(machine, call, scalars_of(s, dims, batches, blocks=blocks), grids)


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("exact,short", [(0, "tf32"), (1, "f32")])
def test_float32(machine, direction, exact, short):
    """Kernels of the requested precision for the smallest head dims that cover the call's. Delta
    has no matrix products, so its kernel serves both."""
    s = Sizes()
    cc, asked = machine.variant["cc"], (56, 24)
    pairs = {(v["qk_dim"], v["v_dim"]) for v in machine.ext.variants() if v["dtype"] == short}
    pairs = sorted(pair for pair in pairs if pair[0] >= asked[0] and pair[1] >= asked[1])
    if not pairs:
        pytest.skip("this build has no such kernel")
    call = MAKE[direction](machine, s, asked, dtype="float32", float32=exact)
    assert machine.run(call) is None
    grids = only(direction, grids_of(s))
    launches = machine.launches()
    assert [launch["kernel"] for launch in launches] == list(grids)
    for launch, (kernel, grid) in zip(launches, grids.items(), strict=True):
        kind = "f32" if "delta" in kernel else short
        name = machine.ext.find(kernel, cc, kind, *pairs[0], 12040)
        row = next(r for r in machine.ext.variants() if r["name"] == name)
        assert launch["shared"] == row["shared"], kernel
        assert launch["grid"] == [*grid(row["block"]), 1, 1], kernel


@pytest.mark.parametrize("needs_grad,score_grads", [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)])
def test_backward_of_some(machine, needs_grad, score_grads):
    """Kernels whose results are not needed are not launched. That of dq also writes score_grads."""
    s = Sizes()
    dims = machine.variant["qk_dim"], machine.variant["v_dim"]
    call = backward_fallback(machine, s, dims, needs_grad=needs_grad, score_grads=score_grads)
    grids = only("backward", grids_of(s))
    if not needs_grad & 2:
        del grids["backward_dkdv_fallback"]
    if not (needs_grad & 1 or score_grads):
        del grids["backward_dq_fallback"]
    expect_launches(machine, call, scalars_of(s, dims) | {"has_score_grads": score_grads}, grids)


@pytest.mark.parametrize("direction", MAKE)
def test_what_is_absent(machine, direction):
    """For absent operands, kernels receive batches and heads of 0."""
    s = Sizes(batch=1, mask_batch=1, q_len=1, kv_len=129, heads=8, kv_heads=1)
    dims = machine.variant["qk_dim"] - 8, machine.variant["v_dim"] - 8
    if direction == "forward" and machine.has_sm90():
        pytest.skip("Hopper has dedicated kernels for these head dims")
    call = MAKE[direction](machine, s, dims, has=(0, 0), soft_cap=0.0, blocks=None)
    scalars = scalars_of(s, dims, (0, 0), 0.0, (1, 0, 1, 1))
    expect_launches(machine, call, scalars, only(direction, grids_of(s)))


@pytest.mark.parametrize("direction", MAKE)
def test_without_options_it_is_a_plain_call(portable, direction):
    call = MAKE[direction](
        portable, has=(0, 0), soft_cap=0.0, blocks=None,
        **({"score_grads": 0} if direction == "backward" else {}),
    )  # fmt: skip
    assert kernels_of(portable, call) == KERNELS[direction]


def wide_machine(tmp_path, driver, cc):
    """A machine with this compute capability, if the build has kernels for head dims up to 512."""

    def serves(machine):
        kernels = ("decode", "forward_fallback")  # a build for only 8.0 lacks the second for 8.6
        dtype = machine.variant["dtype"]
        return all(machine.ext.find(name, cc, dtype, 512, 512) is not None for name in kernels)

    return make_machine(tmp_path, driver, ccs=(cc,), choose=serves)


@pytest.mark.parametrize("dims", [(512, 512), (320, 264), (264, 8)])
@pytest.mark.parametrize("cc", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_head_dims_above_256(tmp_path, driver, cc, dims):
    """Plain calls and calls with every option take the fallback kernels for 512."""
    machine = wide_machine(tmp_path, driver, cc)
    machine.cuda.fake_set_version(13000)
    s, dtype = Sizes(), machine.variant["dtype"]
    plain = {"has": (0, 0), "soft_cap": 0.0, "blocks": None}
    for direction, options in itertools.product(MAKE, ({}, plain)):
        if options and direction == "backward":
            options = {**options, "score_grads": 0}
        elif options and cc == 90:
            continue  # test_sm90_handlers.py
        machine.cuda.fake_clear()
        call = MAKE[direction](machine, s, dims, **options)
        assert machine.run(call, INITIALIZE) is None and machine.run(call) is None
        grids = only(direction, grids_of(s))
        launches = machine.launches()
        assert [launch["kernel"] for launch in launches] == list(grids)
        for launch, (kernel, grid) in zip(launches, grids.items(), strict=True):
            name = machine.ext.find(kernel, cc, dtype, 512, 512, 13000)
            row = next(r for r in machine.ext.variants() if r["name"] == name)
            assert launch["shared"] == row["shared"], kernel
            assert launch["grid"] == [*grid(row["block"]), 1, 1], kernel


def test_a_driver_that_is_too_old_for_larger_head_dims(machine):
    """The error names both versions, although the kernel's head dims are not the call's."""
    machine.cuda.fake_set_version(11080)
    failure = machine.run(forward_fallback(machine, dims=(8, 8)), INITIALIZE)
    assert "no forward_fallback kernel" in failure.message and "head dims 8x8" in failure.message
    assert "needs a driver for CUDA 12.0 or newer, this one is for CUDA 11.8" in failure.message
