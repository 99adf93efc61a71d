"""Arguments at the limit of what is accepted, and what errors advise (errors: tests/errors)."""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest

Q, ONE = jnp.ones((2, 8, 2, 8)), jnp.ones((2, 1, 2, 8))


def test_lengths_beyond_int32():
    """Lengths that no cache can have give NaN, as other lengths beyond the cache do, and no NumPy
    error."""
    caches, table = (ONE, Q, Q, [2**40, 2]), np.zeros((2, 1), int)
    assert np.isnan(packax.decode_attention(*caches)[0]).all()
    assert np.isnan(packax.decode_shared_prefix(*caches, (1,), block_table=table)[0]).all()


def test_masks_are_no_arrays():
    """NumPy would wrap a mask in a one-element object array."""
    mask = packax.create_attention_mask(packax.documents(np.zeros((2, 8), int)))
    for x, name in ((mask, "an AttentionMask"), (packax.causal(), "a Causal")):
        for function in (np.asarray, jnp.asarray):
            with pytest.raises(TypeError, match=rf"{name} is not an array: its as_array\(\)"):
                function(x)


def test_a_rate_of_zero_with_a_key():
    """As in evaluation: the key is not read."""
    call = Q, Q, Q, packax.causal()
    off = packax.flash_attention(*call, dropout_rate=0.0, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(off, packax.flash_attention(*call))


def test_more_rows_than_decoding_takes():
    """causal(offset=kv_lengths - rows) and the advice in that error, ragged_paged_attention."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, n, 2, 8)), jnp.float32) for n in (17, 40, 40)
    )
    lengths = np.array([40, 21])
    out = packax.flash_attention(query, key, value, packax.causal(offset=lengths - 17))
    wanted = packax.decode_attention(query[:, 1:], key, value, lengths)
    np.testing.assert_allclose(out[:, 1:], wanted, rtol=2e-5, atol=2e-6)
    ragged = packax.ragged_paged_attention(
        query.reshape(34, 2, 8), key, value, lengths, None, np.array([0, 17, 34])
    )
    np.testing.assert_allclose(ragged.reshape(out.shape), out, rtol=2e-5, atol=2e-6)
