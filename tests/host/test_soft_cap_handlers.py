"""The handlers with a soft cap on Hopper, which has dedicated kernels for calls whose only option
is a soft cap.

Guards against calls that reach a kernel which ignores one of their options, and against arguments
in the wrong order. Runs on a fake libcuda, as test_sm90_handlers.py.
"""

import numpy as np
import pytest
from cpp.calls import BLOCKS, Array, backward_soft_cap, forward_soft_cap
from cpp.launches import SIZES, kernels_of
from cpp.machine import KERNELS, arguments, make_machine, needs_compiler, needs_extension
from cpp.sm90 import expect_forward, expect_one_backward, expect_separate_backward

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

CAP = 50.0
MAKE = {"forward": forward_soft_cap, "backward": backward_soft_cap}
GIVEN = {"scale": ("float32", 0.375), "mask_mode": ("int32", 1)}


def machine_of(tmp_path, driver, qk_dim, names="forward_soft_cap"):
    return make_machine(
        tmp_path, driver, choose=lambda m: m.has(names) and m.variant["qk_dim"] == qk_dim
    )


@pytest.fixture
def capped(tmp_path, driver):
    """A machine with all soft-cap kernels for its head dims."""
    return make_machine(tmp_path, driver, choose=lambda m: m.has("backward_soft_cap"))


@pytest.mark.parametrize("qk_dim,block", [(64, 192), (128, 128), (256, 128)])
@pytest.mark.parametrize("s", SIZES)
def test_forward(tmp_path, driver, s, qk_dim, block):
    machine = machine_of(tmp_path, driver, qk_dim)
    call = forward_soft_cap(machine, s, CAP).change(**GIVEN)
    expect_forward(machine, s, call, "forward_sm90_soft_cap", block, soft_cap=CAP)


@pytest.mark.parametrize("has_dlse", [0, 1])
@pytest.mark.parametrize("qk_dim", [64, 128])
@pytest.mark.parametrize("s", SIZES)
def test_backward(tmp_path, driver, s, qk_dim, has_dlse):
    machine = machine_of(tmp_path, driver, qk_dim, "backward_soft_cap")
    call = backward_soft_cap(machine, s, CAP, has_dlse=has_dlse).change(**GIVEN)
    expect_one_backward(machine, s, call, "backward_sm90_soft_cap", has_dlse, soft_cap=CAP)


@pytest.mark.parametrize("needs_grad", [0, 1, 2, 3])
@pytest.mark.parametrize("qk_dim,block", [(64, 128), (128, 128), (256, 64)])
@pytest.mark.parametrize("s", SIZES)
def test_backward_apart(tmp_path, driver, s, qk_dim, block, needs_grad):
    """Used for `deterministic=True`, for only some of the gradients, and for head dim 256."""
    machine = machine_of(tmp_path, driver, qk_dim, "backward_separate_soft_cap")
    cc = machine.variant["cc"]
    assert machine.row("backward_dkdv_sm90_soft_cap", cc)["block"] == block
    call = backward_soft_cap(
        machine, s, CAP, algorithm="sm90_separate", needs_grad=needs_grad
    ).change(**GIVEN)
    expect_separate_backward(machine, s, call, needs_grad, "_soft_cap", soft_cap=CAP)


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("soft_cap", [0.25, 1.0, 1024.0])
def test_caps_of_its_own_kernels(capped, direction, soft_cap):
    call = MAKE[direction](capped, soft_cap=soft_cap)
    assert kernels_of(capped, call) == capped.kernels(f"{direction}_soft_cap")
    for launch in capped.launches():
        if launch["kernel"].endswith("_soft_cap"):
            at = arguments(launch["kernel"]).index("soft_cap")
            assert launch["params"][at] == soft_cap


# Changes that make a call with only a soft cap take the fallback kernels.
OTHERS = {
    "a larger cap": {"soft_cap": float(np.nextafter(np.float32(1024), np.float32(2048)))},
    "a scale from a buffer": {"has": (1, 0)},
    "a bias": {"has": (0, 1)},
    "a block mask": {"blocks": BLOCKS},
    "other head dims": {"dims": (56, 56)},
}


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("what", OTHERS)
def test_what_takes_the_fallback_kernels(capped, direction, what):
    assert kernels_of(capped, MAKE[direction](capped)) == capped.kernels(f"{direction}_soft_cap")
    got = kernels_of(capped, MAKE[direction](capped, **OTHERS[what]))
    assert got == KERNELS[f"{direction}_fallback"]


@pytest.mark.parametrize("direction", MAKE)
def test_a_scale_that_overflows_in_units_of_the_cap(capped, direction):
    """3e38 / 0.5 is infinite, and its product with a score of 0 would be NaN."""
    scale = ("float32", 3e38)
    call = MAKE[direction](capped, soft_cap=2.0).change(scale=scale)
    assert kernels_of(capped, call) == capped.kernels(f"{direction}_soft_cap")
    call = MAKE[direction](capped, soft_cap=0.5).change(scale=scale)
    assert kernels_of(capped, call) == KERNELS[f"{direction}_fallback"]


@pytest.mark.parametrize("direction", MAKE)
def test_without_a_cap_it_is_a_plain_call(capped, direction):
    plain = capped.kernels(direction) if direction != "forward" else [capped.forward_of(SIZES[0])]
    assert kernels_of(capped, MAKE[direction](capped, soft_cap=0.0)) == plain


def test_largest_logits_and_gradients_of_score_params_take_the_fallback_kernels(capped):
    assert (
        kernels_of(capped, forward_soft_cap(capped, needs_row_max=1)) == KERNELS["forward_fallback"]
    )
    call = backward_soft_cap(capped, score_grads=1)
    assert kernels_of(capped, call) == KERNELS["backward_fallback"]


@pytest.mark.parametrize("needs_row_max", [0, 1])
def test_without_largest_logits_their_address_is_null(capped, needs_row_max):
    """Their result then has no elements, and another array may begin at its address."""
    call = forward_soft_cap(capped, needs_row_max=needs_row_max, has=(0, 1))
    assert kernels_of(capped, call) == KERNELS["forward_fallback"]
    (launch,) = capped.launches()
    got = dict(zip(arguments("forward_fallback"), launch["params"], strict=False))
    assert got["row_max"] == (call.addresses()["row_max"] if needs_row_max else 0)
    assert got["lse"] == call.addresses()["lse"] != 0


@pytest.mark.parametrize("direction", MAKE)
def test_head_dims_without_such_kernels(tmp_path, driver, direction):
    """Hopper has plain kernels for head dims 192/128, but none with a soft cap."""
    machine = make_machine(
        tmp_path, driver, choose=lambda m: m.has_sm90() and not m.has("forward_soft_cap")
    )
    assert machine.variant["qk_dim"] == 192
    call = MAKE[direction](machine)
    assert kernels_of(machine, call) == KERNELS[f"{direction}_fallback"]


@pytest.mark.parametrize("direction", MAKE)
def test_float32(capped, direction):
    dims = [(v["qk_dim"], v["v_dim"]) for v in capped.ext.variants() if v["dtype"] == "f32"]
    asked = capped.variant["qk_dim"], capped.variant["v_dim"]
    if not any(have[0] >= asked[0] and have[1] >= asked[1] for have in dims):
        pytest.skip("this build has no such kernel")
    call = MAKE[direction](capped, dtype="float32", float32=1)
    assert kernels_of(capped, call) == KERNELS[f"{direction}_fallback"]


def test_the_algorithm_says_which_kernels(capped):
    for algorithm, kernels in (
        ("sm90_fused", capped.kernels("backward_soft_cap")),
        ("sm90_separate", capped.kernels("backward_separate_soft_cap")),
        ("portable", KERNELS["backward_fallback"]),
    ):
        assert kernels_of(capped, backward_soft_cap(capped, algorithm=algorithm)) == kernels


@pytest.mark.parametrize("needs_grad", [1, 2])
def test_one_kernel_writes_all_gradients(capped, needs_grad):
    """The fused kernel always writes dk and dv; only dq needs a postprocess kernel."""
    call = backward_soft_cap(capped, needs_grad=needs_grad)
    finish = ["backward_postprocess"] if needs_grad & 1 else []
    assert kernels_of(capped, call) == ["backward_preprocess", "backward_sm90_soft_cap", *finish]
    failure = capped.run(call.change(dk=Array("float16", (0,))))
    assert failure.code == "InvalidArgument" and "dk is float16[0], expected" in failure.message
