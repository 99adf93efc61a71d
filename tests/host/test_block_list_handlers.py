"""The handlers with a block mask on Hopper, which has dedicated kernels for calls whose only option
is a block mask.

Guards against a block mask that these kernels cannot read (they locate blocks by shifts) or that is
not passed to one of them, and against arguments in the wrong order. Runs on a fake libcuda, as
test_soft_cap_handlers.py.
"""

from math import ceil

import pytest
from cpp.calls import backward_block_lists, forward_block_lists
from cpp.launches import SIZES, attention, expect_launches, kernels_of
from cpp.machine import (
    KERNELS,
    MULTIPROCESSORS,
    make_machine,
    needs_compiler,
    needs_extension,
)
from cpp.sm90 import expect_separate_backward, maps_of
from tiers import once_each

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

MAKE = {"forward": forward_block_lists, "backward": backward_block_lists}
GIVEN = {"scale": ("float32", 0.375), "mask_mode": ("int32", 1)}
# (rows, keys) of a block: powers of two, up to the largest of 31 bits
SIZES_OF_BLOCKS = [(1, 1), (1, 512), (2, 16), (64, 64), (128, 1), (4096, 1 << 30), (1 << 30, 2)]


@pytest.fixture(params=[64, 128, 192, 256])
def sparse(tmp_path, driver, request):
    """A machine with the block-list kernels for its head dims."""
    return make_machine(
        tmp_path,
        driver,
        choose=lambda m: m.has("backward_block_lists") and m.variant["qk_dim"] == request.param,
    )


def block_scalars(blocks):
    return dict(
        zip(("block_mask_batch", "block_mask_heads", "q_block", "kv_block"), blocks, strict=True)
    )


def blocks_of(s, n, size):
    """Block masks with one head or all, and one batch row or all, depending on `n`."""
    return (s.mask_batch if n % 2 else 1, s.heads if n % 3 else 1, *size)


@pytest.mark.parametrize("n,size", list(enumerate(SIZES_OF_BLOCKS)))
@pytest.mark.parametrize("s", SIZES)
def test_forward(sparse, s, n, size):
    """The lists and the order have tiles of 128 rows. The counter is cleared before the launch."""
    assert sparse.row("forward_sm90_block_lists", sparse.variant["cc"])["block"] == 128
    blocks = blocks_of(s, n, size)
    call = forward_block_lists(sparse, s, blocks).change(**GIVEN)
    maps = maps_of(sparse, "forward_sm90_block_lists", {**call.operands, **call.results})
    tiles = s.heads * s.batch * ceil(s.q_len / 128)
    grids = {"forward_sm90_block_lists": lambda m: [min(MULTIPROCESSORS, tiles)]}
    expect_launches(sparse, call, attention(s, 0.375, 1) | maps | block_scalars(blocks), grids)
    clear = {"memset": [call.results["counter"].address, 0, 1], "stream": sparse.xla.stream}
    assert sparse.record()[0] == clear and len(sparse.record()) == 2
    assert sparse.calls("cuLibraryLoadData") == 1  # not the fallback kernel


@pytest.mark.parametrize(
    "s,of_blocks,needs_grad", once_each(SIZES, enumerate(SIZES_OF_BLOCKS[1:4]), range(4)), ids=str
)
def test_backward(sparse, s, of_blocks, needs_grad):
    """Nothing is accumulated in memory. dK and dV use the lists of keys, dQ those of rows."""
    n, size = of_blocks
    blocks = blocks_of(s, n, size)
    call = backward_block_lists(sparse, s, blocks, needs_grad=needs_grad, has_dlse=n % 2)
    call = call.change(**GIVEN)
    for kernel in ("backward_dkdv_sm90_block_lists", "backward_dq_sm90_block_lists"):
        half = "dkdv" in kernel and sparse.variant["qk_dim"] == 256
        assert sparse.row(kernel, sparse.variant["cc"])["block"] == (64 if half else 128)
    more = block_scalars(blocks) | {"has_dlse": n % 2}
    expect_separate_backward(sparse, s, call, needs_grad, "_block_lists", **more)


# Changes that make a call with only a block mask take the fallback kernels.
OTHERS = {
    "rows of a block by threes": {"blocks": (1, 6, 3, 32)},
    "keys of a block by twenties": {"blocks": (1, 6, 4, 20)},
    "one less than a power of two": {"blocks": (1, 1, 127, 128)},
    "one more": {"blocks": (1, 1, 128, 129)},
    "a soft cap": {"soft_cap": 50.0},
    "a scale from a buffer": {"has": (1, 0)},
    "a bias": {"has": (0, 1)},
    "other head dims": {"dims": (72, 72)},
}


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("what", OTHERS)
def test_what_takes_the_fallback_kernels(sparse, direction, what):
    assert kernels_of(sparse, MAKE[direction](sparse)) == sparse.kernels(f"{direction}_block_lists")
    got = kernels_of(sparse, MAKE[direction](sparse, **OTHERS[what]))
    assert got == KERNELS[f"{direction}_fallback"]


def test_without_a_block_mask_it_is_a_plain_call(sparse):
    plain = forward_block_lists(sparse, blocks=None)
    assert kernels_of(sparse, plain) == [sparse.forward_of(SIZES[0])]
    call = backward_block_lists(sparse, blocks=None)
    assert kernels_of(sparse, call) == sparse.kernels("backward_separate")


def test_largest_logits_and_gradients_of_score_params_take_the_fallback_kernels(sparse):
    assert (
        kernels_of(sparse, forward_block_lists(sparse, needs_row_max=1))
        == KERNELS["forward_fallback"]
    )
    call = backward_block_lists(sparse, score_grads=1)
    assert kernels_of(sparse, call) == KERNELS["backward_fallback"]


@pytest.mark.parametrize("direction", MAKE)
@pytest.mark.parametrize("dims", [(192, 192), (512, 512)])
def test_head_dims_without_such_kernels(tmp_path, driver, direction, dims):
    """Hopper has only plain kernels for these head dims."""
    machine = make_machine(
        tmp_path,
        driver,
        choose=lambda m: m.has_sm90() and (m.variant["qk_dim"], m.variant["v_dim"]) == dims,
    )
    call = MAKE[direction](machine)
    assert kernels_of(machine, call) == KERNELS[f"{direction}_fallback"]


@pytest.mark.parametrize("direction", MAKE)
def test_float32(sparse, direction):
    if not any(v["dtype"] == "f32" for v in sparse.ext.variants()):
        pytest.skip("this build has no such kernel")
    call = MAKE[direction](sparse, dtype="float32", float32=1)
    assert kernels_of(sparse, call) == KERNELS[f"{direction}_fallback"]


@pytest.mark.parametrize("needs_grad", [1, 2, 3])
def test_the_algorithm_says_which_kernels(sparse, needs_grad):
    """A workspace with the sum of dQ changes nothing, since no kernel uses the sum."""

    def kept(kernels):
        """The kernels whose results are needed."""
        shared = ("backward_preprocess", "backward_delta_fallback")
        return [k for k in kernels if k in shared or needs_grad & (1 if "_dq_" in k else 2)]

    own, fallback = sparse.kernels("backward_block_lists"), KERNELS["backward_fallback"]
    for algorithm, kernels in (
        ("sm90_fused", own),
        ("sm90_separate", own),
        ("portable", fallback),
    ):
        call = backward_block_lists(sparse, needs_grad=needs_grad, algorithm=algorithm)
        assert kernels_of(sparse, call) == kept(kernels), algorithm
