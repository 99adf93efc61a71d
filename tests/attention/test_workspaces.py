"""The backward's algorithm and the size of its workspace, by device, request and build.

Guards against a workspace whose size does not match the algorithm, which C++ rejects, and against a
program that cannot use the kernels of its target GPU.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from lowered import KEY, MASK, PORTABLE, QUERY, abstract, calls, loss, text_of, with_sm90
from packax._src.ops import ffi

pytestmark = pytest.mark.usefixtures("extension")

PADDED = 320
SMALL = 2 * 8 * PADDED  # workspace of the portable backward kernels
LARGE = 2 * SMALL + 2 * 2 * PADDED + 64 * SMALL  # of Hopper's fused kernel
MIDDLE = 2 * SMALL + 2 * 2 * PADDED + 1  # of Hopper's separate dK/dV and dQ kernels


algorithms: list[str] = []  # the algorithm of each call of backward_workspace


def backward_workspace(
    monkeypatch, rows, capabilities=None, tensors=None, mask=MASK, **kwargs
):  # fmt: skip
    """Elements of the backward's float32 workspace, its last result, for the given local
    capabilities."""
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: rows))
    monkeypatch.setattr(ffi, "local_capabilities", lambda: capabilities)
    gradient = jax.grad(lambda *x: loss(*x, **kwargs), (0, 1, 2))
    text = text_of(gradient, *(tensors or abstract()), mask)
    (_, (target, attributes, _, results)) = calls(text)
    assert target == "packax_backward_v1" and len(results) == 7
    assert "deterministic" not in attributes  # the algorithm implies it
    algorithms.append(attributes["algorithm"].strip('"'))
    (elements,) = re.fullmatch(r"(\d+)xf32", results[-1]).groups()
    return int(elements)


APART = ("backward_sm90", "backward_dkdv_sm90", "backward_dq_sm90")
SOFT_CAP = tuple(f"{kernel}_soft_cap" for kernel in APART)
ALIBI = ("backward_sm90_alibi",)
BLOCK_SPARSE = tuple(f"{kernel}_block_lists" for kernel in APART[1:])
SLOPES = np.ones(8)
SLOPED = {"bias": packax.alibi(SLOPES)}
PLACED = {"bias": packax.alibi(SLOPES, positions=np.arange(300))}
CAPPED = {"soft_cap": 30.0}
OF_ARRAY = {"scale": jnp.float32(0.1)}
EXACT = {"deterministic": True}


def block_sparse_mask(size=(64, 64)):
    block_mask = np.ones((2, 1, *(-(-300 // n) for n in size)), bool)
    return packax.create_attention_mask(
        packax.masks.block_sparse(block_mask, size), q_len=300, kv_len=300
    )


FOR_90 = [  # kernels for Hopper in the build, options, and the elements of the workspace on Hopper
    (("backward_sm90",), {}, LARGE),
    (("backward_sm90",), EXACT, SMALL),
    (("backward_sm90",), {"deterministic": np.bool_(True)}, SMALL),
    (SOFT_CAP[:1], CAPPED, LARGE),
    (SOFT_CAP[:1], CAPPED | EXACT, SMALL),
    (SOFT_CAP, CAPPED, LARGE),
    (SOFT_CAP, CAPPED | EXACT, MIDDLE),
    (SOFT_CAP[1:], CAPPED, MIDDLE),  # as for head dim 256
    (APART, CAPPED, SMALL),  # as for 192/128: kernels without a cap do not count
    (SOFT_CAP, {}, SMALL),  # nor do those with a cap for a call without one
    (APART + SOFT_CAP, CAPPED | SLOPED, SMALL),
    (APART + SOFT_CAP, CAPPED | OF_ARRAY, SMALL),
    (APART + SOFT_CAP, SLOPED, SMALL),  # kernels without a bias do not count
    (ALIBI, SLOPED, LARGE),
    (ALIBI, SLOPED | {"scale": -0.5}, LARGE),  # the sign goes into the query
    (ALIBI, SLOPED | EXACT, SMALL),
    (ALIBI, PLACED, SMALL),
    (ALIBI + SOFT_CAP, SLOPED | CAPPED, SMALL),
    (ALIBI, SLOPED | OF_ARRAY, SMALL),
]
OF_MAPS = [  # the same with a block mask; block sizes are left to the handler
    (BLOCK_SPARSE, {}, MIDDLE),  # there is no fused kernel
    (BLOCK_SPARSE, EXACT, MIDDLE),
    (BLOCK_SPARSE, {"scale": -0.5}, MIDDLE),
    (APART + SOFT_CAP, {}, SMALL),  # kernels without block lists do not count
    (APART + SOFT_CAP + BLOCK_SPARSE, CAPPED, SMALL),
    (APART + SOFT_CAP + BLOCK_SPARSE, SLOPED, SMALL),
    (APART + SOFT_CAP + BLOCK_SPARSE, OF_ARRAY, SMALL),
]
WIDE = abstract(dim=192, v_dim=128)
DIMS = [  # kernels and their head dims, tensors, and the elements of the workspace on Hopper
    (with_sm90(dims=[(128, 128)]), {}, LARGE + 64 * SMALL),
    (with_sm90(), {"tensors": abstract(jnp.float16)}, SMALL),
    (with_sm90(), {"tensors": abstract(dim=128, v_dim=128)}, LARGE + 64 * SMALL),
    (with_sm90(), {"tensors": WIDE}, LARGE + 128 * SMALL),  # dQ has the query's head dim
    (with_sm90(), {"tensors": abstract(dim=256, v_dim=256)}, SMALL),
    (with_sm90(dims=[(192, 128)], kernels=APART[1:]), {"tensors": WIDE}, MIDDLE),
    (with_sm90(dims=[(192, 128)], kernels=APART[1:]), {"tensors": WIDE} | EXACT, MIDDLE),
    (with_sm90(kernels=BLOCK_SPARSE), {}, SMALL),
    (with_sm90(kernels=BLOCK_SPARSE), CAPPED, SMALL),
]


@pytest.mark.parametrize("capability", [90, 80])
def test_workspace_by_kernels_and_options(monkeypatch, capability):
    """Hopper's kernels, where they serve the call; elsewhere the portable ones."""
    tables = [(with_sm90(kernels=kernels), *row) for kernels, *row in FOR_90]
    of_map = {"mask": block_sparse_mask()}
    tables += [(with_sm90(kernels=kernels), x | of_map, n) for kernels, x, n in OF_MAPS]
    for rows, options, elements in [*tables, *DIMS]:
        got = backward_workspace(monkeypatch, rows, {capability}, **options)
        assert got == (elements if capability == 90 else SMALL), (rows[-1], options)
        if got in (SMALL, LARGE, MIDDLE):
            of = {SMALL: "portable", LARGE: "sm90_fused", MIDDLE: "sm90_separate"}
            assert algorithms[-1] == of[got]


@pytest.mark.parametrize(
    "capabilities,large",
    [(None, True), ({80, 90}, True), ({100, 120}, False)],
)
def test_workspace_by_device(monkeypatch, capabilities, large):
    """Without a local GPU, the program may be compiled for any."""
    elements = backward_workspace(monkeypatch, with_sm90(), capabilities)
    assert elements == (LARGE if large else SMALL)
    assert backward_workspace(monkeypatch, PORTABLE) == SMALL


def test_workspace_where_a_kernel_does_not_fit(monkeypatch):
    """A kernel for 8.0 may need more shared memory than 8.6 and 8.9 have, and one for 8.6, unlike
    sm_90a, runs on later minor versions."""
    rows = [row | {"shared": 102_400} for row in with_sm90(80, arch_specific=False)]
    for cc, elements in ((80, LARGE), (86, SMALL), (89, SMALL)):
        assert backward_workspace(monkeypatch, rows, {cc}) == elements
    rows = with_sm90(cc=86, arch_specific=False)
    for cc, elements in ((86, LARGE), (89, LARGE), (80, SMALL), (90, SMALL)):
        assert backward_workspace(monkeypatch, rows, {cc}) == elements


@pytest.mark.parametrize("capabilities", [None, {90}, {80}])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_exported_program_is_for_any_device(monkeypatch, capabilities, deterministic):
    """The exporting machine does not matter: the workspace has room for Hopper's kernels."""
    rows = with_sm90(kernels=APART)
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: rows))
    monkeypatch.setattr(ffi, "local_capabilities", lambda: capabilities)
    gradient = jax.grad(lambda *x: loss(*x, MASK, deterministic=deterministic), (0, 1, 2))
    text = (
        jax.export.export(
            jax.jit(gradient), platforms=["cuda"], disabled_checks=packax.export_checks()
        )(*abstract())
        .mlir_module()
    )  # fmt: skip
    (_, (_, attributes, _, results)) = calls(text)
    algorithm, elements = ("sm90_separate", MIDDLE) if deterministic else ("sm90_fused", LARGE)
    assert attributes["algorithm"] == f'"{algorithm}"' and results[-1] == f"{elements}xf32"


@pytest.mark.parametrize("capability,large", [(90, True), (80, False)])
def test_workspace_of_kernels_apart(monkeypatch, capability, large):
    """Used for deterministic gradients and for a subset of the gradients; not available for all
    head dims."""
    rows = with_sm90(dims=[(192, 128)]) + with_sm90(dims=[(64, 64)], kernels=APART)
    local = {capability}
    sums = 2 * SMALL + 2 * 2 * PADDED + 1 if large else SMALL
    assert backward_workspace(monkeypatch, rows, local, deterministic=True) == sums
    assert algorithms[-1] == ("sm90_separate" if large else "portable")
    wide = abstract(dim=192, v_dim=128)
    assert backward_workspace(monkeypatch, rows, local, wide, deterministic=True) == SMALL
    text = text_of(jax.grad(lambda *x: loss(*x, MASK), (1, 2)), *abstract())
    (_, (_, attributes, _, results)) = calls(text)
    assert attributes["needs_grad"] == "2 : i32"
    assert results == ["0xbf16", KEY, KEY, *["0xf32"] * 3, f"{sums}xf32"]
    text = text_of(jax.grad(lambda *x: loss(*x, MASK), (0, 2)), *abstract())
    assert calls(text)[1][3][-1] == f"{LARGE if large else SMALL}xf32"  # the kernels write dk, too
    text = text_of(jax.grad(lambda *x: loss(*x, MASK)), *abstract())
    (_, (_, attributes, _, results)) = calls(text)
    assert attributes["needs_grad"] == "1 : i32"
    assert results == [QUERY, "0xbf16", "0xbf16", *["0xf32"] * 3, f"{sums}xf32"]


def test_workspace_of_the_gradient_of_slopes(monkeypatch):
    """Only the fallback kernels compute it, and then all other gradients too."""
    rows = with_sm90(kernels=ALIBI)
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: rows))
    for arguments, workspace in (((0, 1, 2), LARGE), ((0, 1, 2, 3), SMALL)):
        gradient = jax.grad(lambda *x: loss(*x[:3], MASK, bias=packax.alibi(x[3])), arguments)
        slopes = jax.ShapeDtypeStruct((8,), jnp.float32)
        (_, (_, _, _, results)) = calls(text_of(gradient, *abstract(), slopes))
        assert results[-1] == f"{workspace}xf32"


def test_some_gradients_of_a_map(monkeypatch):
    """Gradients that no kernel writes have no elements."""
    rows, mask = with_sm90(kernels=BLOCK_SPARSE), block_sparse_mask((4, 1))
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: rows))
    for argument, written in {0: [QUERY, *["0xbf16"] * 2], 1: ["0xbf16", KEY, KEY]}.items():
        gradient = jax.grad(lambda *x: loss(*x, mask), argument)
        (_, (target, attributes, _, results)) = calls(text_of(gradient, *abstract()))
        assert target == "packax_backward_v1"
        assert attributes["needs_grad"] == f"{1 + argument} : i32"
        assert (attributes["q_block"], attributes["kv_block"]) == ("4 : i32", "1 : i32")
        sums = MIDDLE  # depends on the mask's batch size, not on the block mask's
        assert results == [*written, *["0xf32"] * 3, f"{sums}xf32"]


def test_some_gradients_of_a_soft_cap(monkeypatch):
    """Gradients that no kernel writes have no elements; the fused kernel always writes dk and dv
    with dq."""
    kinds = {
        SOFT_CAP: (f"{MIDDLE}xf32", {0: [QUERY, *["0xbf16"] * 2], 1: ["0xbf16", KEY, KEY]}),
        SOFT_CAP[:1]: (f"{LARGE}xf32", {0: [QUERY, KEY, KEY], 1: ["0xbf16", KEY, KEY]}),
    }
    for kernels, (workspace, results) in kinds.items():
        monkeypatch.setattr(
            ffi.ext, "variants", staticmethod(lambda k=kernels: with_sm90(kernels=k))
        )
        for argument, written in results.items():
            gradient = jax.grad(lambda *x: loss(*x, MASK, soft_cap=30.0), argument)
            (_, (target, attributes, _, outputs)) = calls(text_of(gradient, *abstract()))
            assert target == "packax_backward_v1"
            assert attributes["needs_grad"] == f"{1 + argument} : i32"
            assert outputs == [*written, *["0xf32"] * 3, workspace]


def test_workspace_with_one_mask_for_all(monkeypatch):
    mask = packax.create_attention_mask(packax.causal(), q_len=300, kv_len=300)
    assert backward_workspace(monkeypatch, with_sm90(), mask=mask) == LARGE - 2 * PADDED


@pytest.mark.parametrize("length,large", [((1 << 22) - 64, True), (1 << 22, False)])
def test_workspace_up_to_32_bits(monkeypatch, length, large):
    """The limit is 2^31 rows over all heads: 64 * 8 * 2^22. The workspace may have more
    elements."""
    tensors = abstract(q_len=length, kv_len=64, batch=64)
    mask = jax.eval_shape(  # concrete mask arrays would take half a minute to print
        lambda: packax.create_attention_mask(packax.full(), q_len=length, kv_len=64)
    )
    rows = 64 * 8 * length
    elements = backward_workspace(monkeypatch, with_sm90(), tensors=tensors, mask=mask)
    assert elements == (2 * rows + 2 * length + 64 * rows if large else rows)


def test_capabilities_of_this_process(monkeypatch):
    class Device:
        def __init__(self, text):
            self.compute_capability = text

    assert ffi.local_capabilities() is None  # the CPU suite has no GPU
    for texts, found in ((["9.0", "8.6", "9.0"], {90, 86}), (["12.1"], {121}), ([], None)):
        devices = [Device(t) for t in texts]
        monkeypatch.setattr(jax, "local_devices", lambda *, backend, devices=devices: devices)
        assert ffi.local_capabilities() == found
