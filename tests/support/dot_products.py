"""Inputs for the tests of packax.dot_product_attention."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import packax

T, S, HEADS, KV_HEADS, DIM = 21, 37, 4, 2, 8


def tensors(batch=2, rows=T, keys=S, dtype=jnp.float32):
    rng = np.random.default_rng(5)
    shapes = (batch, rows, HEADS, DIM), (batch, keys, KV_HEADS, DIM), (batch, keys, KV_HEADS, DIM)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def lengths(*values):
    return np.array(values, np.int32)


DENSE = np.random.default_rng(9).random((2, HEADS, T, S)) < 0.7
DENSE[..., 0] = True  # every row has a key


RESIDUALS = "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters


def theirs(*tensors, return_residual=True, **options):
    """jax.nn.dot_product_attention. Where it returns no residual (jax 0.7), packax's."""
    if RESIDUALS:
        return jax.nn.dot_product_attention(*tensors, **options, return_residual=True)
    out = jax.nn.dot_product_attention(*tensors, **options)
    _, residual = packax.dot_product_attention(*tensors, **options, return_residual=True)
    return out, residual
