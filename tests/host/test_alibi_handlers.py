"""The handlers with ALiBi of indices on Hopper, which has dedicated kernels for calls whose only
option is ALiBi.

Guards against calls that reach a kernel which ignores their linear bias or its positions, and
against arguments in the wrong order. Runs on a fake libcuda, as test_soft_cap_handlers.py.
"""

import pytest
from cpp.calls import BLOCKS, backward_alibi, forward_alibi
from cpp.launches import SIZES, kernels_of
from cpp.machine import KERNELS, make_machine, needs_compiler, needs_extension
from cpp.sm90 import expect_forward, expect_one_backward

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

MAKE = {"forward": forward_alibi, "backward": backward_alibi}
GIVEN = {"scale": ("float32", 0.375), "mask_mode": ("int32", 1)}


def machine_of(tmp_path, driver, qk_dim=None):
    return make_machine(
        tmp_path,
        driver,
        choose=lambda m: m.has("backward_alibi") and qk_dim in (None, m.variant["qk_dim"]),
    )


@pytest.fixture
def alibi(tmp_path, driver):
    return machine_of(tmp_path, driver)


@pytest.mark.parametrize("qk_dim,block", [(64, 192), (128, 128)])
@pytest.mark.parametrize("s", SIZES)
def test_forward(tmp_path, driver, s, qk_dim, block):
    machine = machine_of(tmp_path, driver, qk_dim)
    call = forward_alibi(machine, s).change(**GIVEN)
    expect_forward(machine, s, call, "forward_sm90_alibi", block)


@pytest.mark.parametrize("has_dlse", [0, 1])
@pytest.mark.parametrize("qk_dim", [64, 128])
@pytest.mark.parametrize("s", SIZES)
def test_backward(tmp_path, driver, s, qk_dim, has_dlse):
    machine = machine_of(tmp_path, driver, qk_dim)
    call = backward_alibi(machine, s, has_dlse=has_dlse).change(**GIVEN)
    expect_one_backward(machine, s, call, "backward_sm90_alibi", has_dlse)


# Changes that make a call with only ALiBi take the fallback kernels.
OTHERS = {
    "places that are arrays": {"has": (1, 1)},
    "slopes for every row of the batch": {"batches": (1, 2)},
    "a soft cap": {"soft_cap": 30.0},
    "a block mask": {"blocks": BLOCKS},
    "other head dims": {"dims": (56, 56)},
}


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("what", OTHERS)
def test_what_takes_the_fallback_kernels(alibi, direction, what):
    assert kernels_of(alibi, MAKE[direction](alibi)) == alibi.kernels(f"{direction}_alibi")
    got = kernels_of(alibi, MAKE[direction](alibi, **OTHERS[what]))
    assert got == KERNELS[f"{direction}_fallback"]


def test_largest_logits_and_the_gradient_of_slopes_take_the_fallback_kernels(alibi):
    assert kernels_of(alibi, forward_alibi(alibi, needs_row_max=1)) == KERNELS["forward_fallback"]
    call = backward_alibi(alibi, score_grads=1)
    assert kernels_of(alibi, call) == KERNELS["backward_fallback"]


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("qk_dim", [192, 256])
def test_head_dims_without_such_kernels(tmp_path, driver, direction, qk_dim):
    machine = make_machine(
        tmp_path, driver, choose=lambda m: m.has_sm90() and m.variant["qk_dim"] == qk_dim
    )
    call = MAKE[direction](
        machine, **({"algorithm": "sm90_separate"} if direction == "backward" else {})
    )
    assert kernels_of(machine, call) == KERNELS[f"{direction}_fallback"]


def test_the_algorithm_says_which_kernels(alibi):
    """There is only a fused ALiBi kernel; the other algorithms take the fallback kernels."""
    for algorithm, kernels in (
        ("sm90_fused", alibi.kernels("backward_alibi")),
        ("sm90_separate", KERNELS["backward_fallback"]),
        ("portable", KERNELS["backward_fallback"]),
    ):
        assert kernels_of(alibi, backward_alibi(alibi, algorithm=algorithm)) == kernels


@pytest.mark.parametrize("needs_grad", [1, 2])
def test_one_kernel_writes_all_gradients(alibi, needs_grad):
    call = backward_alibi(alibi, needs_grad=needs_grad)
    finish = ["backward_postprocess"] if needs_grad & 1 else []
    assert kernels_of(alibi, call) == ["backward_preprocess", "backward_sm90_alibi", *finish]
