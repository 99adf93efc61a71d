"""cuEquivariance's triangle attention on packax: rows without keys, vmap. test_faces.py compares
results and gradients with the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from packax.integrations.cuequivariance import triangle_attention

B, N, H, S, T, D = 2, 3, 2, 20, 28, 16


def test_rows_without_keys_and_vmap():
    """Such a row attends to all keys equally, with logits of -1e9. vmap is one call with the
    samples of both."""
    rng = np.random.default_rng(0)
    shapes = ((B, N, H, S, D), (B, N, H, T, D), (B, N, H, T, D), (B, 1, H, S, T), (B, N, H, S, D))
    arrays = [jnp.asarray(rng.standard_normal((2, *x)), jnp.float32) for x in shapes]
    mask = rng.random((2, B, N, 1, 1, T)) < 0.6
    mask[..., 1, 0, 0, 0, :] = False

    def step(q, k, v, bias, dout, mask):
        attend = lambda *x: triangle_attention(*x, mask, 0.3)  # noqa: E731
        (out, *others), back = jax.vjp(attend, q, k, v, bias)
        return out, *others, *back([dout, *map(jnp.zeros_like, others)])

    got = jax.jit(jax.vmap(step))(*arrays, mask)
    one = jax.jit(step)
    for n in range(2):
        for x, y in zip(got, one(*(a[n] for a in arrays), mask[n]), strict=True):
            np.testing.assert_allclose(x[n], y, rtol=1e-5, atol=1e-5)
    out, lse, top, dq, _, dv, _ = (np.asarray(x) for x in got)
    value, dout = arrays[2][:, 1, 0, :, None], np.asarray(arrays[4])[:, 1, 0]
    mean = np.broadcast_to(value.mean(3), (2, H, S, D))
    np.testing.assert_allclose(out[:, 1, 0], mean, rtol=1e-5, atol=1e-6)
    assert (lse[:, 1, 0] == -1e9).all() and (top[:, 1, 0] == -1e9).all()
    np.testing.assert_array_equal(dq[:, 1, 0], 0)
    of_mean = np.broadcast_to(dout.sum(2, keepdims=True) / T, (2, H, T, D))
    np.testing.assert_allclose(dv[:, 1, 0], of_mean, rtol=1e-4, atol=1e-5)
