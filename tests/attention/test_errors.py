"""Errors have the right type and name the argument, its value and what is accepted."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from tiers import some

IDS = np.zeros((2, 10), np.int32)
MASK = packax.create_attention_mask(packax.documents(IDS))


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


GOOD = {
    "query": zeros(2, 10, 4, 8),
    "key": zeros(2, 10, 2, 8),
    "value": zeros(2, 10, 2, 6),
    "mask": MASK,
}


def call(**changes):
    return packax.flash_attention(**{**GOOD, **changes})


def raises(error, *texts):
    """Expects an exception whose message contains all texts, in any order."""

    class Raises:
        def __enter__(self):
            self.context = pytest.raises(error)
            self.info = self.context.__enter__()

        def __exit__(self, *exception):
            result = self.context.__exit__(*exception)
            for text in texts:
                assert text in str(self.info.value)
            return result

    return Raises()


def test_the_good_call_is_good():
    assert call().shape == (2, 10, 4, 6)


@pytest.mark.parametrize(
    "changes,texts",
    [
        (
            {"query": zeros(10, 4, 8)},
            ["query must have shape (batch, length, heads, dim)", "(10, 4, 8)"],
        ),
        ({"value": zeros(2, 10, 2, 6, 1)}, ["value must have shape", "(2, 10, 2, 6, 1)"]),
        ({"key": zeros(2, 10, 0, 8)}, ["key must have at least 1 head and a", "(2, 10, 0, 8)"]),
        (
            {"query": zeros(2, 10, 4, 8, dtype=jnp.int32)},
            ["query must be one of bfloat16", "int32"],
        ),
        (
            {name: GOOD[name].astype(jnp.complex64) for name in ("query", "key", "value")},
            ["query must be one of", "complex64"],
        ),
        (
            {"key": zeros(2, 10, 2, 8, dtype=jnp.bfloat16)},
            ["query, key and value must have one dtype", "float32, bfloat16 and float32"],
        ),
        ({"key": zeros(3, 10, 2, 8)}, ["key has batch size 3, but query has 2"]),
        ({"value": zeros(1, 10, 2, 6)}, ["value has batch size 1, but query has 2"]),
        ({"value": zeros(2, 11, 2, 6)}, ["value must have the length of key, 10", "11"]),
        ({"value": zeros(2, 10, 1, 6)}, ["value must have the number of heads of key, 2", "1"]),
        ({"query": zeros(2, 10, 3, 8)}, ["multiple", "3 and 2", "axes are (batch, length, heads"]),
        ({"query": zeros(2, 10, 1, 8)}, ["multiple", "1 and 2"]),
        ({"query": zeros(2, 10, 4, 9)}, ["key must have the head dim of query, 9, but has 8"]),
        ({"scale": float("nan")}, ["scale must be finite", "nan"]),
        ({"scale": np.inf}, ["scale must be finite", "inf"]),
        ({"scale": 1e39}, ["scale must be finite in float32", "1e+39"]),
        ({"scale": 10**400}, ["scale must be finite in float32"]),
        ({"scale": "0.5"}, ["scale must be a Python or numpy number", "str"]),
        ({"scale": True}, ["scale must be a Python or numpy number", "bool"]),
        ({"scale": 1j}, ["scale must be a Python or numpy number", "complex"]),
        ({"scale": jnp.ones(4)}, ["scale, where it is an array, must have shape ()", "(4,)"]),
        ({"scale": jnp.int32(1)}, ["must have shape () and a float dtype", "int32 of shape ()"]),
        ({"soft_cap": 0}, ["soft_cap must be from 1e-30 to 1e+30, but is 0", "no cap, pass None"]),
        (
            {"query": zeros(2, 4, 10, 8), "key": zeros(2, 2, 10, 8), "value": zeros(2, 2, 10, 6)}
            | {"mask": packax.causal() & packax.documents(IDS)},
            [
                *("segment_ids is for 10 query rows, but query has 4", "(2, 4, 10, 8)"),
                *("(2, 2, 10, 8)", "axes are (batch, length, heads, dim)"),
            ],
        ),
        (
            {"key": zeros(2, 7, 2, 8), "value": zeros(2, 7, 2, 6), "mask": packax.documents(IDS)},
            ["segment_ids is for 10 keys, but key has 7", "kv_segment_ids", "(2, 7, 2, 8)"],
        ),
        ({"soft_cap": -5.0}, ["soft_cap must be from", "-5.0"]),
        ({"soft_cap": float("nan")}, ["soft_cap must be from", "nan"]),
        ({"soft_cap": 1e31}, ["soft_cap must be from", "1e+31"]),
        ({"soft_cap": "30"}, ["soft_cap must be a Python or numpy number", "str"]),
        (
            {"soft_cap": jnp.float32(30)},
            ["soft_cap must be a Python or numpy number, known when tracing"],
        ),
        ({"bias": np.zeros((10, 10))}, ["bias must have shape", "(10, 10)"]),
        ({"bias": packax.alibi(np.ones(2))}, ["slopes must have shape (4,), one slope per head"]),
        ({"bias": packax.alibi([1, 2, 3, 4])}, ["slopes must be an array of floats, but is int"]),
        ({"bias": packax.alibi("a")}, ["slopes must be an array of floats, but is 'a'"]),
        ({"sinks": "a"}, ["sinks must be an array of floats, but is 'a'"]),
        ({"sinks": [0.0, [1.0]]}, ["sinks must be an array of floats, but is [0.0, [1.0]]"]),
        ({"bias": packax.alibi(None)}, ["slopes must be an array of floats, but is None"]),
        (
            {"bias": packax.alibi(np.ones(4), positions=np.zeros((3, 10), int))},
            ["positions must have shape (10,), (1, 10) or (2, 10), but has (3, 10)"],
        ),
        (
            {"bias": packax.alibi(np.ones(4), kv_positions=np.zeros(10))},
            ["kv_positions must be integers, but has dtype float"],
        ),
        (
            {"bias": packax.alibi(np.ones(4), positions=jnp.full(10, 2**31, jnp.uint32))},
            ["positions must have an integer dtype that fits int32, but has uint32: cast it"],
        ),
        (
            {"bias": packax.alibi(np.ones(4), kv_positions=np.full(10, 2**31))},
            ["kv_positions must fit int32, but holds values from 2147483648 to 2147483648"],
        ),
        (
            {
                "query": zeros(2, 7, 4, 8),
                "mask": packax.full(),
                "bias": packax.alibi(np.ones(4), positions=np.arange(7)),
            },
            ["alibi needs both positions and kv_positions", "7 query rows and 10 keys"],
        ),
        ({"return_max_logits": 1}, ["return_max_logits must be True or False, but is 1"]),
        ({"sinks": zeros(3)}, ["sinks must have shape (4,), one logit per head of query", "(3,)"]),
        ({"sinks": 1.0}, ["sinks must have shape (4,)", "()"]),
        ({"sinks": np.zeros(4, int)}, ["sinks must be an array of floats", "int"]),
        (
            {"implementation": "triton"},
            ['implementation must be None, "cuda" or "xla"', "'triton'"],
        ),
        ({"implementation": np.array([1, 2])}, ['implementation must be None, "cuda" or "xla"']),
        ({"implementation": ["xla"]}, ['implementation must be None, "cuda" or "xla"']),
        ({"return_lse": 1}, ["return_lse must be True or False, but is 1"]),
        ({"deterministic": None}, ["deterministic must be True or False, but is None"]),
        ({"checkpoint_name": 1}, ["checkpoint_name must be None or a string, but is 1"]),
        ({"mask": None}, ["mask must come from create_attention_mask", "is None", "full()"]),
        (
            {"mask": np.ones((10, 10), bool)},
            [
                "mask must come from",
                "causal() & documents",
                "bool[10, 10]",
                "ranges(lo, hi)",
                "block_sparse(",
            ],
        ),
        ({"mask": IDS}, ["mask must come from", "segment ids", "packax.documents(array)"]),
        (
            {"query": zeros(2, 12, 4, 8)},
            ["mask was built for 10 query rows and 10 keys", "query has 12 and key 10"],
        ),
        (
            {"key": zeros(2, 7, 2, 8), "value": zeros(2, 7, 2, 6)},
            ["mask was built for 10 query rows and 10 keys", "query has 10 and key 7"],
        ),
        (
            {name: jnp.tile(GOOD[name], (2, 1, 1, 1)) for name in ("query", "key", "value")},
            ["mask was built for batch size 2, but query has 4", "in_axes=mask.vmap_axes()"],
        ),
        ({"mask": jax.tree.map(lambda x: x[0], MASK)}, ["mask has row ranges of shape (10,)"]),
        (
            {"mask": packax.documents(np.zeros(9, np.int32))},
            [
                "segment_ids is for 9 query rows, but query has 10",
                "axes are (batch, length, heads, dim)",
            ],
        ),
    ],
)
def test_flash_attention(changes, texts):
    with raises(ValueError, *texts):
        call(**changes)
    traced = {name: x for name, x in {**GOOD, **changes}.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in changes.items() if name not in traced}
    if "scale" not in changes:  # an array scale is a tracer in jit, which changes the message
        with raises(ValueError, *texts):
            jax.jit(lambda traced: call(**static, **traced))(traced)


def test_a_mask_cannot_be_written():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MASK.kv_start = None


@pytest.mark.filterwarnings("ignore:causal.* aligns row 0")
@pytest.mark.parametrize(
    ("query", "key", "warns"),
    some(
        [
            ((2, 8, 128, 64), (2, 2, 128, 64), True),  # 8 heads of 128 rows, 2 of 128 keys
            ((2, 32, 512, 64), (2, 32, 512, 64), True),  # 32 heads of 512 rows
            ((2, 8, 70, 64), (2, 8, 70, 64), True),
            ((2, 70, 8, 64), (2, 70, 8, 64), False),
            (
                (1, 32, 128, 64),
                (1, 32, 128, 64),
                False,
            ),  # large models of 128 heads may have few tokens
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
        0,
        3,
        4,
        5,
        7,
        9,
    ),
)
def test_swapped_axes_are_warned_of(query, key, warns):
    """Applies where no ids define the length: inputs of shape (batch, heads, length, dim) would
    attend across heads without an error."""
    x, y = zeros(*query), zeros(*key)
    for mask in (
        packax.causal(),
        packax.create_attention_mask(packax.causal(), q_len=query[1], kv_len=key[1]),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "causal.* aligns row 0")
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
