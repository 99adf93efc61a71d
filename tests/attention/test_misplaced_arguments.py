"""Arguments of the wrong kind: the error names the argument, its value and what is accepted.

Guards against NumPy and JAX errors that name no argument, and against arguments that are accepted
silently and have no effect.
"""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import PartitionSpec as P
from packax.integrations import flash_attention_jax, flax
from packax.kvax import ops as kvax
from packax.kvax.utils import attention_specs

Q, ONE = jnp.ones((2, 8, 2, 8)), jnp.ones((2, 1, 2, 8))
LENGTHS, TABLE = np.array([5, 6]), np.zeros((2, 1), int)
CAUSAL = packax.causal()
MASK = packax.create_attention_mask(CAUSAL & packax.documents(np.zeros((2, 8), int)))
PLAN = packax.context_plan(packax.documents(np.zeros((1, 1024), int)), ranks=2)


def attend(query=Q, key=Q, value=Q, mask=CAUSAL, **options):
    return packax.flash_attention(query, key, value, mask, **options)


def decode(query=ONE, key=Q, value=Q, lengths=LENGTHS, **options):
    return packax.decode_attention(query, key, value, lengths, **options)


def shared(query=ONE, lengths=LENGTHS, prefixes=(1,), table=TABLE, **options):
    return packax.decode_shared_prefix(query, Q, Q, lengths, prefixes, block_table=table, **options)


def write(cache=Q, new=ONE):
    return packax.kv_cache.write(cache, new, TABLE, TABLE)


def attend_kvax(query=Q, key=Q):
    with attention_specs((None,) * 4, (None,) * 4):
        return kvax.flash_attention(query, key, Q, *[np.zeros((2, 8), int)] * 4, mask=None)


def build(**options):
    return packax.create_attention_mask(packax.documents(np.zeros(8, int)), **options)


@pytest.mark.parametrize(
    "call,text",
    [
        (lambda: attend("q"), "query must be an array, but is a str"),
        (lambda: attend(None), "query must be an array, but is None"),
        (lambda: attend(key=jnp.ones), r"key must be .* is the function ones: call it, as in ones"),
        (lambda: attend(value=MASK), "value must be an array, but is an AttentionMask"),
        (lambda: attend(jnp.ones(8)), r"query must have shape \(batch, .*, dim\), not \(8,\)"),
        (lambda: attend(key=1.0), r"key must have shape \(batch, .*, dim\), not \(\)"),
        (lambda: attend(value=[]), r"value must have shape \(batch, .*, dim\), not \(0,\)"),
        (lambda: attend(bias="x"), r"bias must be None, alibi\(slopes\) or .* but is a str"),
        (lambda: attend(bias=packax.alibi), r"bias must .* alibi: call it, as in alibi\(...\)"),
        (lambda: attend(mask=packax.causal), r"mask must .* but is the function causal: call it"),
        (lambda: attend(mask=None), r"is None: for no mask at all pass full\(\).*attention_fn\(\)"),
        (lambda: attend(scale=jax.random.key(0)), r"scale, .* key<fry> .*, a key of jax.random"),
        (lambda: attend(dropout_key=jax.random.key(0)), "dropout_key .* without dropout_rate"),
        (lambda: packax.dot_product_attention(Q, Q, Q, MASK),
            "bias is an AttentionMask: pass a mask by its name, as mask="),
        (lambda: packax.dot_product_attention(Q, Q, Q, CAUSAL), "bias is a Causal: pass a mask by"),
        (lambda: packax.dot_product_attention(Q, "k", Q), "key must be an array, but is a str"),
        (lambda: packax.dot_product_attention(Q, Q, Q, mask="m"), "mask must be an array, but "),
        (lambda: packax.dot_product_attention(Q, Q, Q, scale="s"), "scale must be .* but is a str"),
        (lambda: flax.dot_product_attention("q", Q, Q), "query must be an array, but is a str"),
        (lambda: flax.dot_product_attention(Q, Q, Q, "b"), "bias must be an array, but is a str"),
        (lambda: flax.dot_product_attention(Q, Q, Q, mask="m"), "mask must be an array, .* a str"),
        (lambda: flash_attention_jax.flash_attention(Q, None, Q), "k must be an array, .* None"),
        (lambda: attend_kvax("q"), "query must be an array, but is a str"),
        (lambda: attend_kvax(key=None), "key must be an array, but is None"),
        (lambda: packax.documents([[0, 1], [1]]),
            "segment_ids must be an array of integers, but is a list whose rows differ in length"),
        (lambda: packax.documents(None), "segment_ids must be an array of integers, but is None"),
        (lambda: packax.documents("abc"), "segment_ids must be an array of integers, but is a str"),
        (lambda: packax.documents([2**70]), r"segment_ids must fit int32, .* 11805916207174113034"),
        (lambda: packax.documents(jax.random.split(jax.random.key(0))),
            "segment_ids must be integers, but has dtype key<fry>"),
        (lambda: packax.documents(np.ma.masked_equal([0, 0, -1], -1)),
            r"segment_ids must be an array without a mask, .* segment_ids.filled\(...\)"),
        (lambda: packax.causal(None), "offset must be an array of integers, but is None"),
        (lambda: packax.masks.spans([1], MASK), "text must be .* but is an AttentionMask"),
        (lambda: packax.create_attention_mask(MASK), "expression must be .* is an AttentionMask"),
        (lambda: build(permuted_keys=np.ones(3)), r"permuted_keys must be True .*float64\[3\]"),
        (lambda: build(permuted_keys="no"), "permuted_keys must be True .* or False, .* is a str"),
        (lambda: CAUSAL.as_array("x", 4), "q_len must be an integer, but is 'x'"),
        (lambda: CAUSAL.as_array(4, -1), "kv_len must be from 0 to .*, but is -1"),
        (lambda: packax.context_plan(CAUSAL, ranks=2, kind=[], length=1024), r"kind .* is \[\]"),
        (lambda: PLAN.permute(np.ones((1, 1024)), axis={}), "axis must be an integer, but is {}"),
        (lambda: PLAN.unpermute(np.ones((1, 1024)), axis="1"), "axis must be an integer, .*'1'"),
        (lambda: packax.AttentionSharding(query=float("nan"), key_value=P()),
            "sharding.query must be a PartitionSpec .* but is nan"),
        (lambda: packax.AttentionSharding(query=P(), key_value="data"),
            "sharding.key_value must be a PartitionSpec .* but is 'data'"),
        (lambda: decode(None), "query must be an array, but is None"),
        (lambda: decode(lengths=None), "kv_lengths must be an array of integers, but is None"),
        (lambda: decode(lengths=[[1], [1, 2]]), "kv_lengths must .* whose rows differ in length"),
        (lambda: decode(block_table=len), "block_table must be .* the function len: call it"),
        (lambda: decode(jnp.ones((2, 17, 2, 8))), r"with causal\(offset=kv_lengths - 17\)"),
        (lambda: decode(window=(3, 5)), r"window=\(3, 5\) .* 5 keys after .* pass \(3, 0\), or "),
        (lambda: shared(jnp.float32(1)), r"query must be \(batch, rows, heads, dim\).* shape \(\)"),
        (lambda: shared(return_lse="yes"), "return_lse must be True or False, but is 'yes'"),
        (lambda: write("cache"), "cache must be an array, but is a str"),
        (lambda: write(new=None), "new must be an array, but is None"),
        (lambda: shared(table="x"), "block_table must be an array of integers, but is a str"),
    ],
)  # fmt: skip
def test_errors(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    "options,text",
    [
        ({"is_causal": True}, r"no argument 'is_causal': pass packax.causal\(\) as mask"),
        ({"segment_ids": np.zeros(8)}, r"'segment_ids': pass packax.documents\(segment_ids\)"),
        ({"attn_mask": np.ones((8, 8), bool)}, r"'attn_mask': .*block_sparse\(array, 1\)"),
        ({"window_size": (3, 0)}, r"pass packax.sliding_window\(left, right\) as mask"),
        ({"sm_scale": 1.0}, "'sm_scale': pass scale$"),
        ({"nonsense": 1}, r"flash_attention\(\) has no argument 'nonsense'$"),
    ],
)
def test_arguments_of_other_libraries(options, text):
    with pytest.raises(TypeError, match=text):
        packax.flash_attention(Q, Q, Q, **options)


def test_no_mask():
    with pytest.raises(ValueError, match=r"but is None: for no mask at all pass full\(\)"):
        packax.flash_attention(Q, Q, Q)


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
