"""Calls whose only option is a soft cap, ALiBi of indices or a block mask, on Hopper, which has
dedicated kernels for them: every argument, and which calls take which kernels.

Guards against calls that reach a kernel which ignores one of their options, against a block mask
that these kernels cannot read (they locate blocks by shifts), and against arguments in the wrong
order. Runs on a fake libcuda, as test_sm90_handlers.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import (
    BLOCKS,
    backward_alibi,
    backward_block_lists,
    backward_soft_cap,
    forward_alibi,
    forward_block_lists,
    forward_soft_cap,
)
from cpp.launches import SIZES, kernels_of
from cpp.machine import KERNELS, arguments, make_machine, needs_compiler, needs_extension
from cpp.sm90 import expect_forward, expect_one_backward, expect_separate_backward
from tiers import once_each

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

GIVEN = {"scale": ("float32", 0.375), "mask_mode": ("int32", 1)}
# (rows, keys) of a block: powers of two, up to the largest of 31 bits
BLOCK_SIZES = [(1, 1), (1, 512), (2, 16), (64, 64), (128, 1), (4096, 1 << 30), (1 << 30, 2)]


@dataclass(frozen=True)
class Option:
    make: dict[str, Any]  # forward and backward calls
    forward: dict[int, int]  # head dim -> rows of a tile
    fused: tuple[int, ...]  # head dims with one kernel for all gradients
    separate: dict[int, int]  # head dim -> keys of a tile of dK and dV
    given: dict[str, Any]  # the option's own arguments of the kernels
    own: list[dict[str, Any]]  # changes of a call that keep these kernels
    general: list[dict[str, Any]]  # changes that make it take the fallback kernels
    none: dict[str, Any]  # the change that makes it a plain call


OPTIONS = {
    "soft_cap": Option(
        {"forward": forward_soft_cap, "backward": backward_soft_cap},
        {64: 192, 128: 128, 256: 128}, (64, 128), {64: 128, 128: 128, 256: 64},
        {"soft_cap": 50.0},
        [{"soft_cap": 0.25}, {"soft_cap": 1.0}, {"soft_cap": 1024.0}],
        [
            {"soft_cap": float(np.nextafter(np.float32(1024), np.float32(2048)))},
            {"has": (1, 0)}, {"has": (0, 1)}, {"blocks": BLOCKS}, {"dims": (264, 264)},
        ],
        {"soft_cap": 0.0},
    ),
    "alibi": Option(
        {"forward": forward_alibi, "backward": backward_alibi},
        {64: 192, 128: 128}, (64, 128), {}, {}, [],
        [
            {"has": (1, 1)},  # positions that are arrays
            {"batches": (1, 2)},  # slopes for every row of the batch
            {"soft_cap": 30.0}, {"blocks": BLOCKS}, {"dims": (192, 128)}, {"dims": (256, 256)},
        ],
        {"has": (0, 0)},
    ),
    "block_lists": Option(
        {"forward": forward_block_lists, "backward": backward_block_lists},
        {64: 128, 128: 128, 192: 128, 256: 128}, (), {64: 128, 128: 128, 192: 128, 256: 64},
        {}, [],
        [
            *({"blocks": (1, 6, *size)} for size in ((3, 32), (4, 20))),
            *({"blocks": (1, 1, *size)} for size in ((127, 128), (128, 129))),
            {"soft_cap": 50.0}, {"has": (1, 0)}, {"has": (0, 1)}, {"dims": (512, 512)},
        ],
        {"blocks": None},
    ),
}  # fmt: skip
BLOCK_SCALARS = ("block_mask_batch", "block_mask_heads", "q_block", "kv_block")


def machine_of(folder, driver, name, qk_dim=None, separate=False):
    backward = (
        "backward_separate_soft_cap" if separate and name == "soft_cap" else f"backward_{name}"
    )
    kernels = f"forward_{name}" if qk_dim == 256 and not separate else backward
    return make_machine(
        folder,
        driver,
        choose=lambda m: m.has(kernels) and qk_dim in (None, m.variant["qk_dim"]),
    )


def dims_and_tiles(tiles):
    return [(name, *row) for name, of in OPTIONS.items() for row in getattr(of, tiles).items()]


def variants_of(name, s, block_sizes=BLOCK_SIZES):
    """(arguments of a call with the option, the option's arguments of the kernels). Block masks
    have one head or all, and one batch row or all."""
    if name != "block_lists":
        return [({}, OPTIONS[name].given)]
    blocks = [
        (s.mask_batch if n % 2 else 1, s.heads if n % 3 else 1, *size)
        for n, size in enumerate(block_sizes)
    ]
    return [({"blocks": x}, dict(zip(BLOCK_SCALARS, x, strict=True))) for x in blocks]


@pytest.mark.parametrize("name,qk_dim,block", dims_and_tiles("forward"))
@pytest.mark.parametrize("s", SIZES)
def test_forward(tmp_path, driver, s, name, qk_dim, block):
    for n, (option, given) in enumerate(variants_of(name, s)):
        (folder := tmp_path / str(n)).mkdir()
        machine = machine_of(folder, driver, name, qk_dim)
        call = OPTIONS[name].make["forward"](machine, s, **option).change(**GIVEN)
        expect_forward(machine, s, call, f"forward_sm90_{name}", block, **given)


@pytest.mark.parametrize("has_dlse", [0, 1])
@pytest.mark.parametrize(
    "name,qk_dim", [(name, dim) for name, of in OPTIONS.items() for dim in of.fused]
)
@pytest.mark.parametrize("s", SIZES)
def test_backward(tmp_path, driver, s, name, qk_dim, has_dlse):
    machine = machine_of(tmp_path, driver, name, qk_dim)
    call = OPTIONS[name].make["backward"](machine, s, has_dlse=has_dlse).change(**GIVEN)
    kernel = f"backward_sm90_{name}"
    expect_one_backward(machine, s, call, kernel, has_dlse, **OPTIONS[name].given)


@pytest.mark.parametrize(
    "dims,s,needs_grad", once_each(dims_and_tiles("separate"), SIZES, range(4)), ids=str
)
def test_separate_backward(tmp_path, driver, s, dims, needs_grad):
    """Used for `deterministic=True`, for only some of the gradients, and for head dim 256. Nothing
    is accumulated in memory. dK and dV use a block mask's lists of keys, dQ those of rows."""
    name, qk_dim, block = dims
    for n, (option, given) in enumerate(variants_of(name, s, BLOCK_SIZES[1:4])):
        (folder := tmp_path / str(n)).mkdir()
        machine = machine_of(folder, driver, name, qk_dim, separate=True)
        for kernel, tile in (("dkdv", block), ("dq", 128)):
            row = machine.row(f"backward_{kernel}_sm90_{name}", machine.variant["cc"])
            assert row["block"] == tile
        more = option | {"algorithm": "sm90_separate", "needs_grad": needs_grad}
        has_dlse = int(name != "block_lists" or n % 2)
        more |= {"has_dlse": has_dlse}
        call = OPTIONS[name].make["backward"](machine, s, **more).change(**GIVEN)
        given = given | {"has_dlse": has_dlse}
        expect_separate_backward(machine, s, call, needs_grad, f"_{name}", **given)


def rows():
    """(option, head dim or None for the smallest, direction, change) -> kernels; None: the
    fallback kernels."""
    for name, option in OPTIONS.items():
        for dim in option.forward if name == "block_lists" else (None,):
            for direction in ("forward", "backward"):
                own, of = f"{direction}_{name}", (name, dim, direction)
                yield from ((*of, change, own) for change in ({}, *option.own))
                yield from ((*of, change, None) for change in option.general)
                yield (*of, {"dtype": "float32", "float32": 1}, None)
                plain = "backward_separate" if name == "block_lists" else "backward"
                yield (*of, option.none, "forward" if direction == "forward" else plain)
            if dim in (None, 64):  # fewer columns than the kernel has
                yield name, dim, "forward", {"dims": (56, 40)}, f"forward_{name}"
            yield name, dim, "forward", {"needs_row_max": 1}, None
            yield name, dim, "backward", {"score_grads": 1}, None
            # ALiBi has only a fused kernel. No kernel for block masks uses the sum of dQ, so a
            # workspace with it changes nothing.
            apart = {"soft_cap": "backward_separate_soft_cap", "alibi": None}.get(name, own)
            for algorithm, kernels in (("sm90_fused", own), ("sm90_separate", apart),
                    ("portable", None)):  # fmt: skip
                for needs_grad in (3,) if name != "block_lists" else (1, 2, 3):
                    change = {"algorithm": algorithm, "needs_grad": needs_grad}
                    yield name, dim, "backward", change, kernels
            if option.fused:  # it always writes dk and dv; only dq needs a postprocess kernel
                yield name, dim, "backward", {"needs_grad": 1}, own
                yield name, dim, "backward", {"needs_grad": 2}, f"{own} without dq"


@pytest.fixture(scope="module")
def machines(tmp_path_factory, driver):
    found = {}

    def of(name, qk_dim):
        if (name, qk_dim) not in found:
            folder = tmp_path_factory.mktemp("machine")
            found[name, qk_dim] = machine_of(folder, driver, name, qk_dim)
        return found[name, qk_dim]

    return of


def general(direction, needs_grad):
    bits = {"backward_dkdv_fallback": 2, "backward_dq_fallback": 1}
    return [k for k in KERNELS[f"{direction}_fallback"] if bits.get(k, 3) & needs_grad]


def require_fallback(machine, dims, dtype):
    have = [v for v in machine.ext.variants() if v["kernel"] == "forward_fallback"]
    if not any(
        v["dtype"] == dtype and v["qk_dim"] >= dims[0] and v["v_dim"] >= dims[1] for v in have
    ):
        pytest.skip("this build has no such kernel")


@pytest.mark.parametrize("name,dim,direction,change,expected", list(rows()), ids=str)
def test_which_kernels(machines, name, dim, direction, change, expected):
    machine = machines(name, dim)
    v = machine.variant
    needs_grad = change.get("needs_grad", 3)
    if expected is None:
        dims = change.get("dims", (v["qk_dim"], v["v_dim"]))
        require_fallback(machine, dims, "f32" if "float32" in change else v["dtype"])
        kernels = general(direction, needs_grad)
    elif expected == "forward":
        kernels = [machine.forward_of(SIZES[0])]
    else:
        kernels = machine.kernels(expected.removesuffix(" without dq"))
        if "block_lists" in expected:
            bits = {"dkdv": 2, "dq": 1}
            kernels = [k for k in kernels if bits.get(k.split("_")[1], 3) & needs_grad]
        elif expected.endswith("dq"):
            kernels = kernels[:-1]
    assert kernels_of(machine, OPTIONS[name].make[direction](machine, **change)) == kernels
    for launch in machine.launches():
        if launch["kernel"].endswith("_soft_cap"):
            at = arguments(launch["kernel"]).index("soft_cap")
            assert launch["params"][at] == change.get("soft_cap", 50.0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_scale_that_overflows_in_units_of_the_cap(machines, direction):
    """3e38 / 0.5 is infinite, and its product with a score of 0 would be NaN."""
    machine, make = machines("soft_cap", None), OPTIONS["soft_cap"].make[direction]
    for soft_cap, kernels in (
        (2.0, machine.kernels(f"{direction}_soft_cap")),
        (0.5, KERNELS[f"{direction}_fallback"]),
    ):
        call = make(machine, soft_cap=soft_cap).change(scale=("float32", 3e38))
        assert kernels_of(machine, call) == kernels


@pytest.mark.parametrize("needs_row_max", [0, 1])
def test_without_largest_logits_their_address_is_null(machines, needs_row_max):
    """Their result then has no elements, and another array may begin at its address."""
    machine = machines("soft_cap", None)
    call = forward_soft_cap(machine, needs_row_max=needs_row_max, has=(0, 1))
    assert kernels_of(machine, call) == KERNELS["forward_fallback"]
    (launch,) = machine.launches()
    got = dict(zip(arguments("forward_fallback"), launch["params"], strict=False))
    assert got["row_max"] == (call.addresses()["row_max"] if needs_row_max else 0)
    assert got["lse"] == call.addresses()["lse"] != 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", OPTIONS)
def test_another_gpu(portable, name, direction):
    call = OPTIONS[name].make[direction](portable)
    assert kernels_of(portable, call) == KERNELS[f"{direction}_fallback"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", OPTIONS)
def test_initialize_loads_what_execute_launches(tmp_path, driver, name, direction):
    machine = machine_of(tmp_path, driver, name)
    call = OPTIONS[name].make[direction](machine)
    assert machine.run(call, INITIALIZE) is None
    assert machine.record() == []
    own = machine.kernels(f"{direction}_{name}")
    assert machine.calls("cuLibraryLoadData") == len(own)
    machine.fail("cuLibraryLoadData", 1)
    assert kernels_of(machine, call) == own
