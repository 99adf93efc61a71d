"""Errors from C++ on a GPU, with Python's checks bypassed. `pytest -m gpu`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from gpu_runs import of
from packax._src.core.schema import OPERAND_NAMES

pytestmark = pytest.mark.gpu
CALL = of("interval=causal,selector=packed,dims=64x64,dtype=bfloat16,lengths=200x200")


def forward_call(**changes):
    """Calls packax_forward_v1 without Python's checks, with changed operands or attributes."""
    a = CALL.arrays()
    mask = CALL.built(a)
    unread = dict.fromkeys(("q_pos", "kv_pos"), mask.kv_start)
    operands = {name: a[name] for name in ("query", "key", "value")} | unread
    operands |= mask.operands("forward")
    none = np.zeros(0, np.float32)
    operands = {name: np.asarray(operands.get(name, none)) for name in OPERAND_NAMES["forward"]}
    numbers = ("q_block", "kv_block", "bias_of_indices", "float32_products", "first_head", "heads",
        "row_keys")  # fmt: skip
    attributes = {
        "scale": np.float32(0.1),
        "soft_cap": np.float32(0),
        "dropout_threshold": np.int64(0),
        "mask_mode": np.int32(1),
        **dict.fromkeys(numbers, np.int32(0)),
    }
    for name, change in changes.items():
        target = attributes if name in attributes else operands
        target[name] = change(target[name])
    query, heads = operands["query"], operands["query"].shape[2]
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((query.shape[0], heads, query.shape[1]), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    call = jax.ffi.ffi_call("packax_forward_v1", results)
    return jax.block_until_ready(jax.jit(lambda *a: call(*a, **attributes))(*operands.values()))


def test_the_unchanged_call_works():
    out, *_ = forward_call()
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"query": lambda x: x[0]}, r"query is bfloat16\[200, 4, 64\], expected 4 axes"),
        ({"key": lambda x: x.astype(np.float16)}, r"key is float16\[.*expected bfloat16"),
        ({"mask_mode": lambda _: np.int32(9)}, r"mask_mode is 9, expected 0 to 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_cpp_refuses(changes, message):
    """tests/host/refusals.txt has all messages; here they come through XLA."""
    with pytest.raises(Exception, match=message) as caught:
        forward_call(**changes)
    assert "INVALID_ARGUMENT" in str(caught.value)


def test_without_a_kernel_the_error_lists_the_available_ones():
    x = jnp.zeros((1, 64, 2, 520), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"available: .*bfloat16 64/64"):
        packax.flash_attention(x, x, x, packax.causal())
