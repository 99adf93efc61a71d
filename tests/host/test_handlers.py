"""FFI handlers with valid buffers: which kernels in which order, grids, every argument.

Covers the portable kernels and the mask kernels; test_sm90_handlers.py covers Hopper's. Guards
against arguments in the wrong order, a grid that misses rows, and a size that overflows. Runs on a
fake libcuda (tests/support/cpp): needs the built extension and a C compiler.
"""

from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import CALLS, Sizes, backward, blocks, documents, forward, table_size, with_sinks
from cpp.launches import SIZES, attention, expect_launches, expect_portable_backward, kernels_of
from cpp.machine import arguments, needs_compiler, needs_extension

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]


@pytest.mark.parametrize("s", SIZES)
def test_forward(portable, s):
    call = forward(portable, s, scale=0.0625, mask_mode=1)
    grids = {"forward": lambda m: [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)]}
    expect_launches(portable, call, attention(s, 0.0625, 1), grids)
    assert portable.calls("cuTensorMapEncodeTiled") == 0


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("s", SIZES)
def test_sinks(machine, s, of_batch):
    """The kernels are those of the same calls without sinks; `sink_batch` says that there are some,
    and the address of row_delta that it is needed."""
    for make in (forward, backward):
        plain = make(machine, s)
        call = with_sinks(plain, s.batch if of_batch else 1)
        kernels = kernels_of(machine, plain)
        assert kernels_of(machine, call) == kernels
        launch = machine.launches()[0]
        got = dict(zip(arguments(launch["kernel"]), launch["params"], strict=False))
        addresses = call.addresses()
        if make is forward:
            assert got["sinks"] == addresses["sinks"]
            assert got["sink_batch"] == (s.batch if of_batch else 1)
        else:
            assert got["row_delta"] == addresses["row_delta"] != 0


@pytest.mark.parametrize("has_dlse", [0, 1])
@pytest.mark.parametrize("s", SIZES)
def test_backward(machine, s, has_dlse):
    """With the small workspace, these kernels are also used on Hopper."""
    call = backward(machine, s, scale=1.5, has_dlse=has_dlse, algorithm="portable")
    expect_portable_backward(machine, call, s, has_dlse)


@pytest.mark.parametrize("needs_grad", [0, 1, 2])
def test_backward_of_some(machine, needs_grad):
    """Kernels for gradients that are not needed (frozen keys or query) are not launched."""
    s = SIZES[0]
    call = backward(machine, s, algorithm="portable", needs_grad=needs_grad)
    expect_portable_backward(machine, call, s, 1, needs_grad)


@pytest.mark.parametrize("algorithm", ["sm90_fused", "sm90_separate"])
@pytest.mark.parametrize("s", SIZES)
def test_backward_elsewhere_with_a_large_workspace(portable, s, algorithm):
    """The lowering may choose an algorithm that this GPU lacks, since it may not know the GPU."""
    expect_portable_backward(portable, backward(portable, s, algorithm=algorithm), s)


@pytest.mark.parametrize("compare_positions", [0, 1, 2])
@pytest.mark.parametrize("s", [*SIZES, Sizes(q_len=5, kv_len=512), Sizes(q_len=5, kv_len=513)])
def test_documents(machine, s, compare_positions):
    call = documents(machine, s, compare_positions)
    size = table_size(s.kv_len)
    scalars = {
        "q_len": s.q_len,
        "kv_len": s.kv_len,
        "compare_positions": compare_positions,
        "table_size": size,
        "table_shift": 33 - size.bit_length(),
        "search_steps": s.kv_len.bit_length(),
    }
    grids = {
        "documents_init": lambda n: [ceil(s.kv_len / n), s.mask_batch],
        "documents_runs": lambda n: [ceil(s.kv_len / n), s.mask_batch],
        "documents_rows": lambda n: [ceil(s.q_len / n), s.mask_batch],
    }
    expect_launches(machine, call, scalars, grids)


@pytest.mark.parametrize("s", SIZES)
def test_blocks(machine, s):
    q_blocks, kv_blocks = ceil(s.q_len / 64), ceil(s.kv_len / 64)
    tiles = ceil(max(s.q_len, s.kv_len) / 128)
    grids = {
        "blocks_rows": lambda n: [ceil(q_blocks / n), s.mask_batch],
        "blocks_keys": lambda n: [ceil(kv_blocks / n), s.mask_batch],
        "blocks_order": lambda n: [ceil(tiles / n), s.mask_batch],
    }
    scalars = {"q_len": s.q_len, "kv_len": s.kv_len}
    expect_launches(machine, blocks(machine, s), scalars, grids)


@pytest.mark.parametrize(
    ("name", "mask_batch"),
    [
        ("forward", 0),
        ("forward", 1),
        ("backward", 0),
        ("backward", 1),
        ("documents", 0),
        ("blocks", 0),
    ],
)
def test_empty_batch_launches_nothing(machine, name, mask_batch):
    call = CALLS[name](machine, Sizes(batch=0, mask_batch=mask_batch))
    assert machine.run(call, INITIALIZE) is None
    assert machine.run(call) is None
    assert machine.calls("cuLibraryLoadData") == machine.calls("cuLaunchKernel") == 0


@pytest.mark.parametrize(
    ("mask_mode", "unread"),
    [(0, ("q_ids", "kv_ids", "q_pos", "kv_pos")), (1, ("q_pos", "kv_pos")), (2, ()), (3, ())],
)
def test_unread_operands_may_be_anything(machine, mask_mode, unread):
    """Arrays that a mask lacks are passed as placeholders (kv_start again) and not read."""
    call = forward(machine, mask_mode=mask_mode)
    call = call.change(**dict.fromkeys(unread, call.operands["kv_start"]))
    assert machine.run(call) is None
    call = backward(machine, mask_mode=mask_mode, has_dlse=0)
    call = call.change(**dict.fromkeys(unread, call.operands["kv_start"]))
    assert machine.run(call) is None
