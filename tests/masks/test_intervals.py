"""Intervals of positions, joined by `&` and `|`: `as_array` and a mask's arrays against a
definition in 64-bit integers.

Guards against a limit that wraps around int32, a union that is two ranges, a span that ends in the
wrong position, and an offset of another batch row.
"""

import functools

import jax.numpy as jnp
import numpy as np
import packax
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from mask_checks import check
from packax._src.masks import build
from packax._src.masks.expressions import Interval, pytree

PADDING = packax.PADDING_SEGMENT_ID


@pytest.fixture(autouse=True, scope="module")
def without_jit():
    """Runs operations eagerly: each expression would be a separate program, too many to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_build", build._build.__wrapped__)
        yield


def expression_of(recipe):
    """The expression for a recipe of nested tuples."""
    kind, *rest = recipe
    if kind == "and":
        return expression_of(rest[0]) & expression_of(rest[1])
    if kind == "or":
        return expression_of(rest[0]) | expression_of(rest[1])
    if kind == "spans":
        return packax.masks.spans(rest[0], expression_of(rest[1]))
    return getattr(packax, kind)(*rest[0], **rest[1])


def meaning(recipe, document, q_len, kv_len, ranges=None):
    """(B, q_len, kv_len): whether a row attends to a key, by definition, in 64-bit integers."""
    document = {name: np.atleast_2d(x).astype(np.int64) for name, x in document.items()}
    i, j = np.arange(q_len)[None], np.arange(kv_len)[None]
    allowed = np.ones((1, q_len, kv_len), bool)
    if ranges is not None:
        lo, hi = (np.atleast_2d(x)[..., None] for x in ranges)
        allowed = (lo <= j[:, None]) & (j[:, None] < hi)
    ids = document.get("segment_ids", np.zeros((1, q_len)))
    if document:
        keys = document.get("kv_segment_ids", ids)
        allowed = allowed & (ids[..., None] == keys[:, None]) & (ids != PADDING)[..., None]
    if "positions" in document:
        i, j = document["positions"], document.get("kv_positions", document["positions"])
    return allowed & in_interval(recipe, i[..., None], j[:, None], ids)


def in_interval(recipe, i, j, ids):
    """`i`, `j`: the positions of rows, (B, q_len, 1), and of keys, (B, 1, kv_len)."""
    kind, *rest = recipe
    if kind in ("and", "or"):
        join = np.logical_and if kind == "and" else np.logical_or
        return functools.reduce(join, [in_interval(member, i, j, ids) for member in rest])
    if kind == "spans":
        return in_interval(rest[1], i, j, ids) | in_span(np.atleast_2d(rest[0]), i, j, ids)
    arguments, keywords = rest
    i = i + np.ravel(keywords.get("offset", 0)).astype(np.int64)[:, None, None]
    if kind == "full":
        return (i == i) & (j == j)
    if kind == "causal":
        return j <= i
    if kind == "chunked":
        return j // arguments[0] == i // arguments[0]
    if kind == "prefix":
        lengths = np.asarray(arguments[0])
        return (j <= i) | (j < lengths.reshape(lengths.shape + (1,) * (3 - lengths.ndim)))
    left, right = arguments
    inside = (i == i) & (j == j)
    inside = inside if left is None else inside & (i - left <= j)
    return inside if right is None else inside & (j <= i + right)


def in_span(spans, i, j, ids):
    """From the lowest to the highest position of the row's run of equal spans and documents."""
    spans, ids = np.broadcast_arrays(spans, ids)
    begins = (np.diff(spans, axis=1) != 0) | (np.diff(ids, axis=1) != 0)
    run = np.pad(np.cumsum(begins, 1), ((0, 0), (1, 0)))
    same, places = run[..., None] == run[:, None], i.swapaxes(1, 2)
    low = np.where(same, places, np.iinfo(np.int64).max).min(-1)[..., None]
    high = np.where(same, places, np.iinfo(np.int64).min).max(-1)[..., None]
    return (spans != -1)[..., None] & (low <= j) & (j <= high)


INT32 = np.iinfo(np.int32)
SIZES = st.sampled_from([0, 1, 3, 40, int(INT32.max)])


@st.composite
def leaves(draw, q_len, batch, offsets):
    kind = draw(st.sampled_from(["full", "causal", "sliding_window", "chunked", "prefix"]))
    if kind == "full":
        return ("full", (), {})
    if kind == "prefix":
        value = st.integers(-5, 140) | st.sampled_from([int(INT32.min), int(INT32.max)])
        shape = draw(st.sampled_from([(), (batch,), (batch, q_len)]))
        if shape == (batch, q_len):
            lengths = np.random.default_rng(draw(st.integers(0, 99))).integers(-5, 140, shape)
        else:
            lengths = np.array([draw(value) for _ in range(batch if shape else 1)]).reshape(shape)
        return ("prefix", (lengths.astype(np.int32),), {})
    keywords = {}
    if offsets and draw(st.booleans()):
        value = st.integers(-140, 140) | st.sampled_from([int(INT32.min), int(INT32.max)])
        shape = draw(st.sampled_from([(), (batch,)]))
        offset = np.array([draw(value) for _ in range(batch if shape else 1)]).reshape(shape)
        keywords = {"offset": offset.astype(np.int32) if shape else int(offset)}
    if kind == "sliding_window":
        return (kind, (draw(st.none() | SIZES), draw(st.none() | SIZES)), keywords)
    if kind == "chunked":
        return (kind, (max(1, draw(SIZES)),), keywords)
    return (kind, (), keywords)


@st.composite
def intervals(draw, q_len, batch, offsets, spans, depth=2):
    kind = draw(st.sampled_from(["leaf", "and", "or", *["spans"] * spans])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves(q_len, batch, offsets))
    if kind == "spans":
        ids = draw(strategies.ids(q_len, batch))
        ids = ids[0] if batch == 1 and draw(st.booleans()) else ids
        return ("spans", ids, draw(intervals(q_len, batch, False, spans, depth - 1)))
    sides = [draw(intervals(q_len, batch, offsets, spans, depth - 1)) for _ in range(2)]
    return (kind, *sides)


@st.composite
def extremes(draw, length, batch):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = np.array([INT32.min, INT32.min + 1, -3, 0, 2, INT32.max - 2, INT32.max], np.int32)
    values = rng.choice(ends, (batch, length))
    return np.sort(values, axis=1) if draw(st.booleans()) else values


@st.composite
def masks(draw):
    """(recipe, document, ranges, q_len, kv_len) with one batch size, or 1, for all arrays."""
    batch = draw(st.sampled_from([1, 2]))
    document, q_len, kv_len = draw(strategies.documents(batch))
    if not draw(st.booleans()):
        document = {}
    if "positions" in document and draw(st.booleans()):
        kinds = [name for name in ("positions", "kv_positions") if name in document]
        document |= {
            name: draw(extremes(q_len if name == "positions" else kv_len, batch)) for name in kinds
        }
    spans = q_len == kv_len and not any(name.startswith("kv_") for name in document)
    recipe = draw(intervals(q_len, batch, "positions" not in document, spans))
    ranges = draw(st.none() | strategies.bounds(q_len, kv_len, batch))
    return recipe, document, ranges, q_len, kv_len


@pytest.mark.filterwarnings("ignore::UserWarning")  # whatever is drawn has a defined meaning
@given(masks())
def test_arrays_and_as_array_are_the_definition(drawn):
    recipe, document, ranges, q_len, kv_len = drawn
    try:
        expression = expression_of(recipe)
    except NotImplementedError:  # `|` that may be two ranges: see test_refusals
        return
    if document:
        expression = expression & packax.documents(**document)
    if ranges is not None:
        expression = packax.masks.ranges(*ranges) & expression
    mask = packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len)
    check(mask, expression)

    dense = np.asarray(expression.as_array(q_len, kv_len))
    assert dense.dtype == bool and dense.shape[-2:] == (q_len, kv_len)
    wanted = meaning(recipe, document, q_len, kv_len, ranges)
    np.testing.assert_array_equal(*np.broadcast_arrays(dense, wanted))


IDS = np.zeros(4, np.int32)
CACHE = jnp.arange(2)


@pytree(static=("size",))
class BlockCausal(Interval):
    """A mask kind written as CONTRIBUTING.md describes, with only the required methods: rows attend
    to their block and all earlier ones."""

    size: int

    def _last(self, places):
        return places // self.size * self.size + self.size - 1

    def limits(self, at):
        return None, self._last(at.q)

    def _as_array(self, at):
        return at.kv[..., None, :] <= self._last(at.q)[..., :, None]


def test_a_window_bounds_spans():
    """Gemma 3's local layers: text has a causal window, and images are bounded on both sides."""
    images = np.array([-1, -1, 5, 5, 5, 5, 5, 5, -1, -1], np.int32)
    at = np.arange(len(images))
    away = at - at[:, None]
    same = (images[:, None] == images) & (images != -1)
    wanted = (np.abs(away) <= 2) & ((away <= 0) | same)
    expression = packax.masks.spans(images) & packax.sliding_window(2, 2)
    np.testing.assert_array_equal(expression.as_array(10, 10), wanted)
    unbounded = packax.masks.spans(images, packax.sliding_window(2)).as_array(10, 10)
    assert unbounded[2, 7] and not wanted[2, 7]
    check(packax.create_attention_mask(expression), expression)


def test_a_kind_of_ones_own():
    expression = BlockCausal(3) & packax.documents([0, 0, 0, 0, 1, 1, 1, -1])
    check(packax.create_attention_mask(expression), expression)
    assert isinstance(packax.full() | BlockCausal(3), Interval)


@pytest.mark.parametrize("keys", [1, 2, 7])
def test_a_window_of_a_number_of_keys(keys):
    """It includes the token itself, as in the configurations of models."""
    expression = packax.sliding_window(window=keys)
    assert expression == packax.sliding_window(keys - 1)
    counts = expression.as_array(9, 9).sum(axis=1)
    np.testing.assert_array_equal(counts, np.minimum(np.arange(9) + 1, keys))
    assert repr(packax.sliding_window(window=keys, offset=2)) == repr(
        packax.sliding_window(keys - 1, offset=2)
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: packax.causal(7) | packax.prefix(3),  # both are unbounded below
        lambda: packax.sliding_window(3, None, offset=2) | packax.sliding_window(1, None),
        lambda: packax.full() | packax.chunked(3, offset=9),
        lambda: packax.sliding_window(1, offset=CACHE) | packax.chunked(4, offset=CACHE),
        lambda: (
            packax.sliding_window(1, offset=[4, 5]) | packax.chunked(4, offset=np.array([4, 5]))
        ),
        lambda: (
            (packax.causal() & packax.chunked(4))
            | packax.masks.spans(IDS, packax.sliding_window(1))
        ),
        # The first union contains each row's own position, so it can be joined again.
        lambda: (packax.full() | packax.chunked(3, offset=9)) | packax.chunked(3),
    ],
)
def test_unions_that_are_one_range(build):
    expression = build()
    check(packax.create_attention_mask(expression, q_len=4, kv_len=4), expression)


ENDS = np.array([INT32.min, INT32.min + 1, -4, 0, 3, INT32.max - 1, INT32.max], np.int32)


@pytest.mark.parametrize("falling", [False, True], ids=["ordered", "tested"])
@pytest.mark.parametrize(
    "recipe",
    [
        ("sliding_window", (2, 2), {}),
        ("sliding_window", (int(INT32.max), None), {}),
        ("sliding_window", (None, int(INT32.max)), {}),
        ("chunked", (3,), {}),
        ("chunked", (int(INT32.max),), {}),
        ("prefix", (np.int32(INT32.min),), {}),
    ],
    ids=str,
)
def test_positions_at_the_ends_of_int32(recipe, falling):
    """Limits that would overflow int32, for all pairs."""
    positions = np.roll(ENDS, 3) if falling else ENDS
    document = {"segment_ids": np.zeros(7, np.int32), "positions": positions}
    expression = expression_of(recipe) & packax.documents(**document)
    np.testing.assert_array_equal(expression.as_array(7, 7), meaning(recipe, document, 7, 7)[0])
    check(packax.create_attention_mask(expression), expression)


@pytest.mark.parametrize("offset", [-1, 2, int(INT32.min), int(INT32.max)])
def test_offsets_to_the_ends_of_int32(offset):
    for recipe in (
        ("causal", (), {"offset": offset}),
        ("sliding_window", (int(INT32.max), 1), {"offset": offset}),
        ("sliding_window", (1, int(INT32.max)), {"offset": offset}),
        ("chunked", (3,), {"offset": offset}),
    ):
        expression = expression_of(recipe)
        np.testing.assert_array_equal(expression.as_array(4, 6), meaning(recipe, {}, 4, 6)[0])
        check(packax.create_attention_mask(expression, q_len=4, kv_len=6), expression)


def test_a_union_with_a_kind_that_does_not_say_its_limits():
    with pytest.raises(NotImplementedError, match="certainly one range"):
        BlockCausal(4) | packax.causal()
