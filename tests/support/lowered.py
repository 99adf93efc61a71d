"""Lowered programs as text, and a stand-in for the extension that lowering queries.

The fixture `extension` (conftest.py) installs the stand-in.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
from packax._src.core.schema import OPERAND_NAMES, SYMBOLS, TARGETS
from stand_in import StandIn

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
ABSENT = "0xf32"  # an absent operand or result
WIDEST = (512, 512)  # only the fallback kernels, in 16-bit dtypes
WITH_BIAS = ("forward_bias", "backward_dkdv_bias", "backward_dq_bias", "backward_dbias")
TANGENT = "forward_tangent_fallback"
MASK_KERNELS = [f"documents_{name}" for name in ("init", "runs", "rows")]
MASK_KERNELS += [f"blocks_{name}" for name in ("rows", "keys", "order")]


class Extension(StandIn):
    """A stand-in for packax._ext with what lowering queries, independent of the actual build."""

    @staticmethod
    def variants():
        plain = ("forward", "backward_delta", "backward_dkdv", "backward_dq")
        kernels = (*plain, *(f"{name}_fallback" for name in plain))
        chip = {"cc": 80, "arch_specific": False}
        return (
            [
                {"kernel": kernel, "dtype": dtype, "qk_dim": qk_dim, "v_dim": v_dim, **chip}
                for kernel in kernels
                for dtype in (
                    ("bf16", "f16") if kernel in plain else ("bf16", "f16", "f32", "tf32")
                )
                for qk_dim, v_dim in (*DIMS, WIDEST)
                if (qk_dim, v_dim) in DIMS or (kernel not in plain and dtype in ("bf16", "f16"))
            ]
            + [
                {"kernel": kernel, "dtype": dtype, "qk_dim": dim, "v_dim": dim, **chip}
                for kernel in (*WITH_BIAS, TANGENT)
                for dtype in ("bf16", "f16", "f32", "tf32")
                for dim in (64, 128, 256)
                if dim <= 128 or dtype in ("bf16", "f16") or kernel == TANGENT
            ]
            + [
                {"kernel": kernel, "dtype": dtype, "qk_dim": qk_dim, "v_dim": v_dim, **chip}
                for kernel in ("decode", "decode_combine")
                for dtype in ("bf16", "f16", "f32", "tf32")
                for qk_dim, v_dim in ((64, 64), (192, 128))
                if (kernel, dtype) != ("decode_combine", "tf32")
            ]
            + [
                {"kernel": kernel, "dtype": "e4m3", "qk_dim": 128, "v_dim": 128, **chip}
                for kernel in ("decode_fp8", "decode_fp8_pages")
            ]
            + [
                {"kernel": kernel, "dtype": "any", "qk_dim": 0, "v_dim": 0, **chip}
                for kernel in MASK_KERNELS
            ]
        )


PORTABLE = Extension.variants()


BESIDES = ("backward_preprocess", "backward_preprocess_dbias", "backward_postprocess")
BESIDES += ("backward_sum_dbias",)


def with_sm90(cc=90, arch_specific=True, dims=DIMS[:3], kernels=("backward_sm90",)):
    """The variants of a build that also has Hopper kernels, in bf16."""
    sm90 = {"dtype": "bf16", "cc": cc, "arch_specific": arch_specific}
    pairs = itertools.product((*kernels, *BESIDES), dims)
    return [*PORTABLE, *({**sm90, "kernel": k, "qk_dim": qk, "v_dim": v} for k, (qk, v) in pairs)]


def abstract(dtype=jnp.bfloat16, dim=64, v_dim=64, q_len=300, kv_len=300, batch=2):
    return (
        jax.ShapeDtypeStruct((batch, q_len, 8, dim), dtype),
        jax.ShapeDtypeStruct((batch, kv_len, 2, dim), dtype),
        jax.ShapeDtypeStruct((batch, kv_len, 2, v_dim), dtype),
    )


def text_of(function, *args, platforms=("cuda",)):
    return jax.jit(function).trace(*args).lower(lowering_platforms=platforms).as_text()


def calls(text):
    """[(target, {attribute: text}, [operand type], [result type])] for each FFI call in text."""
    found = []
    for line in text.splitlines():
        call = re.search(r"custom_call @(packax\w+)\((.*?)\) \{(.*)\} : \((.*)\) -> (.*)$", line)
        if call:
            target, operands, body, types, results = call.groups()
            attributes = re.search(r"mhlo.backend_config = \{(.*?)\}", body)
            pairs = re.findall(r"(\w+) = ([^,}]+)", attributes.group(1))
            kinds = re.findall(r"tensor<([^>]+)>", types)
            assert len(operands.split(",")) == len(kinds)
            found.append((target, dict(pairs), kinds, re.findall(r"tensor<([^>]+)>", results)))
    return found


def by_name(call):
    """The operand types of an attention call from calls(), by operand name."""
    target, _, operands, _ = call
    name = next(x for x in TARGETS if SYMBOLS[x] == target)
    return dict(zip(OPERAND_NAMES[name], operands, strict=True))


def step(query, key, value, mask, **kwargs):
    return packax.flash_attention(query, key, value, mask, **kwargs)


def loss(query, key, value, mask, **kwargs):
    return step(query, key, value, mask, **kwargs).astype(jnp.float32).sum()


IDS = np.stack([np.arange(300) // 70, np.arange(300) // 41]).astype(np.int32)
MASK = packax.create_attention_mask(packax.causal() & packax.documents(IDS))

# Operand types of `abstract`, of MASK and of its blocks
QUERY, KEY = "2x300x8x64xbf16", "2x300x2x64xbf16"
SUMS = "2x8x300xf32"
ROWS, BLOCKS, ORDER, ORDER_192 = "2x300xi32", "2x5x5xi32", "2x3xi32", "2x2xi32"
