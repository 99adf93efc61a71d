"""Errors of the functions with other libraries' signatures (integrations.txt) name the argument,
its value and what is accepted."""

import errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from dot_products import DENSE, S, T, lengths, tensors  # noqa: F401
from kvax_cases import ALONE, KV_IDS, KV_POSITIONS, TOKENS  # noqa: F401
from kvax_cases import tensors as kvax_tensors
from packax.integrations import flash_attention_jax, flax
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.utils import FlashAttentionParamsConfig as Params
from packax.kvax.utils import attention_specs, set_attention_specs  # noqa: F401

BUILT = packax.create_attention_mask(packax.full(), q_len=T, kv_len=S)
q = jnp.ones((2, 23, 4, 4))
MASK = packax.create_attention_mask(packax.causal(), q_len=23, kv_len=23)
EINSUMS = {"einsum_dot_general": jax.lax.dot_general}
NAMES = ("query_positions", "query_segment_ids", "kv_positions", "kv_segment_ids")


def dot_product(**options):
    return packax.dot_product_attention(*tensors(), **options)


def flax_attention(**options):
    return flax.dot_product_attention(q, q, q, **options)


def init(attention_fn):
    layer = nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn)
    return layer.init(jax.random.key(0), jnp.ones((2, 8, 16)))


def plain(shapes, key_mask):
    arrays = (np.zeros(shape, np.float32) for shape in shapes)
    return flash_attention_jax.flash_attention(*arrays, key_mask)


def three_masks():
    return create_attention_mask(*TOKENS, Params(16, 32), Params(64, 8), calc_bwd_mask=True)


def kvax_mask(**change):
    return create_attention_mask(**dict(zip(NAMES, TOKENS, strict=True)) | change)


def kvax_attention(**change):
    query, key, value, _ = kvax_tensors()
    arguments = {"query": query, "key": key, "value": value}
    arguments |= dict(zip(NAMES, TOKENS, strict=True))
    arguments |= {"mask": three_masks} | change
    return flash_attention(**arguments | {"mask": arguments["mask"]()})


@pytest.mark.parametrize("call,error,said", list(errors.rows("integrations")), ids=str)
def test_error(call, error, said):
    with attention_specs(*ALONE):
        errors.check(call, error, said, globals())
