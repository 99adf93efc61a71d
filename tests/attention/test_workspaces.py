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


@pytest.mark.parametrize(
    "capabilities,large",
    [(None, True), ({90}, True), ({80, 90}, True), ({80}, False), ({100, 120}, False)],
)
def test_workspace_by_device(monkeypatch, capabilities, large):
    """Without a local GPU, the program may be compiled for any."""
    elements = backward_workspace(monkeypatch, with_sm90(), capabilities)
    assert elements == (LARGE if large else SMALL)
    assert algorithms[-1] == ("sm90_fused" if large else "portable")


def test_workspace_where_a_kernel_does_not_fit(monkeypatch):
    """A kernel for 8.0 may need more shared memory than 8.6 and 8.9 have."""
    rows = [row | {"shared": 102_400} for row in with_sm90(80, arch_specific=False)]
    for cc, elements in ((80, LARGE), (86, SMALL), (89, SMALL)):
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


def test_workspace_by_request(monkeypatch):
    for flag, elements in ((True, SMALL), (False, LARGE), (np.bool_(True), SMALL)):
        assert backward_workspace(monkeypatch, with_sm90(), deterministic=flag) == elements
        assert algorithms[-1] == ("portable" if flag else "sm90_fused")


APART = ("backward_sm90", "backward_dkdv_sm90", "backward_dq_sm90")


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


def test_workspace_of_kernels_apart_alone(monkeypatch):
    """Without a fused kernel the separate kernels compute all gradients, deterministic or not."""
    rows = with_sm90(dims=[(192, 128)], kernels=APART[1:])
    wide = abstract(dim=192, v_dim=128)
    for capability, elements in ((90, 2 * SMALL + 2 * 2 * PADDED + 1), (80, SMALL)):
        for flag in (False, True):
            got = backward_workspace(monkeypatch, rows, {capability}, wide, deterministic=flag)
            assert got == elements


def test_workspace_by_build(monkeypatch):
    assert backward_workspace(monkeypatch, PORTABLE) == SMALL
    assert backward_workspace(monkeypatch, with_sm90(dims=[(128, 128)])) == LARGE + 64 * SMALL
    assert backward_workspace(monkeypatch, with_sm90(), tensors=abstract(jnp.float16)) == SMALL
    large = backward_workspace(monkeypatch, with_sm90(), tensors=abstract(dim=128, v_dim=128))
    assert large == LARGE + 64 * SMALL
    large = backward_workspace(monkeypatch, with_sm90(), tensors=abstract(dim=192, v_dim=128))
    assert large == LARGE + 128 * SMALL  # dQ has the query's head dim
    wide = abstract(dim=256, v_dim=256)
    assert backward_workspace(monkeypatch, with_sm90(), tensors=wide) == SMALL
    rows = with_sm90(cc=86, arch_specific=False)  # unlike sm_90a, also matches later minor versions
    for capability, elements in ((86, LARGE), (89, LARGE), (80, SMALL), (90, SMALL)):
        assert backward_workspace(monkeypatch, rows, {capability}) == elements


SOFT_CAP = tuple(f"{kernel}_soft_cap" for kernel in APART)


@pytest.mark.parametrize(
    "kernels,options,elements",
    [
        (SOFT_CAP[:1], {"soft_cap": 30.0}, LARGE),
        (SOFT_CAP[:1], {"soft_cap": 30.0, "deterministic": True}, SMALL),
        (SOFT_CAP, {"soft_cap": 30.0}, LARGE),
        (SOFT_CAP, {"soft_cap": 30.0, "deterministic": True}, MIDDLE),
        (SOFT_CAP[1:], {"soft_cap": 30.0}, MIDDLE),  # as for head dim 256
        (APART, {"soft_cap": 30.0}, SMALL),  # as for 192/128: kernels without a cap do not count
        (APART + SOFT_CAP, {"soft_cap": 30.0, "bias": packax.alibi(np.ones(8))}, SMALL),
        (APART + SOFT_CAP, {"soft_cap": 30.0, "scale": jnp.float32(0.1)}, SMALL),
        (APART + SOFT_CAP, {"bias": packax.alibi(np.ones(8))}, SMALL),
    ],
)
@pytest.mark.parametrize("capability", [90, 80])
def test_workspace_of_a_soft_cap(monkeypatch, capability, kernels, options, elements):
    """Hopper's kernels with a soft cap, where no other option is used."""
    rows = with_sm90(kernels=kernels)
    got = backward_workspace(monkeypatch, rows, {capability}, **options)
    assert got == (elements if capability == 90 else SMALL)


def test_workspace_of_a_soft_cap_without_a_cap(monkeypatch):
    """Kernels with a cap do not serve a call without one."""
    assert backward_workspace(monkeypatch, with_sm90(kernels=SOFT_CAP)) == SMALL


ALIBI = ("backward_sm90_alibi",)
SLOPES = np.ones(8)


@pytest.mark.parametrize(
    "kernels,options,elements",
    [
        (ALIBI, {}, LARGE),
        (ALIBI, {"scale": -0.5}, LARGE),  # the sign goes into the query
        (ALIBI, {"deterministic": True}, SMALL),
        (APART + SOFT_CAP, {}, SMALL),  # kernels without a bias do not count
        (ALIBI, {"bias": packax.alibi(SLOPES, positions=np.arange(300))}, SMALL),
        (ALIBI + SOFT_CAP, {"soft_cap": 30.0}, SMALL),
        (ALIBI, {"scale": jnp.float32(0.1)}, SMALL),
    ],
)
@pytest.mark.parametrize("capability", [90, 80])
def test_workspace_of_a_bias(monkeypatch, capability, kernels, options, elements):
    """Hopper's kernels with slopes over indices, where no other option is used."""
    options = {"bias": packax.alibi(SLOPES), **options}
    rows = with_sm90(kernels=kernels)
    got = backward_workspace(monkeypatch, rows, {capability}, **options)
    assert got == (elements if capability == 90 else SMALL)


def test_workspace_of_the_gradient_of_slopes(monkeypatch):
    """Only the fallback kernels compute it, and then all other gradients too."""
    rows = with_sm90(kernels=ALIBI)
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: rows))
    for arguments, workspace in (((0, 1, 2), LARGE), ((0, 1, 2, 3), SMALL)):
        gradient = jax.grad(lambda *x: loss(*x[:3], MASK, bias=packax.alibi(x[3])), arguments)
        slopes = jax.ShapeDtypeStruct((8,), jnp.float32)
        (_, (_, _, _, results)) = calls(text_of(gradient, *abstract(), slopes))
        assert results[-1] == f"{workspace}xf32"


BLOCK_SPARSE = tuple(f"{kernel}_block_lists" for kernel in APART[1:])


def block_sparse_mask(size=(64, 64)):
    block_mask = np.ones((2, 1, *(-(-300 // n) for n in size)), bool)
    return packax.create_attention_mask(
        packax.masks.block_sparse(block_mask, size), q_len=300, kv_len=300
    )


@pytest.mark.parametrize(
    "kernels,options,elements",
    [
        (BLOCK_SPARSE, {}, MIDDLE),  # there is no fused kernel
        (BLOCK_SPARSE, {"deterministic": True}, MIDDLE),
        (BLOCK_SPARSE, {"scale": -0.5}, MIDDLE),  # the sign goes into the query
        (APART + SOFT_CAP, {}, SMALL),  # kernels without block lists do not count
        (APART + SOFT_CAP + BLOCK_SPARSE, {"soft_cap": 30.0}, SMALL),
        (APART + SOFT_CAP + BLOCK_SPARSE, {"bias": packax.alibi(np.ones(8))}, SMALL),
        (APART + SOFT_CAP + BLOCK_SPARSE, {"scale": jnp.float32(0.1)}, SMALL),
    ],
)
@pytest.mark.parametrize("capability", [90, 80])
def test_workspace_of_a_map(monkeypatch, capability, kernels, options, elements):
    """Hopper's kernels with block lists, where no other option is used; block sizes are left to the
    handler."""
    rows, mask = with_sm90(kernels=kernels), block_sparse_mask()
    got = backward_workspace(monkeypatch, rows, {capability}, mask=mask, **options)
    assert got == (elements if capability == 90 else SMALL)


def test_workspace_of_a_map_without_a_map(monkeypatch):
    """Kernels with block lists serve no call without a block mask, and no call with a soft cap."""
    assert backward_workspace(monkeypatch, with_sm90(kernels=BLOCK_SPARSE)) == SMALL
    rows = with_sm90(kernels=BLOCK_SPARSE)
    assert backward_workspace(monkeypatch, rows, soft_cap=30.0) == SMALL


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
