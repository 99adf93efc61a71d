"""Masks that are probably a mistake warn where their values are known, and no other masks do.

Guards against a prompt chunk whose window ignores the cache, a new token that attends only to the
first key, and padding that becomes a document.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest

N, W = 6, 3
OFFSETS = np.array([6, 2], np.int32)
TRACED = jnp.array([6, 2])


@pytest.fixture(autouse=True)
def errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def build(expression, q_len=4, kv_len=10):
    return packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len)


@pytest.mark.parametrize(
    "expression",
    [
        packax.causal(N) & packax.sliding_window(W),
        packax.causal(offset=N) & packax.chunked(4),
        packax.causal(N) & packax.sliding_window(W, offset=N - 1),
        packax.causal(OFFSETS) & packax.sliding_window(W),
        packax.causal(OFFSETS) & packax.sliding_window(W, offset=N),
        packax.causal(TRACED) & packax.sliding_window(W),  # unknown, but not one array used twice
    ],
)
def test_unequal_offsets(expression):
    text = r"different offsets in one `&`.* sliding_window\(w, offset=n\)"
    with pytest.warns(UserWarning, match=text):
        build(expression)


def test_equal_offsets():
    other = TRACED + 0
    for expression in (
        packax.causal(N) & packax.sliding_window(W, offset=N),
        packax.causal(OFFSETS) & packax.chunked(4, offset=OFFSETS.copy()),
        packax.causal(TRACED) & packax.chunked(4, offset=other),
        packax.causal(N) & packax.full(),
        packax.causal(N) | packax.prefix(2),
    ):
        build(expression)
        jax.jit(build)(expression)
    build(packax.causal() & packax.sliding_window(W), 4, 4)


def test_a_window_behind_a_cache():
    """The rows of docs/guide/masks.md: the last 4 of 10 tokens, each with the W tokens before
    it."""
    expression = packax.sliding_window(W, offset=N)
    whole = packax.sliding_window(W).as_array(10, 10)
    np.testing.assert_array_equal(expression.as_array(4, 10), whole[N:])


COUNTS = r"causal\(\) aligns query 0 with key 0.*offset=kv_len - q_len"


def test_new_rows_without_an_offset():
    query, key = jnp.ones((2, 1, 2, 8)), jnp.ones((2, 10, 2, 8))
    with pytest.warns(UserWarning, match=COUNTS):
        packax.flash_attention(query, key, key, packax.causal())
    with pytest.warns(UserWarning, match=COUNTS):
        jax.jit(lambda: build(packax.causal() & packax.sliding_window(W)))()


def test_rows_that_are_placed():
    ids, kv_ids = np.zeros(4, int), np.zeros(10, int)
    positions = {"positions": np.arange(6, 10), "kv_positions": np.arange(10)}
    for expression in (
        packax.causal(6),
        packax.causal(TRACED[0]),
        packax.causal() & packax.documents(ids, kv_segment_ids=kv_ids),  # keys of another sequence
        packax.causal() & packax.documents(ids, kv_segment_ids=kv_ids, **positions),
        packax.full(),
    ):
        build(expression)
    build(packax.causal(), 10, 10)
    build(packax.causal(), 10, 4)


LIKE_PADDING = [
    [1, 1, 1, 2, 2, 0, 0],
    [[1, 1, 2, 3], [1, 1, 0, 0]],
    [1, 1, 1, 0],  # a 0/1 mask
    [0, 0, 1, 1, -100, -100],
]


@pytest.mark.parametrize("ids", LIKE_PADDING)
def test_ids_that_look_like_padding(ids):
    padding = np.min(ids)
    first = np.ravel(ids)[0]
    text = rf"segment_ids ends with {padding} after ids from {first} on, .*"
    text += rf"np.where\(ids == {padding}, -1, ids\), or give the document {padding} a higher id"
    for given in (ids, np.array(ids), np.array(ids, np.uint8 if padding == 0 else np.int64)):
        with pytest.warns(UserWarning, match=f"^{text}"):
            packax.documents(given)
    with pytest.warns(UserWarning, match=f"^kv_{text}"):
        packax.documents(np.full((1, 3), 1), kv_segment_ids=ids)


def test_jax_arrays_under_debug_checks():
    with packax.context.debug_checks(), pytest.warns(UserWarning, match="^segment_ids ends with 0"):
        packax.documents(jnp.array([1, 1, 0]))


def test_attention_masks_with_padding_on_the_left():
    with pytest.warns(UserWarning, match=r"^segment_ids is 0, then 1, .*from_attention_mask"):
        packax.documents([[0, 0, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize(
    "ids",
    [
        [0, 0, 1, 1],
        [[0, 0, 1, 1], [0, 1, 1, 1]],  # two documents in each row
        [0, 0, 1, 1, 0, 0],  # an id that reappears
        [0, 0, 0],
        [1, 1, -1, 0],
        [2, 1, 0, 0],  # ids do not increase
        [[1, 1, 0, 0], [0, 0, 1, 1]],  # 0 is a document in another row
        [-100, -100, 1],
        [],
        jnp.array([1, 1, 0, 0]),  # reading it would wait for the device
    ],
)
def test_other_ids(ids):
    ids = ids if isinstance(ids, jax.Array) else np.array(ids, int)
    packax.documents(ids)


def test_each_warning_stands_at_the_call_of_the_user():
    with pytest.warns(UserWarning) as caught:
        packax.documents([1, 1, 0])
        build(packax.causal(N) & packax.sliding_window(W))
    assert {re.sub(".*/", "", x.filename) for x in caught} == {"test_warnings.py"}
