"""GQA groups split into parts where a backward would have too few programs: when, and that
gradients do not change."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from lowered import abstract, calls, loss, text_of
from packax._src.ops import lowering, primitives
from tiers import some


def parts(kv_len, heads, kv_heads, batch=1):
    query, key = (
        jax.ShapeDtypeStruct((batch, kv_len, n, 64), jnp.bfloat16) for n in (heads, kv_heads)
    )
    return lowering.parts_of_group(query, key)


@pytest.mark.parametrize(
    "kv_len,heads,kv_heads,batch,expected",
    (
        (16384, 32, 8, 1, 1),  # 1024 programs
        (4096, 32, 8, 1, 1),  # 256: repeating keys and values would cost more
        (2048, 32, 8, 1, 4),  # 128: half of the GPU would be idle
        (131072, 8, 1, 1, 1),
        (32768, 8, 1, 1, 4),
        (16384, 8, 2, 1, 1),
        (32768, 8, 2, 1, 2),
        (16384, 8, 1, 1, 8),
        (8192, 8, 1, 1, 8),
        (4096, 8, 1, 1, 8),  # too few programs, but the group has no more heads
        (4096, 8, 1, 16, 1),
        (4096, 6, 2, 1, 3),
        (32768, 6, 1, 1, 6),  # 4 does not divide 6
        (4096, 8, 8, 1, 1),  # one query head per group
        (1023, 8, 1, 1, 1),
        (4096, 8, 1, 0, 1),
    ),
)
def test_when(kv_len, heads, kv_heads, batch, expected):
    assert parts(kv_len, heads, kv_heads, batch) == expected


def test_sizes_that_are_not_known_yet():
    (batch, length) = jax.export.symbolic_shape("b, s")
    query, key = (jax.ShapeDtypeStruct((1, 4096, n, 64), jnp.bfloat16) for n in (8, 1))
    assert lowering.parts_of_group(query, key) > 1
    for shape in ((batch, 4096, 1, 64), (1, length, 1, 64)):
        key = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        assert lowering.parts_of_group(query, key) == 1


@pytest.mark.parametrize(
    "kind,sizes",
    some(
        itertools.product(
            ("documents", "soft cap", "bias", "map", "lse"),
            [
                (jnp.float32, 8, 2, 2),
                (jnp.float32, 8, 2, 4),
                (jnp.float32, 6, 1, 3),
                (jnp.bfloat16, 8, 2, 4),
                (jnp.bfloat16, 8, 2, 2),
                (jnp.bfloat16, 6, 1, 3),
            ],
        ),
        *(13, 20),
    ),
)
def test_gradients(monkeypatch, kind, sizes):
    dtype, heads, kv_heads, divided = sizes
    rng = np.random.default_rng(heads + divided)
    batch, length, dim = 2, 140, 16
    query, key, value, cotangent = (
        jnp.asarray(rng.standard_normal((batch, length, n, dim)), dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    expression = packax.causal() & packax.documents(np.arange(length)[None].repeat(batch, 0) // 50)
    options = {}
    if kind == "soft cap":
        options["soft_cap"] = 2.0
    elif kind == "bias":
        options["bias"] = packax.alibi(jnp.asarray(rng.uniform(0.1, 1, heads), jnp.float32))
    elif kind == "map":
        expression &= packax.masks.block_sparse(rng.random((batch, heads, 5, 5)) < 0.7, (32, 32))
    mask = packax.create_attention_mask(expression)

    def total(query, key, value):
        results = packax.flash_attention(
            query, key, value, mask, return_lse=kind == "lse", **options
        )
        out, lse = results if kind == "lse" else (results, jnp.zeros(()))
        return (out * cotangent).astype(jnp.float32).sum() + jnp.where(lse > -1e30, lse, 0).sum()

    def gradients():
        """Compiles anew each time."""
        jax.clear_caches()
        return jax.jit(jax.grad(total, (0, 1, 2)))(query, key, value)

    whole = gradients()
    bind, seen = primitives.backward, []

    def in_parts(spec, x):
        if x.key.shape[2] == kv_heads:
            return lowering.in_parts("backward", spec, x, divided)
        seen.append(x.key.shape[2])
        return bind(spec, x)

    monkeypatch.setattr(primitives, "backward", in_parts)
    split_gradients = gradients()
    assert set(seen) == {kv_heads * divided}
    limit = 1e-5 if dtype == jnp.float32 else 2**-7
    for got, want in zip(split_gradients, whole, strict=True):
        assert got.dtype == dtype
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("length,kv_heads", ((4096, 8), (65536, 2)))
def test_what_the_kernels_get(length, kv_heads):
    """For (1, length, 8, 64) queries over 2 key/value heads."""
    gradients = jax.grad(loss, (0, 1, 2))
    ffi_calls = calls(
        text_of(
            lambda *x: gradients(*x, packax.causal()),
            *abstract(batch=1, q_len=length, kv_len=length),
        )
    )
    *_, (target, _, operands, results) = ffi_calls
    key = f"1x{length}x{kv_heads}x64xbf16"
    assert target == "packax_backward_v1"
    assert operands[1:3] == results[1:3] == [key, key]
    assert operands[0] == results[0] == f"1x{length}x8x64xbf16"


@pytest.mark.usefixtures("extension")
def test_dq_alone_is_not_divided():
    ffi_calls = calls(
        text_of(
            lambda *x: jax.grad(loss)(*x, packax.causal()),
            *abstract(batch=1, q_len=4096, kv_len=4096),
        )
    )
    *_, (_, _, operands, _) = ffi_calls
    assert operands[1] == "1x4096x2x64xbf16"
