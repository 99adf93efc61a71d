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


def block_sparse_mask(size=(64, 32)):
    block_mask = np.ones((2, 1, *(-(-300 // n) for n in size)), bool)
    return packax.create_attention_mask(
        packax.masks.block_sparse(block_mask, size), q_len=300, kv_len=300
    )


SIZE_OF = {"portable": SMALL, "sm90_fused": LARGE, "sm90_separate": MIDDLE}
ALL = APART + SOFT_CAP + ALIBI + BLOCK_SPARSE
LISTED = {"mask": block_sparse_mask()}
ON_HOPPER = [  # kernels for Hopper in the build, options, and the algorithm
    (ALL, {}, "sm90_fused"),
    (ALL, EXACT, "sm90_separate"),
    (ALL, {"deterministic": np.bool_(True)}, "sm90_separate"),
    (ALL, CAPPED, "sm90_fused"),
    (ALL, CAPPED | EXACT, "sm90_separate"),
    (ALL, CAPPED | OF_ARRAY, "portable"),
    (ALL, SLOPED, "sm90_fused"),
    (ALL, SLOPED | {"scale": -0.5}, "sm90_fused"),  # the sign goes into the query
    (ALL, SLOPED | EXACT, "portable"),
    (ALL, SLOPED | CAPPED, "portable"),
    (ALL, SLOPED | OF_ARRAY, "portable"),
    (ALL, PLACED, "portable"),
    (ALL, LISTED, "sm90_separate"),  # there is no fused kernel
    (ALL, LISTED | EXACT | {"scale": -0.5}, "sm90_separate"),
    (ALL, LISTED | CAPPED, "portable"),
    (ALL, LISTED | SLOPED, "portable"),
    (ALL, LISTED | OF_ARRAY, "portable"),
    (APART[:1], EXACT, "portable"),
    (APART + BLOCK_SPARSE, CAPPED, "portable"),  # kernels without a cap do not count
    (SOFT_CAP, {}, "portable"),
    (SOFT_CAP[1:], CAPPED, "sm90_separate"),  # as for head dim 256
    (APART + SOFT_CAP, SLOPED, "portable"),
    (APART + SOFT_CAP, LISTED, "portable"),
    (BLOCK_SPARSE, {}, "portable"),
]
WIDE = abstract(dim=192, v_dim=128)
DIMS = [  # kernels and their head dims, tensors, and the elements of the workspace on Hopper
    (with_sm90(dims=[(128, 128)]), {}, LARGE + 64 * SMALL),
    (with_sm90(), {"tensors": abstract(jnp.float16)}, SMALL),
    (with_sm90(), {"tensors": abstract(dim=128, v_dim=128)}, LARGE + 64 * SMALL),
    (with_sm90(), {"tensors": WIDE}, LARGE + 128 * SMALL),  # dQ has the query's head dim
    (with_sm90(), {"tensors": abstract(dim=256, v_dim=256)}, SMALL),
    (with_sm90(dims=[(192, 128)], kernels=APART[1:]), {"tensors": WIDE}, MIDDLE),
]


@pytest.mark.parametrize("capability", [90, 80])
def test_workspace_by_kernels_and_options(monkeypatch, capability):
    """Hopper's kernels, where they serve the call; elsewhere the portable ones."""
    for kernels, options, algorithm in ON_HOPPER:
        algorithm = algorithm if capability == 90 else "portable"
        got = backward_workspace(monkeypatch, with_sm90(kernels=kernels), {capability}, **options)
        assert (got, algorithms[-1]) == (SIZE_OF[algorithm], algorithm), (kernels, options)
    for rows, options, elements in DIMS:
        got = backward_workspace(monkeypatch, rows, {capability}, **options)
        assert got == (elements if capability == 90 else SMALL), (rows[-1], options)


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


NONE = "0xbf16"
OF_LEARNT = {"scale": jax.ShapeDtypeStruct((), jnp.float32)}  # the argument 3
SOME_GRADIENTS = [  # kernels, options, arguments, the gradients that are written, the algorithm
    (APART, {}, (0, 1, 2), [QUERY, KEY, KEY], "sm90_fused"),
    (APART, {}, (1, 2), [NONE, KEY, KEY], "sm90_separate"),
    (APART, {}, 0, [QUERY, NONE, NONE], "sm90_separate"),
    (APART, {}, (0, 2), [QUERY, KEY, KEY], "sm90_fused"),  # the kernels write dk, too
    (APART[:1], {}, 0, [QUERY, KEY, KEY], "sm90_fused"),
    (APART[:1], {}, 2, [NONE, KEY, KEY], "sm90_fused"),
    ((), {}, 0, [QUERY, NONE, NONE], "portable"),
    ((), {}, 2, [NONE, KEY, KEY], "portable"),
    (BLOCK_SPARSE, LISTED, 0, [QUERY, NONE, NONE], "sm90_separate"),
    (BLOCK_SPARSE, LISTED, 1, [NONE, KEY, KEY], "sm90_separate"),
    (SOFT_CAP, CAPPED, 0, [QUERY, NONE, NONE], "sm90_separate"),
    (SOFT_CAP, CAPPED, 1, [NONE, KEY, KEY], "sm90_separate"),
    (SOFT_CAP[:1], CAPPED, 0, [QUERY, KEY, KEY], "sm90_fused"),
    (SOFT_CAP[:1], CAPPED, 1, [NONE, KEY, KEY], "sm90_fused"),
    (APART, OF_LEARNT, 2, [NONE, KEY, KEY], "portable"),
    # The dq kernel also computes the partial sums of a scale's gradient.
    (APART, OF_LEARNT, (2, 3), [QUERY, KEY, KEY], "portable"),
    (APART, OF_LEARNT, 3, [QUERY, NONE, NONE], "portable"),
]


@pytest.mark.parametrize("kernels,options,arguments,written,algorithm", SOME_GRADIENTS)
def test_some_gradients(monkeypatch, kernels, options, arguments, written, algorithm):
    """Gradients that no kernel writes have no elements."""
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: with_sm90(kernels=kernels)))
    monkeypatch.setattr(ffi, "local_capabilities", lambda: None)
    learnt = options if options is OF_LEARNT else {}
    given = {"mask": MASK} | ({} if learnt else options)

    def of(*x):
        return loss(*x[:3], **given, **dict(zip(learnt, x[3:], strict=True)))

    text = text_of(jax.grad(of, arguments), *abstract(), *learnt.values())
    (_, (target, attributes, _, results)) = calls(text)
    asked = {*arguments} if isinstance(arguments, tuple) else {arguments}
    needs = (0 in asked) + 2 * bool({1, 2} & asked)
    assert target == "packax_backward_v1" and attributes["needs_grad"] == f"{needs} : i32"
    assert attributes["algorithm"] == f'"{algorithm}"'
    blocks = ("64 : i32", "32 : i32") if options is LISTED else ("0 : i32",) * 2
    assert (attributes["q_block"], attributes["kv_block"]) == blocks
    sums = "2x8x2x300xf32" if 3 in asked else "0xf32"
    assert results == [*written, sums, "0xf32", "0xf32", f"{SIZE_OF[algorithm]}xf32"]


def test_workspace_of_the_gradient_of_slopes(monkeypatch):
    """Only the fallback kernels compute it, and then all other gradients too."""
    rows = with_sm90(kernels=ALIBI)
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: rows))
    for arguments, workspace in (((0, 1, 2), LARGE), ((0, 1, 2, 3), SMALL)):
        gradient = jax.grad(lambda *x: loss(*x[:3], MASK, bias=packax.alibi(x[3])), arguments)
        slopes = jax.ShapeDtypeStruct((8,), jnp.float32)
        (_, (_, _, _, results)) = calls(text_of(gradient, *abstract(), slopes))
        assert results[-1] == f"{workspace}xf32"


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
