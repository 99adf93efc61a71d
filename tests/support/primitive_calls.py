"""The static parameters of the primitives, and their batching rules against a loop."""

import jax
import jax.numpy as jnp
import numpy as np

SHARED = {
    "scale": 0.3,
    "soft_cap": 0.0,
    "segment_check": 2,
    "precision": jax.lax.Precision.DEFAULT,
    "block_size": None,
    "extras": (),
    "dropout_threshold": 0,
    "implementation": None,
}

STATIC = {**SHARED, "max_logits": False}

BACKWARD = {
    **SHARED,
    "has_dlse": False,
    "deterministic": False,
    "score_grads": False,
    "bias_grad": False,
    "needs_grad": (True,) * 3,
}


def backward_mask(operands):
    """AttentionMask.operands() without q_order_192."""
    return (*operands[:8], *operands[9:])


def assert_maps(bind, operands, axes):
    """vmap over `axes` (None: not mapped) equals a loop."""
    got = jax.jit(jax.vmap(bind, in_axes=axes))(*operands)
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    for n in range(size):
        row = [
            x if a is None else jnp.take(x, n, axis=a) for x, a in zip(operands, axes, strict=True)
        ]
        for x, y in zip(got, jax.jit(bind)(*row), strict=True):
            np.testing.assert_allclose(x[n], y, rtol=1e-5, atol=1e-5)
