"""Which platform uses what: kernels on CUDA, XLA on other platforms, an error where the requested
kernels are unavailable.

Guards against an implementation other than the requested one.
"""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import packax
import pytest
from lowered import DIMS, MASK, Extension, abstract, calls, loss, step, text_of
from packax._src.ops import ffi

pytestmark = pytest.mark.usefixtures("extension")


def test_elsewhere_there_is_no_call():
    assert not calls(text_of(loss, *abstract(), MASK, platforms=("cpu",)))
    assert not calls(text_of(loss, *abstract(), MASK, platforms=("tpu",)))


def test_several_platforms_in_one_module():
    text = text_of(jax.grad(loss), *abstract(), MASK, platforms=("cpu", "cuda"))
    assert [call[0] for call in calls(text)] == ["packax_forward_v1", "packax_backward_v1"]
    assert text.count("stablehlo.while") > 0  # the XLA path for the CPU


@pytest.mark.parametrize("direction", [step, jax.grad(loss)])
@pytest.mark.parametrize(
    "dtype,dim,v_dim,said",
    [
        (jnp.bfloat16, 84, 80, "bfloat16 with head dims 84/80"),
        (jnp.float16, 64, 520, "float16 with head dims 64/520"),
        (jnp.float32, 72, 20, "float32 with head dims 72/20"),
        (jnp.float32, 512, 512, "float32 with head dims 512/512"),
    ],
)
@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_no_kernel(direction, dtype, dim, v_dim, said, implementation):
    args = abstract(dtype, dim, v_dim)
    with pytest.raises(NotImplementedError) as error:
        text_of(lambda *x: direction(*x, MASK, implementation=implementation), *args)
    text = str(error.value)
    assert said in text
    listed = [f"{dtype} {qk}/{v}" for qk, v in DIMS for dtype in ("bfloat16", "float16", "float32")]
    listed += ["bfloat16 512/512", "float16 512/512"]
    assert f"available: {', '.join(listed)}, and all smaller multiples of 8." in text
    assert 'implementation="xla" takes any head dim, and float64' in text
    text_of(lambda *x: direction(*x, MASK, implementation="xla"), *args)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("with_bias,rate", [(True, 0.0), (False, 0.1), (True, 0.1)])
def test_a_bias_or_dropout_above_its_head_dims(monkeypatch, with_bias, rate, direction):
    """The error names the arguments, the head dims and the largest supported head dims."""
    if direction == "backward":  # a table whose forward supports wider head dims
        (row,) = (
            row
            for row in Extension.variants()
            if (row["kernel"], row["dtype"], row["qk_dim"]) == ("forward_bias", "bf16", 256)
        )
        rows = [*Extension.variants(), row | {"qk_dim": 512, "v_dim": 512}]
        monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: rows))
    options = {"dropout_rate": rate, "dropout_key": jax.random.key(0)} if rate else {}
    bias = jnp.zeros((1, 1, 1, 300), jnp.bfloat16) if with_bias else None

    def gradient(*x, implementation=None):
        return jax.grad(loss)(*x, MASK, bias=bias, implementation=implementation, **options)

    for dims in ((136, 128), (192, 192), (192, 128), (256, 256), (8, 200)):
        text = text_of(gradient, *abstract(jnp.bfloat16, *dims))
        assert [call[0] for call in calls(text)] == ["packax_forward_v1", "packax_backward_v1"]
    arguments = " and ".join(["bias="] * with_bias + ["dropout_rate="] * (rate > 0))
    args = abstract(jnp.bfloat16, 264, 128)
    with pytest.raises(NotImplementedError) as error:
        text_of(gradient, *args)
    listed = "float32 128/128, bfloat16 256/256, float16 256/256"
    assert str(error.value) == (
        f"no {direction} kernel for {arguments} in bfloat16 with head dims 264/128 (query and key "
        f"/ value); available: {listed}, and all smaller multiples of 8. "
        'implementation="xla" takes any head dim, and float64'
    )
    text_of(functools.partial(gradient, implementation="xla"), *args)


def test_a_part_of_the_kernels_says_how_to_build_all(monkeypatch):
    monkeypatch.setattr(ffi.ext, "part", lambda: "archs 80 90a, dtypes bf16")
    hint = "this build has only some of packax's kernels (archs 80 90a, dtypes bf16): "
    hint += "PACKAX_ARCHS=all pip install ./ builds all"
    with pytest.raises(NotImplementedError, match=re.escape(hint)):
        text_of(lambda *x: step(*x, MASK), *abstract(jnp.float16, 64, 520))
    query = jnp.ones((1, 1, 2, 520), jnp.float16)
    cache = jnp.ones((1, 64, 1, 520), jnp.float16)
    with pytest.raises(NotImplementedError, match=re.escape(hint)):
        text_of(packax.decode_attention, query, cache, cache, jnp.array([5]))


def test_other_projects_paths_are_for_what_the_whole_table_lacks(monkeypatch):
    """With only part of the kernels built, a kernel that the full table has is an error on a GPU;
    there is no fallback."""
    whole = Extension.variants()
    part = [row for row in whole if row["dtype"] in ("bf16", "any")]
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: part))
    monkeypatch.setattr(ffi.ext, "whole_table", lambda: whole)
    query, key, value, *_ = abstract(jnp.float32)
    assert ffi.has_kernels(query, key, value)
    assert not ffi.has_kernels(*(x.update(dtype=jnp.float64) for x in (query, key, value)))
    with pytest.raises(NotImplementedError, match="float32 with head dims 64/64"):
        text_of(lambda *x: step(*x, MASK), *abstract(jnp.float32))


def test_a_backward_kernel_may_be_missing_alone(monkeypatch):
    rows = [row for row in Extension.variants() if not row["kernel"].startswith("backward_dq")]
    monkeypatch.setattr(ffi.ext, "variants", staticmethod(lambda: rows))
    text_of(loss, *abstract(), MASK)
    with pytest.raises(NotImplementedError, match="no backward kernel"):
        text_of(jax.grad(loss), *abstract(), MASK)


@pytest.mark.parametrize("platforms", [("cpu",), ("tpu",), ("cpu", "cuda")])
def test_cubin_elsewhere_is_an_error(platforms):
    with pytest.raises(NotImplementedError, match="needs a CUDA device, but"):
        text_of(lambda *x: step(*x, MASK, implementation="cuda"), *abstract(), platforms=platforms)
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        jax.jit(lambda *x: step(*x, MASK, implementation="cuda"))(
            *(jnp.zeros(x.shape, x.dtype) for x in abstract())
        )


def test_without_the_extension(monkeypatch):
    """In a source tree XLA does everything, and a request for the kernels is an error that says
    why."""
    monkeypatch.setattr(ffi, "ext", None)
    monkeypatch.setattr(ffi, "ext_error", "no such file", raising=False)

    def whole(ids, *tensors, **kwargs):
        mask = packax.create_attention_mask(packax.documents(ids))
        return packax.flash_attention(*tensors, mask, **kwargs)

    ids = jax.ShapeDtypeStruct((2, 300), jnp.int32)
    assert not calls(text_of(lambda *x: whole(*x, implementation="xla"), ids, *abstract()))
    with pytest.raises(NotImplementedError, match=r"packax\._ext.*no such file.*reinstall"):
        text_of(whole, ids, *abstract())


def whole(ids, query, key, value, **options):
    """A program that builds two masks, of different kinds, and uses each."""
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids), **options)
    out = packax.flash_attention(query, key, value, mask, **options)
    return packax.flash_attention(out, key, value, packax.causal(), **options)


def built(ids, **options):
    return packax.create_attention_mask(packax.causal() & packax.documents(ids), **options)


IDS = jax.ShapeDtypeStruct((2, 300), jnp.int32)
MASK_CALLS = ["packax_documents_v1", "packax_blocks_v1"]


@pytest.mark.parametrize("known", [None, {90}, {75}])
def test_a_program_in_xla_has_no_call_at_all(known, monkeypatch):
    """Forward and gradient, lowered and exported for CUDA, whatever the local GPU is."""
    monkeypatch.setattr(ffi, "local_capabilities", lambda: known)

    def program(ids, *x):
        out, back = jax.vjp(lambda *y: whole(ids, *y, implementation="xla"), *x)
        return out, back(out)

    assert "packax_" not in calls_of(program, IDS, *abstract())
    exported = jax.export.export(jax.jit(program), platforms=["cuda"])(IDS, *abstract())
    assert "@packax_" not in exported.mlir_module()


def calls_of(function, *args):
    return " ".join(call[0] for call in calls(text_of(function, *args)))


@pytest.mark.parametrize(
    "known,kernels",
    [(None, True), ({80}, True), ({86}, True), ({75}, False), ({90, 103}, False), ({75, 89}, True)],
)
def test_masks_where_no_gpu_here_has_their_kernels(known, kernels, monkeypatch):
    """The stub extension is a wheel for 8.x only. Without a local GPU (None) the kernels stay,
    since the program may run elsewhere."""
    monkeypatch.setattr(ffi, "local_capabilities", lambda: known)
    assert [call[0] for call in calls(text_of(lambda ids: built(ids), IDS))] == (
        MASK_CALLS if kernels else []
    )
    asked = text_of(lambda ids: built(ids, implementation="cuda"), IDS)
    assert [call[0] for call in calls(asked)] == MASK_CALLS


def test_kernels_of_masks_elsewhere_are_an_error(monkeypatch):
    with pytest.raises(NotImplementedError, match="needs a CUDA device, but"):
        text_of(lambda ids: built(ids, implementation="cuda"), IDS, platforms=("cpu",))
    with pytest.raises(ValueError, match='must be None, "cuda" or "xla", but is \'cubin\''):
        built(jnp.zeros((2, 300), jnp.int32), implementation="cubin")
    monkeypatch.setattr(ffi, "ext", None)
    monkeypatch.setattr(ffi, "ext_error", "no such file", raising=False)
    with pytest.raises(NotImplementedError, match="no such file"):
        text_of(lambda ids: built(ids, implementation="cuda"), IDS)


def test_a_mask_over_ranks_in_xla_has_no_call():
    plan = packax.context_plan(packax.causal(), ranks=2, kind="zigzag", length=512)
    asked = {"plan": plan, "implementation": "xla"}
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    assert not calls(text_of(lambda ids: built(ids, **asked), ids))
    asked["implementation"] = None
    assert [call[0] for call in calls(text_of(lambda ids: built(ids, **asked), ids))] == MASK_CALLS
