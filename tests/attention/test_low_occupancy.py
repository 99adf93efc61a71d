"""GQA groups split into parts where a backward would have too few programs: when, and that
gradients do not change."""

import jax
import jax.numpy as jnp
import packax
import pytest
from lowered import abstract, calls, loss, text_of
from packax._src.ops import lowering


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
