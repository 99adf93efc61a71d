"""Inputs that no example shows: unusual containers and dtypes, JAX's debugging modes, threads.

A request gives the right numbers or a ValueError that says what is wrong, never wrong numbers.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import packings
import pytest
from packax.kvax.ops import create_attention_mask as kvax_mask
from packax.kvax.utils import attention_specs
from tiers import some

RNG = np.random.default_rng(4)
B, LENGTH, HEADS, KV_HEADS, DIM = 2, 12, 4, 2, 8
PADDED = np.stack([packings.ids_of((0, 4), (3, 5), (-1, 3)), np.full(LENGTH, -1)])
QUERY, KEY, VALUE = (
    RNG.standard_normal((B, LENGTH, heads, DIM)).astype(np.float32)
    for heads in (HEADS, KV_HEADS, KV_HEADS)
)
EXPRESSION = packax.causal() & packax.documents(PADDED)
FAR = 2**32 + 1  # becomes 1 if truncated to 32 bits


@pytest.fixture(scope="module")
def expected():
    return np.asarray(jax.jit(lambda: packax.flash_attention(QUERY, KEY, VALUE, EXPRESSION))())


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_numbers_of_64_bits_are_not_cut():
    """JAX converts NumPy's int64 to int32 by dropping bits: 2^32 + 1 would become 1, a valid
    index."""
    out = packax.decode_attention(QUERY[:, :1], KEY, VALUE, np.array([FAR, 5]))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
    pages = (x.reshape(6, 4, KV_HEADS, DIM) for x in (KEY, VALUE))
    table = np.array([[FAR, 1, 2], [3, 4, 5]])
    out = packax.decode_attention(QUERY[:, :1], *pages, np.array([9, 9]), block_table=table)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()

    ids = np.array([[1] * 6 + [FAR] * 6] * 2)
    bias = packax.alibi(np.ones(HEADS, np.float32), positions=ids[0])
    with attention_specs((None,) * 4, (None,) * 4):
        for call in (
            lambda: packax.documents(ids),
            lambda: packax.flash_attention(QUERY, KEY, VALUE, packax.causal(), bias=bias),
            lambda: packax.dot_product_attention(
                QUERY, KEY, VALUE, key_value_seq_lengths=np.array([FAR, 3])
            ),
            lambda: kvax_mask(ids % 2, ids, ids % 2, ids),
        ):
            with pytest.raises(ValueError, match="fit int32, but holds values from"):
                call()


def test_copies_of_a_mask(expected):
    mask = packax.create_attention_mask(EXPRESSION)
    attend = jax.jit(packax.flash_attention)
    for other in (
        pickle.loads(pickle.dumps(mask)),
        copy.deepcopy(mask),
        jax.tree.map(np.asarray, mask),
        packax.create_attention_mask(pickle.loads(pickle.dumps(EXPRESSION))),
        packax.create_attention_mask(jax.tree.map(lambda x: x, EXPRESSION)),
    ):
        close(attend(QUERY, KEY, VALUE, other), expected)


def loss(query, mask, **options):
    results = packax.flash_attention(query, KEY, VALUE, mask, return_lse=True, **options)
    return jnp.sum(jnp.where(jnp.isfinite(results[1]), results[1], 0)) + jnp.sum(results[0] ** 2)


def test_disable_jit(expected):
    """Without jit the primitives still compile themselves and do not recurse forever."""
    gradient = jax.jit(jax.grad(loss))(QUERY, EXPRESSION)
    decoded = packax.decode_attention(QUERY[:, :1], KEY, VALUE, np.array([3, 9]))
    with jax.disable_jit():
        close(packax.flash_attention(QUERY, KEY, VALUE, EXPRESSION), expected)
        close(jax.grad(loss)(jnp.asarray(QUERY), EXPRESSION), gradient)
        close(packax.decode_attention(QUERY[:, :1], KEY, VALUE, np.array([3, 9])), decoded)
        jax.jvp(lambda q: packax.flash_attention(q, KEY, VALUE, EXPRESSION), (QUERY,), (QUERY,))


def test_vmap_over_nothing():
    several = jnp.zeros((0, *QUERY.shape))
    for call in (
        lambda query: packax.flash_attention(query, KEY, VALUE, EXPRESSION),
        lambda query: packax.decode_attention(query[:, :1], KEY, VALUE, np.array([3, 9])),
    ):
        out = jax.vmap(call)(several)
        assert out.shape == (0, *jax.eval_shape(call, QUERY).shape) and out.dtype == QUERY.dtype
    packed = lambda ids: packax.create_attention_mask(packax.documents(ids))  # noqa: E731
    assert jax.vmap(packed)(jnp.zeros((0, B, LENGTH), jnp.int32)).kv_start.shape == (0, B, LENGTH)

    def gradients(query, key):
        attend = lambda *x: jnp.sum(packax.flash_attention(*x, VALUE, EXPRESSION))  # noqa: E731
        tangents = jax.jvp(jax.grad(attend, (0, 1)), (query, key), (query, key))[1]
        return jax.grad(attend, (0, 1))(query, key), tangents

    for dq, dk in jax.vmap(gradients, in_axes=(0, None))(several, KEY):
        assert dq.shape == several.shape and dk.shape == (0, *KEY.shape)


@pytest.mark.parametrize(
    "sizes", some([((0, 8, 8),), ((2, 0, 8),), ((2, 8, 0),), ((2, 0, 0),), ((0, 0, 0),)], 0, 1, 2),
    ids="batch {0[0]}, rows {0[1]}, keys {0[2]}".format
)  # fmt: skip
def test_nothing_to_attend(sizes):
    """As in jax.nn: empty results, zeros where there are no keys, and gradients of 0, for all kinds
    of masks."""
    batch, q_len, kv_len = sizes
    query, key = jnp.ones((batch, q_len, 4, 8)), jnp.ones((batch, kv_len, 2, 8))
    q_ids, kv_ids = (np.zeros((batch, n), np.int64) for n in (q_len, kv_len))
    expressions = [
        packax.causal(),
        packax.sliding_window(2) | packax.chunked(4),
        packax.documents(q_ids, kv_segment_ids=kv_ids),
        packax.causal()
        & packax.documents(q_ids, kv_segment_ids=kv_ids, positions=q_ids, kv_positions=kv_ids),
        packax.documents(q_ids, kv_segment_ids=kv_ids) & packax.masks.ranges(q_ids, q_ids),
        packax.prefix(np.zeros(batch, int)),
    ]
    if q_len == kv_len:
        expressions += [packax.documents(q_ids), packax.masks.spans(q_ids) | packax.causal()]
    want = jax.nn.dot_product_attention(query, key, key)
    others = {"sinks": jnp.ones(4), "bias": packax.alibi(jnp.ones(4)), "soft_cap": 2.0}

    def attend(query, key, scale, mask, **options):
        out, lse, top = packax.flash_attention(
            query, key, key, mask, scale=scale, return_lse=True, return_max_logits=True, **options
        )
        assert not np.any(out) and np.isneginf(lse).all() and np.isneginf(top).all()
        assert lse.shape == (batch, 4, q_len) and top.shape == (batch, 4)
        return out

    lengths = {"q_len": q_len, "kv_len": kv_len}
    for mask in expressions + [packax.create_attention_mask(x, **lengths) for x in expressions]:
        out = attend(query, key, 0.5, mask, **others)
        assert out.shape == want.shape and out.dtype == want.dtype
    operands = (query, key, jnp.float32(0.5))

    def total(query, key, scale):
        return jnp.sum(packax.flash_attention(query, key, key, packax.causal(), scale=scale))

    gradients = jax.grad(total, (0, 1, 2))
    for found in (
        gradients(*operands),
        jax.jit(gradients)(*operands),
        jax.jvp(gradients, operands, operands)[1],
    ):
        for gradient, x in zip(found, operands, strict=True):
            assert gradient.shape == x.shape and not np.any(gradient)


def test_nothing_to_decode():
    cache = jnp.ones((0, 16, 2, 8), jnp.bfloat16)
    none = jnp.zeros(0, jnp.int32)
    query = jnp.ones((0, 1, 4, 8), jnp.bfloat16)
    out, lse = packax.decode_attention(query, cache, cache, none, return_lse=True)
    assert out.shape == query.shape and out.dtype == query.dtype
    assert lse.shape == (0, 4, 1) and lse.dtype == jnp.float32
    pages = jnp.ones((5, 16, 2, 8), jnp.bfloat16)
    table = jnp.zeros((0, 3), jnp.int32)
    out = packax.decode_attention(query, pages, pages, none, block_table=table, sinks=jnp.ones(4))
    assert out.shape == query.shape
    rows = jnp.ones((5, 0, 4, 8), jnp.bfloat16)
    out = jax.jit(packax.decode_attention)(rows, pages, pages, jnp.ones(5, jnp.int32))
    assert out.shape == rows.shape


def test_threads():
    """Each thread traces and compiles for itself, at the same time."""
    results = {}

    def work(number):
        ids = np.full((B, LENGTH - number), number)
        cut = (x[:, : LENGTH - number] for x in (QUERY, KEY, VALUE))
        results[number] = jax.jit(packax.flash_attention)(*cut, packax.documents(ids))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        cut = (x[:, : LENGTH - number] for x in (QUERY, KEY, VALUE))
        close(results[number], packax.flash_attention(*cut, packax.full()))


def test_a_mask_cannot_be_written():
    mask = packax.create_attention_mask(packax.documents(np.zeros((2, 10), int)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.kv_start = None


@pytest.mark.filterwarnings("ignore:causal.* aligns query 0")
@pytest.mark.parametrize(
    ("query", "key", "warns"),
    some(
        [
            ((2, 8, 128, 64), (2, 2, 128, 64), True),  # 8 heads of 128 rows, 2 of 128 keys
            ((2, 32, 512, 64), (2, 32, 512, 64), True),  # 32 heads of 512 rows
            ((2, 8, 70, 64), (2, 8, 70, 64), True),
            ((2, 70, 8, 64), (2, 70, 8, 64), False),
            ((1, 32, 128, 64), (1, 32, 128, 64), False),  # large models of 128 heads
            ((1, 1, 128, 64), (1, 4096, 128, 64), False),  # decoding with such a model
            ((2, 4, 8, 64), (2, 2, 8, 64), True),
            ((2, 4, 8, 64), (2, 2, 4, 64), False),  # grouped heads, axes in the right order
            ((2, 2, 16, 64), (2, 3, 16, 64), False),
            ((2, 16, 197, 64), (2, 16, 197, 64), True),  # as many key/value heads as query heads
            ((2, 32, 160, 64), (2, 32, 160, 64), True),
            ((2, 16, 77, 64), (2, 16, 77, 64), True),
            ((2, 8, 64, 64), (2, 8, 64, 64), True),
            ((2, 77, 16, 64), (2, 77, 16, 64), False),
            ((1, 40, 96, 64), (1, 40, 96, 64), False),  # models of 96 heads
            ((1, 40, 64, 64), (1, 40, 64, 64), False),
            ((1, 8, 32, 64), (1, 8, 32, 64), False),
        ],
        *(0, 3, 4, 5, 7, 9),
    ),
)
def test_swapped_axes_are_warned_of(query, key, warns):
    """Applies where no ids define the length: inputs of shape (batch, heads, length, dim) would
    attend across heads without an error."""
    x, y = jnp.zeros(query), jnp.zeros(key)
    for mask in (
        packax.causal(),
        packax.create_attention_mask(packax.causal(), q_len=query[1], kv_len=key[1]),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "causal.* aligns query 0")
            jax.eval_shape(lambda mask=mask: packax.flash_attention(x, y, y, mask))
        assert len(said) == warns
        text = str(said[0].message) if warns else ""
        assert not warns or (
            f"query has shape {query} and key {key}" in text and "swapaxes" in text
        )
    ids = [np.zeros(shape[:2], int) for shape in (query, key)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expression = packax.documents(ids[0], kv_segment_ids=ids[1])
        jax.eval_shape(lambda: packax.flash_attention(x, y, y, expression))
