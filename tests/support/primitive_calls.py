"""The primitives called with named operands, and a check of their batching rules against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import primitives

ALL = ("query", "key", "value")
SPEC = AttentionSpec(scale=0.3, mask_mode=2, needs_grad=ALL)


def forward(query, key, value, mask, spec=SPEC):
    """`mask`: a dict of its arrays for both passes."""
    return primitives.forward(spec, of_pass("forward", mask, query=query, key=key, value=value))


def backward(tensors, mask, spec=SPEC):
    """`tensors`: query to dlse, or to dout."""
    named = dict(zip(Operands._fields, tensors, strict=False))
    return primitives.backward(spec, of_pass("backward", mask, **named))


def of_pass(direction, mask, **tensors):
    unread = {"forward": ("kv_blocks", "kv_order"), "backward": ("q_order_192",)}[direction]
    return Operands(**tensors, **{name: x for name, x in mask.items() if name not in unread})


def arrays_of(mask):
    """A mask's arrays for both passes, by name."""
    return mask.operands("forward") | mask.operands("backward")


def assert_maps(bind, operands, axes):
    """vmap over `axes` (None: unmapped) equals a loop. Operands are arrays or dicts of arrays."""
    got = jax.jit(jax.vmap(bind, in_axes=axes))(*operands)

    def row(x, axis, n):
        if isinstance(x, dict):
            return {k: row(y, axis[k] if isinstance(axis, dict) else axis, n) for k, y in x.items()}
        return x if axis is None else jnp.take(x, n, axis=axis)

    for n in range(len(got[0])):
        one = [row(x, a, n) for x, a in zip(operands, axes, strict=True)]
        for x, y in zip(got, jax.jit(bind)(*one), strict=True):
            np.testing.assert_allclose(x[n], y, rtol=1e-5, atol=1e-5)
