"""Checks attention with score parameters (sinks, slopes, soft caps, scale), forward and backward,
against score_oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import score_oracle


def arrays_of(case, dtype, dims=(16, 16), **others):
    query, key, value, dout, dlse = case.tensors(dtype, *dims)
    arrays = {"query": query, "key": key, "value": value, "scale": jnp.float32(dims[0] ** -0.5)}
    return arrays | others, dout, dlse


def attention_of(mask, *, positions=None, **static):
    """Attention as a function of a dict of the arrays that flash_attention is differentiable in."""

    def attention(arrays):
        arrays = dict(arrays)
        tensors = [arrays.pop(name) for name in ("query", "key", "value")]
        if "slopes" in arrays:
            arrays["bias"] = packax.alibi(
                arrays.pop("slopes"), positions=positions and positions[0],
                kv_positions=positions and positions[1],
            )  # fmt: skip
        return packax.flash_attention(*tensors, mask, return_lse=True, **arrays, **static)

    return attention


def sinks_of(heads, dtype=jnp.float32):
    return jnp.linspace(-3, 4, heads).astype(dtype)


def slopes_of(heads):
    return 2.0 ** (-8 * jnp.arange(1.0, heads + 1) / heads)


def check(
    case, dtype, dims=(16, 16), *, soft_cap=None, positions=None, scale=None, close=1e-5, **others
):
    """Check the results, gradients and largest logits of one call. `others`: sinks and slopes; True
    stands for the values of sinks_of and slopes_of."""
    for name, default in (("sinks", sinks_of), ("slopes", slopes_of)):
        if others.get(name) is True:
            others[name] = default(case.heads)
    arrays, dout, dlse = arrays_of(case, dtype, dims, **others)
    if scale is not None:
        arrays["scale"] = jnp.float32(scale)
    mask = packax.create_attention_mask(case.expression(), q_len=case.q_len, kv_len=case.kv_len)
    attention = attention_of(mask, soft_cap=soft_cap, positions=positions, return_max_logits=True)

    @jax.jit
    def function(arrays):
        return score_oracle.run(attention, arrays, dout, dlse), attention(arrays)[2]

    got, top = function(arrays)
    places = positions or (np.arange(case.q_len)[None], np.arange(case.kv_len)[None])
    true, plain, largest = score_oracle.true_and_plain(
        arrays, case.allowed(), dout, dlse, soft_cap=soft_cap, places=places
    )
    score_oracle.check(got, true, plain)
    assert top.dtype == jnp.float32
    np.testing.assert_allclose(top, largest, rtol=close, atol=close)
    return got
