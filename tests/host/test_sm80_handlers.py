"""The handlers with sm80 kernels (mma.sync): the sections of the backward's workspace, in which dQ
is accumulated, every argument, and which calls take other kernels.

Guards against a workspace section in the wrong place. Runs on a fake libcuda (tests/support/cpp):
needs the built extension and a C compiler.
"""

from math import ceil, prod

import pytest
from cpp.calls import backward, backward_soft_cap, forward_soft_cap
from cpp.launches import SIZES, attention, expect_launches, expect_portable_backward, kernels_of
from cpp.machine import KERNELS, SM80_BACKWARD, make_machine, needs_compiler, needs_extension
from cpp.sm90 import sm90_sections

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]


@pytest.fixture
def sm80(tmp_path, driver):
    return make_machine(tmp_path, driver, choose=lambda m: m.has_sm80())


@pytest.mark.parametrize("has_dlse", [0, 1])
@pytest.mark.parametrize("s", SIZES)
def test_backward(sm80, s, has_dlse):
    call = backward(sm80, s, scale=0.375, mask_mode=1, has_dlse=has_dlse)
    sections, end = sm90_sections(sm80, s, call.results["workspace"].address)
    assert end == call.results["workspace"].address + 4 * call.results["workspace"].shape[0]
    rows = prod(sections["delta"].shape)
    grids = {
        "backward_preprocess": lambda r: [rows // r],
        "backward_sm80": lambda n: [s.kv_heads * s.batch * ceil(s.kv_len / 128) * (128 // n)],
        "backward_postprocess_sm80": lambda r: [rows // r],
    }
    pointers = {name: array.address for name, array in sections.items()}
    values = {**attention(s, 0.375, 1, has_dlse), **pointers, "clear_dq": 1}
    expect_launches(sm80, call, dict.fromkeys(grids, values), grids)
    assert sm80.calls("cuTensorMapEncodeTiled") == 0
    assert sm80.calls("cuLibraryLoadData") == 3  # not the portable kernels


@pytest.mark.parametrize(
    "call",
    [{"algorithm": "portable"}, {"algorithm": "sm90_separate"}, {"needs_grad": 1}],
    ids=str,
)
def test_the_portable_kernels_take_the_others(sm80, call):
    """Without memory for the sum of dQ, for deterministic calls, or for dQ only."""
    s = SIZES[0]
    expect_portable_backward(
        sm80, backward(sm80, s, **call), s, needs_grad=call.get("needs_grad", 3)
    )


CAP = 50.0
GIVEN = {"scale": ("float32", 0.375), "mask_mode": ("int32", 1)}


@pytest.fixture
def capped(tmp_path, driver):
    kernels = ["forward_sm80_soft_cap", "backward_sm80_soft_cap"]
    return make_machine(tmp_path, driver, choose=lambda m: m.has_kernels(kernels))


@pytest.mark.parametrize("s", SIZES)
def test_forward_with_a_soft_cap(capped, s):
    call = forward_soft_cap(capped, s, CAP).change(**GIVEN)
    tiles = s.heads * s.batch * ceil(s.q_len / 128)
    grids = {"forward_sm80_soft_cap": lambda m: [tiles * (128 // m)]}
    expect_launches(capped, call, attention(s, 0.375, 1) | {"soft_cap": CAP}, grids)


@pytest.mark.parametrize("s", SIZES)
def test_backward_with_a_soft_cap(capped, s):
    call = backward_soft_cap(capped, s, CAP, has_dlse=1).change(**GIVEN)
    sections, _ = sm90_sections(capped, s, call.results["workspace"].address)
    rows = prod(sections["delta"].shape)
    grids = {
        "backward_preprocess": lambda r: [rows // r],
        "backward_sm80_soft_cap": lambda n: [
            s.kv_heads * s.batch * ceil(s.kv_len / 128) * (128 // n)
        ],
        "backward_postprocess_sm80": lambda r: [rows // r],
    }
    pointers = {name: array.address for name, array in sections.items()}
    scalars = attention(s, 0.375, 1, 1) | {"clear_dq": 1, "soft_cap": CAP}
    expect_launches(capped, call, dict.fromkeys(grids, scalars | pointers), grids)


@pytest.mark.parametrize(
    "other",
    [
        {"soft_cap": 1025.0},
        {"has": (1, 0)},
        {"algorithm": "portable"},
        {"algorithm": "sm90_separate"},
        {"needs_grad": 1},
    ],
    ids=str,
)
def test_the_fallback_kernels_take_other_soft_caps(capped, other):
    """Larger soft caps, another option, or no memory for the sum of dQ."""
    wanted = list(KERNELS["backward_fallback"])
    if other.get("needs_grad"):
        wanted.remove("backward_dkdv_fallback")
    assert kernels_of(capped, backward_soft_cap(capped, **other)) == wanted
    if other.keys() & {"soft_cap", "has"}:
        assert kernels_of(capped, forward_soft_cap(capped, **other)) == ["forward_fallback"]


def test_a_soft_cap_without_a_gradient_of_the_query(capped):
    """C++ only checks that dK and dV are needed. Without dQ there is no postprocess kernel."""
    kernels = ["backward_sm80_soft_cap" if "sm80" in k else k for k in SM80_BACKWARD[:2]]
    assert kernels_of(capped, backward_soft_cap(capped, needs_grad=2)) == kernels
