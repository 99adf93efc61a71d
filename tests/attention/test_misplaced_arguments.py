"""Arguments of the wrong kind, and what errors advise.

Guards against NumPy and JAX errors that name no argument, and against arguments that are accepted
silently and have no effect.
"""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest

Q, ONE = jnp.ones((2, 8, 2, 8)), jnp.ones((2, 1, 2, 8))
LENGTHS, TABLE = np.array([5, 6]), np.zeros((2, 1), int)
CAUSAL = packax.causal()
MASK = packax.create_attention_mask(CAUSAL & packax.documents(np.zeros((2, 8), int)))


def attend(query=Q, key=Q, value=Q, mask=CAUSAL, **options):
    return packax.flash_attention(query, key, value, mask, **options)


def decode(query=ONE, key=Q, value=Q, lengths=LENGTHS, **options):
    return packax.decode_attention(query, key, value, lengths, **options)


def shared(query=ONE, lengths=LENGTHS, prefixes=(1,), table=TABLE, **options):
    return packax.decode_shared_prefix(query, Q, Q, lengths, prefixes, block_table=table, **options)


def write(cache=Q, new=ONE):
    return packax.kv_cache.write(cache, new, TABLE, TABLE)


def test_lengths_beyond_int32():
    """Lengths that no cache can have give NaN, as other lengths beyond the cache do, and no NumPy
    error."""
    assert np.isnan(shared(lengths=[2**40, 2])[0]).all()
    assert np.isnan(decode(lengths=[2**40, 2])[0]).all()


def test_masks_are_no_arrays():
    """NumPy would wrap a mask in a one-element object array."""
    for x, name in ((MASK, "an AttentionMask"), (CAUSAL, "a Causal")):
        for function in (np.asarray, jnp.asarray):
            with pytest.raises(TypeError, match=rf"{name} is not an array: its as_array\(\)"):
                function(x)


def test_a_rate_of_zero_with_a_key():
    """As in evaluation: the key is not read."""
    key = jax.random.key(0)
    np.testing.assert_array_equal(attend(dropout_rate=0.0, dropout_key=key), attend())


def test_more_rows_than_decoding_takes():
    """The advice in that error, causal(offset=kv_lengths - rows), is exact."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, n, 2, 8)), jnp.float32) for n in (17, 40, 40)
    )
    lengths = np.array([40, 21])
    out = packax.flash_attention(query, key, value, packax.causal(offset=lengths - 17))
    wanted = packax.decode_attention(query[:, 1:], key, value, lengths)
    np.testing.assert_allclose(out[:, 1:], wanted, rtol=2e-5, atol=2e-6)
