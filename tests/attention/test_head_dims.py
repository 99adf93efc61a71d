"""Head dims padded to those of the kernels, and keys to rows of 16 bytes of a bias: when, what the
kernels receive, and that results and gradients do not change.

Guards against padding that gains nothing (an option without such kernels), missing padding where
the fallback kernels are slower, head dims that only another GPU has, a scale computed from the
padded head dim, and results that keep the padding.
"""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from lowered import DIMS, MASK, abstract, calls, loss, step, text_of, with_sm90
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import ffi

PASSES = ("forward_sm90", "backward_sm90", "backward_dkdv_sm90", "backward_dq_sm90")
PARTS = ("backward_dkdv_sm90_parts", "backward_dq_sm90_parts")
TENSORS = ("query", "key", "value")
AMPERE = {"cc": 80, "arch_specific": False, "dtype": "bf16"}


@pytest.fixture
def hopper(extension, monkeypatch):
    """A build with Hopper kernels for these head dims, the forward up to 512; soft caps for 64 and
    128."""
    capped = tuple(f"{name}_soft_cap" for name in PASSES)
    dims = (*DIMS, (192, 192))
    rows = with_sm90(dims=dims, kernels=PASSES) + with_sm90(dims=DIMS[:2], kernels=capped)
    rows += with_sm90(dims=((512, 512),), kernels=PASSES[:1])
    monkeypatch.setattr(ffi.ext, "variants", lambda: rows)


@pytest.fixture
def every_gpu(hopper, monkeypatch):
    """Adds the portable kernels for Hopper, and kernels for 8.0 only: head dims 96 and 192, and
    with a soft cap 64 and 128."""
    kernels = [(k, dim) for k in ("forward", "backward_sm80") for dim in (96, 192)]
    kernels += [(f"{k}_sm80_soft_cap", dim) for k in ("forward", "backward") for dim in (64, 128)]
    kernels += [("backward_sm80", dim) for dim in (64, 128)]
    besides = ("backward_preprocess", "backward_postprocess_sm80")
    kernels += [(k, dim) for k in besides for dim in (64, 96, 128, 192)]
    rows = [{**AMPERE, "kernel": k, "qk_dim": dim, "v_dim": dim} for k, dim in kernels]
    rows += ffi.ext.variants()
    rows += [
        {"kernel": k, "dtype": "bf16", "cc": 90, "arch_specific": True, "qk_dim": qk, "v_dim": v}
        for k in ("forward", "backward_delta", "backward_dkdv", "backward_dq")
        for qk, v in DIMS
    ]
    monkeypatch.setattr(ffi.ext, "variants", lambda: rows)


every_gradient = jax.grad(loss, (0, 1, 2))


def dims_of(function, dims, dtype=jnp.bfloat16, **options):
    """Head dims of query and value that the kernel gets: of the backward if there is a gradient."""
    tensors = abstract(dtype, *dims)
    text = text_of(lambda *x: function(*x, MASK, **options), *tensors)
    of = {target: operands for target, _, operands, _ in calls(text)}
    operands = of.get("packax_backward_v1") or of["packax_forward_v1"]
    return tuple(int(operands[n].split("x")[3]) for n in (0, 2))


@pytest.mark.parametrize(
    "dims,columns",
    (
        ((64, 64), 64),
        ((8, 8), 64),
        ((96, 96), 128),
        ((64, 72), 128),
        ((136, 128), 192),
        ((136, 136), 192),
        ((192, 192), 192),
        ((192, 200), 256),
        ((248, 8), 256),
    ),
)
@pytest.mark.parametrize("function", (step, jax.grad(loss)))
def test_programs_for_hopper_are_not_padded(hopper, monkeypatch, function, dims, columns):
    """Kernels take fewer columns than they have; the sum of dQ has those of the kernels."""
    monkeypatch.setattr(ffi, "local_capabilities", lambda: {90})
    assert dims_of(function, dims) == dims
    text = text_of(lambda *x: every_gradient(*x, MASK), *abstract(jnp.bfloat16, *dims))
    (*_, results) = next(x for x in calls(text) if x[0] == "packax_backward_v1")
    rows, of_mask = 2 * 8 * 320, 2 * 2 * 320
    assert results[-1] == f"{(2 + columns) * rows + of_mask}xf32"


@pytest.mark.parametrize("dims", ((264, 64), (320, 320), (8, 512), (512, 512)))
def test_a_forward_alone(hopper, monkeypatch, dims):
    """Above 256, only a program for Hopper has dedicated kernels. None is padded."""
    tensors = {n: jax.core.ShapedArray((2, 300, 8, dim), jnp.bfloat16)
        for n, dim in zip(TENSORS, (dims[0], *dims), strict=True)}  # fmt: skip
    of = Operands(**dict.fromkeys(Operands._fields) | tensors)
    for capabilities, dedicated in (({90}, True), ({80}, False), ({80, 90}, False), (None, False)):
        monkeypatch.setattr(ffi, "local_capabilities", lambda known=capabilities: known)
        assert ffi.takes_fallback("forward", of, AttentionSpec(scale=1.0)) != dedicated
        for function in (step, jax.grad(loss)):
            assert dims_of(function, dims) == dims


def test_a_backward_in_parts(hopper, monkeypatch):
    """Above 256 the kernels for 512 serve any of the gradients, but no option."""
    rows = with_sm90(dims=((512, 512),), kernels=("forward_sm90", *PARTS)) + ffi.ext.variants()
    monkeypatch.setattr(ffi.ext, "variants", lambda: rows)
    monkeypatch.setattr(ffi, "local_capabilities", lambda: {90})
    for gradient, options, algorithm in (
        (every_gradient, {}, "sm90_separate"),
        (jax.grad(loss, 0), {}, "sm90_separate"),
        (jax.grad(loss, 1), {}, "sm90_separate"),
        (every_gradient, {"deterministic": True}, "sm90_separate"),
        (every_gradient, {"soft_cap": 30.0}, "portable"),
    ):
        tensors = abstract(jnp.bfloat16, 320, 264)
        text = text_of(lambda *x, of=gradient, more=options: of(*x, MASK, **more), *tensors)
        of = {target: attributes for target, attributes, *_ in calls(text)}
        assert algorithm in of["packax_backward_v1"]["algorithm"]


CAP, EXACT = {"soft_cap": 30.0}, {"deterministic": True}
LARGEST = {"return_max_logits": True}
ROW_OF_GPUS = [({80}, 128), ({100}, 96), ({90}, 96), ({80, 90}, 128), (None, 128)]
ALL, ONE, FORWARD = ("all gradients",), ("one gradient",), ("forward",)
# For each build: GPUs (None: any), head dims, options, the head dims of the kernels, and of what:
# the forward and a backward of all gradients, or as given.
KERNELS = {
    "hopper": [
        (None, 40, CAP, 64),
        (None, (136, 128), CAP, (136, 128)),  # no Hopper kernel has the option at that head dim
        (None, 40, {"sinks": np.ones(8)}, 64),
        (None, 40, {"scale": np.ones((), np.float32)}, 40),  # or at all
        (None, 40, {"bias": packax.alibi(np.ones(8))}, 40),
        (None, 40, LARGEST, 40, FORWARD),
        (None, 40, EXACT, 64, ONE),
        *((gpus, 96, {}, expected) for gpus, expected in ROW_OF_GPUS),
    ],
    "extension": [({80}, dim, {}, 64 * 2 ** (dim > 64) * 2 ** (dim > 128)) for dim in (8, 96, 136)],
    "every_gpu": [
        *((gpus, dim, {}, 96 * 2 ** (dim > 96)) for gpus in ({80}, {86}) for dim in (72, 96, 192)),
        *(({90}, dim, {}, dim) for dim in (72, 96, 192)),
        *((gpus, 96, {}, 128) for gpus in ({80, 90}, None)),  # what all of them have
        *((gpus, 192, {}, 192) for gpus in ({80, 90}, None)),
        ({80}, 40, CAP, 64),
        ({80}, 96, CAP, 128),
        ({80}, 192, CAP, 192),
        # 96 and 192 exist only for the kernel that accumulates dQ.
        ({80}, 96, EXACT, 128, ALL),
        ({80}, 72, {}, 128, ONE),
        ({80}, 40, CAP | EXACT, 40, ALL),
    ],
    "sm90 of the largest logits": [
        (None, 40, LARGEST, 64, FORWARD),
        (None, 40, LARGEST | CAP, 40, FORWARD),
    ],
    "sm90 of fused backwards": [
        (None, 40, {}, 64, ONE),
        (None, 40, EXACT, 64, ONE),  # the portable kernels
    ],
    "sm90 without a portable dQ": [
        (None, 40, EXACT, 40, ONE),
        (None, 40, {}, 64, FORWARD),
    ],
}
BUILDS = {  # of Hopper's kernels
    "sm90 of the largest logits": with_sm90(dims=DIMS, kernels=("forward_sm90_max_logits",)),
    "sm90 of fused backwards": with_sm90(dims=DIMS, kernels=PASSES[:2]),
}
BUILDS["sm90 without a portable dQ"] = [
    x for x in BUILDS["sm90 of fused backwards"] if x["kernel"] != "backward_dq"
]


@pytest.mark.parametrize("build", KERNELS)
def test_head_dims_of_the_kernels(build, request, monkeypatch):
    request.getfixturevalue("hopper" if build in BUILDS else build)
    if build in BUILDS:
        monkeypatch.setattr(ffi.ext, "variants", lambda: BUILDS[build])
    functions = {"forward": step, "all gradients": every_gradient, "one gradient": jax.grad(loss)}
    for gpus, dims, options, expected, *of in KERNELS[build]:
        dims, expected = (x if isinstance(x, tuple) else (x, x) for x in (dims, expected))
        monkeypatch.setattr(ffi, "local_capabilities", lambda gpus=gpus: gpus)
        for name in of[0] if of else FORWARD + ALL:
            assert dims_of(functions[name], dims, **options) == expected, (gpus, dims, options)


def test_groups_of_heads_with_head_dims_that_only_some_gpus_have(every_gpu, monkeypatch):
    """Kernels that write some heads of a shared output are not padded to other head dims; those for
    Hopper need no padding."""
    tensors = dict.fromkeys(TENSORS, jax.core.ShapedArray((2, 300, 8, 96), jnp.bfloat16))
    of = Operands(**dict.fromkeys(Operands._fields) | tensors)
    spec = AttentionSpec(scale=1.0)
    for capabilities, fallback in (({80}, False), ({90}, False), (None, True)):
        monkeypatch.setattr(ffi, "local_capabilities", lambda known=capabilities: known)
        assert ffi.takes_fallback("forward", of, spec) == fallback
    monkeypatch.setattr(ffi, "local_capabilities", lambda: {80})
    assert ffi.takes_fallback("forward", of, spec, for_export=True)


def test_a_gradient_that_only_another_gpu_has(extension, monkeypatch):
    """An exported program may run on that GPU, the program of this process may not."""
    tensors = dict.fromkeys(TENSORS, jax.core.ShapedArray((2, 300, 8, 96), jnp.bfloat16))
    of = Operands(**dict.fromkeys(Operands._fields) | tensors)
    spec = AttentionSpec(scale=1.0, needs_grad=("key",))
    kernels = ("backward_dkdv_sm90", "backward_dq_sm90")
    rows = [x for x in with_sm90(dims=((96, 96),), kernels=kernels) if x["cc"] == 90]
    monkeypatch.setattr(ffi.ext, "variants", lambda: rows)
    monkeypatch.setattr(ffi, "local_capabilities", lambda: {80})
    ffi.require_kernels("backward", of, spec, for_export=True)
    with pytest.raises(NotImplementedError, match=r"no backward kernel for bfloat16 .* 96/96"):
        ffi.require_kernels("backward", of, spec)


def test_lowering_says_whether_it_exports(extension, monkeypatch):
    asked = []

    def require(direction, of, spec, for_export=False):
        asked.append(for_export)

    monkeypatch.setattr(ffi, "require_kernels", require)
    text_of(lambda *x: step(*x, MASK), *abstract())
    typed = jax.jit(lambda *x: step(*x, MASK))
    checks = packax.export_checks()
    jax.export.export(typed, platforms=["cuda"], disabled_checks=checks)(*abstract())
    assert asked == [False, True]


def test_the_scale_is_that_of_the_head_dim(hopper):
    (_, attributes, _, results), *_ = (
        x for x in calls(text_of(lambda *x: step(*x, MASK), *abstract(dim=96, v_dim=72)))
        if "forward" in x[0]
    )  # fmt: skip
    assert float(attributes["scale"].split(":")[0]) == pytest.approx(96**-0.5)
    assert results[0] == "2x300x8x128xbf16"


def test_in_programs_with_sizes_that_are_not_known_yet(hopper):
    (batch,) = jax.export.symbolic_shape("b")
    tensors = abstract(dim=96, v_dim=96, batch=batch)

    def causal(*x):
        mask = packax.create_attention_mask(packax.causal(), q_len=300, kv_len=300)
        return loss(*x, mask)

    exported = jax.export.export(
        jax.jit(jax.grad(causal)), platforms=["cuda"], disabled_checks=packax.export_checks()
    )(*tensors)
    assert "x300x8x128xbf16" in exported.mlir_module()


@pytest.mark.parametrize("groups,parts", [(1, 3), (2, 2)])
@pytest.mark.parametrize("dtype,kind", [(jnp.float32, "_float32"), (jnp.bfloat16, "")])
def test_a_bias_of_rows_on_hopper(extension, monkeypatch, dtype, kind, groups, parts):
    """Head dim 24 is padded to 32, and 298 keys to rows of whole 16 bytes. The workspace has sums
    for the gradient of a bias that rows share. Elsewhere the portable kernels run."""
    kernels = [f"{x}_sm90{kind}_bias" for x in ("forward", "backward_dkdv", "backward_dq")]
    rows = with_sm90(dims=((32, 32),), kernels=(*kernels, f"backward_shared{kind}_dbias"))
    monkeypatch.setattr(ffi.ext, "variants", lambda: rows)

    def gradients(query, key, value, bias):
        return jax.grad(loss, (0, 1, 2))(query, key, value, packax.full(), bias=bias), jax.grad(
            lambda bias: loss(query, key, value, packax.full(), bias=bias)
        )(bias)

    def of(kv_len):
        bias = jax.ShapeDtypeStruct((groups, 8, 200, kv_len), dtype)
        tensors = abstract(dim=24, v_dim=24, q_len=200, kv_len=kv_len, batch=4)
        found = calls(text_of(lambda *x: gradients(*x), *tensors, bias))  # not from a cache
        return [x for x in found if x[0] == "packax_backward_v1" and x[3][5] != "0xf32"]

    for kv_len, keys in ((296, 296), (298, 304)):
        ((_, attributes, operands, results),) = of(kv_len)
        assert attributes["algorithm"] == '"sm90_separate"' and operands[0] == "4x200x8x32xbf16"
        assert operands[1] == f"4x{keys}x2x32xbf16"
        stats = 3 * 4 * 8 * 256 + 2 * 256
        assert results[-1] == f"{stats + 64 + parts * groups * 8 * 200 * keys}xf32"
    monkeypatch.setattr(ffi, "local_capabilities", lambda: {90})  # whose kernels clip head dims
    ((_, _, operands, _),) = of(298)
    assert operands[:2] == ["4x200x8x24xbf16", "4x304x2x24xbf16"]
    monkeypatch.setattr(ffi, "local_capabilities", lambda: None)
    without = with_sm90(dims=((32, 32),), kernels=())
    monkeypatch.setattr(ffi.ext, "variants", lambda: without)
    ((_, attributes, operands, _),) = of(299)
    assert attributes["algorithm"] == '"portable"' and operands[0] == "4x200x8x24xbf16"
    assert operands[1] == "4x299x2x24xbf16"


def test_a_bias_of_one_element_per_logit_on_hopper(extension, monkeypatch):
    """Its backward is padded, too."""
    kernels = ("forward_sm90_bias", "backward_dkdv_sm90_dbias", "backward_dq_of_dbias_alone")
    rows = with_sm90(dims=((32, 32),), kernels=kernels)
    monkeypatch.setattr(ffi.ext, "variants", lambda: rows)

    def gradients(*x):
        return jax.grad(lambda *x: loss(*x[:3], packax.full(), bias=x[3]), (0, 1, 2, 3))(*x)

    bias = jax.ShapeDtypeStruct((4, 8, 300, 298), jnp.bfloat16)
    text = text_of(gradients, *abstract(dim=24, v_dim=24, kv_len=298, batch=4), bias)
    ((_, attributes, operands, _),) = [x for x in calls(text) if x[0] == "packax_backward_v1"]
    assert attributes["algorithm"] == '"sm90_separate"'
    assert operands[:2] == ["4x300x8x32xbf16", "4x304x2x32xbf16"]
