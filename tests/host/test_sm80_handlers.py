"""The backward's handler where the kernels of mma.sync add dQ up in memory: sections of the
workspace, every argument, and which calls take others.

Guards against a section in another place than the kernels have it. Runs on a fake libcuda
(tests/support/cpp): needs the built extension and a C compiler.
"""

from math import ceil, prod

import pytest
from cpp.calls import backward
from cpp.launches import SIZES, attention, expect_launches, expect_portable_backward
from cpp.machine import make_machine, needs_compiler, needs_extension
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
    assert sm80.calls("cuLibraryLoadData") == 3  # not the portable ones


@pytest.mark.parametrize(
    "call",
    [{"algorithm": "portable"}, {"algorithm": "sm90_separate"}, {"needs_grad": 1}],
    ids=str,
)
def test_the_portable_kernels_take_the_others(sm80, call):
    """No room for the sum, the same bits every run, or dQ alone."""
    s = SIZES[0]
    expect_portable_backward(
        sm80, backward(sm80, s, **call), s, needs_grad=call.get("needs_grad", 3)
    )
