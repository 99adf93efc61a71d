"""packax.kvax has kvax's names, settings and specs, and unsupported requests are errors.

Guards against an argument in another position than kvax's, and a request that gives a wrong result.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import packax.kvax as kvax
import pytest
from kvax_cases import ALONE, KV_IDS, KV_POSITIONS, TOKENS, tensors
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.ops.mask_creator import AttentionMask
from packax.kvax.utils import FlashAttentionParamsConfig as Params
from packax.kvax.utils import attention_specs, get_attention_specs, set_attention_specs, specs


@pytest.fixture(autouse=True)
def alone():
    with attention_specs(*ALONE):
        yield


def test_every_name_is_where_kvax_has_it():
    """As in kvax 0.1.0: modules, names, arguments in order, and defaults."""
    modules = {
        "ops": ("flash_attention", "create_attention_mask"),
        "ops.mask_creator": "create_attention_mask print_mask calculate_mask_sparsity "
        "AttentionMask",
        "ops.flash_attention_triton": ("flash_attention_triton",),
        "utils": "FlashAttentionParamsConfig PADDING_SEGMENT_ID attention_specs "
        "permute_tokens_context_parallelism unpermute_tokens_context_parallelism",
        "utils.common": "PADDING_SEGMENT_ID FlashAttentionParamsConfig H100_NAME "
        "get_default_flash_attention_params pad_to_block_size",
        "utils.sharding": "shard_map get_query_context_mesh_axis_name "
        "get_query_context_mesh_axis_size",
        "utils.specs": "AttentionSpecs Axes set_attention_specs get_attention_specs "
        "attention_specs",
        "utils.permutation": "generate_shard_indices apply_permutation "
        "permute_tokens_context_parallelism unpermute_tokens_context_parallelism",
        "utils.typing": "DeviceArray PRNGKey Specs FlattenedAttentionMask AttentionMask",
    }
    for module, names in modules.items():
        place = kvax
        for part in module.split("."):
            place = getattr(place, part)
        for name in names.split() if isinstance(names, str) else names:
            assert hasattr(place, name), f"{module}.{name}"

    def signature(function):
        return [
            name if x.default is x.empty else f"{name}={x.default}"
            for name, x in inspect.signature(function).parameters.items()
        ]

    tokens = ["query_positions", "query_segment_ids", "kv_positions", "kv_segment_ids"]
    params = ["fwd_params=None", "bwd_params=None"]
    assert signature(flash_attention) == [
        *("query", "key", "value"), *tokens, "mask", "scale=1.0", "bias=None", *params,
        "assume_sequential_positions=False", "memory_optimized_gqa_backward=False",
        "permute_tokens_for_load_balance=True", "debug=False", "mesh=None",
    ]  # fmt: skip
    assert signature(create_attention_mask) == [
        *tokens, *params, "calc_bwd_mask=False", "skip_pad_tokens=True", "mesh=None",
        "plan=None",  # added by packax
    ]  # fmt: skip
    assert signature(attention_specs) == ["query_specs", "kv_specs"]
    assert signature(Params)[:4] == [
        *("query_block_size=64", "kv_block_size=64", "num_warps=4", "num_stages=3")
    ]
    fields = ["lower_bounds", "upper_bounds", "lower_full_bounds", "upper_full_bounds"]
    assert signature(AttentionMask)[:4] == fields
    mask = create_attention_mask(*TOKENS)[0]
    assert all(x is getattr(mask, name) for x, name in zip(mask.flatten(), fields, strict=True))
    assert kvax.utils.PADDING_SEGMENT_ID == -1


def test_settings_of_each_gpu(monkeypatch):
    class Device:
        device_kind = "NVIDIA H100 80GB HBM3"

    defaults = kvax.utils.common.get_default_flash_attention_params
    assert defaults(False) == defaults(True) == Params(64, 64, 4, 3)  # no GPU
    monkeypatch.setattr(jax, "devices", lambda kind: [Device()])
    assert (defaults(False), defaults(True)) == (Params(128, 128, 8, 3), Params(64, 128, 8, 3))
    monkeypatch.setattr(Device, "device_kind", "NVIDIA H200")
    assert defaults(False) == defaults(True) == Params()


def test_pad_to_block_size():
    x = jnp.ones((2, 5, 3, 4))
    positions, ids = jnp.ones((2, 5), int), jnp.ones((2, 5), int)
    pad = kvax.utils.common.pad_to_block_size
    (padded,), positions, ids = pad((x,), positions, ids, 4, 9)
    assert padded.shape == (2, 8, 3, 4) and padded.sum() == x.size
    assert positions[0].tolist() == [1, 1, 1, 1, 1, 9, 9, 9]
    assert ids[1].tolist() == [1, 1, 1, 1, 1, -1, -1, -1]
    (padded,), _, none = pad((x.swapaxes(1, 2),), positions[:, :5], None, 4, 0, True)
    assert padded.shape == (2, 3, 8, 4) and none is None
    assert pad(None, positions, ids, 8, 0)[1] is positions


def test_specs_are_set_and_restored():
    assert get_attention_specs().query_specs == ALONE[0]
    inner = ((("data", "fsdp"), "context", "model", None), (("data", "fsdp"), None, None, None))
    with pytest.raises(KeyError), attention_specs(*inner):
        assert get_attention_specs() == specs.AttentionSpecs(*inner)
        raise KeyError
    assert get_attention_specs() == specs.AttentionSpecs(*ALONE)
    set_attention_specs(*inner)
    assert get_attention_specs().kv_specs == inner[1]
    assert specs.Axes.kv_heads is specs.Axes.heads and specs.Axes.kv_sequence == 1


@pytest.mark.parametrize(
    "query,kv,words",
    [
        ((None,) * 3, (None,) * 4, ["query_specs must have 4 entries", "has 3"]),
        (None, (None,) * 4, ["query_specs must have 4 entries", "has 0: None"]),
        ((None,) * 4, (None,) * 5, ["kv_specs must have 4 entries", "has 5"]),
        (("a", None, None, None), (None,) * 4, ["the same batch sharding", "'a' and None"]),
        ((None,) * 3 + ("a",), (None,) * 4, ["the same head_dim sharding", "'a' and None"]),
        ((None,) * 3 + ("a",), (None,) * 3 + ("a",), ["head dim cannot be sharded", "'a'"]),
        ((None, "a", None, None), (None, "a", None, None), ["None for the sequence", "'a'"]),
    ],
)
def test_specs_that_are_refused(query, kv, words):
    with pytest.raises(ValueError) as error:
        set_attention_specs(query, kv)
    assert all(word in str(error.value) for word in words), error.value
    assert get_attention_specs().query_specs == ALONE[0]


def test_no_specs(monkeypatch):
    monkeypatch.setattr(specs, "_current", specs.AttentionSpecs())
    for call in (get_attention_specs, functools.partial(create_attention_mask, *TOKENS)):
        with pytest.raises(ValueError, match="no attention specs are set"):
            call()


def test_axes_without_a_mesh():
    with attention_specs(("data", None, None, None), ("data", None, None, None)):
        with pytest.raises(
            ValueError, match=r"the attention specs .*'data'.* need a mesh: pass mesh="
        ):
            create_attention_mask(*TOKENS)
        with pytest.raises(ValueError, match="the size of the context axis needs a mesh"):
            kvax.utils.permute_tokens_context_parallelism(TOKENS[0])


MASK_ERRORS = [
    (
        {"query_positions": np.zeros(90, int)},
        ["query_positions must have shape (batch, length)", "(90,)"],
    ),
    ({"kv_segment_ids": np.zeros((4, 0), int)}, ["kv_segment_ids must have shape", "(4, 0)"]),
    ({"query_segment_ids": np.zeros((4, 90))}, ["query_segment_ids must be integers", "float64"]),
    ({"kv_positions": jnp.zeros((4, 110), jnp.uint32)}, ["fit int32", "uint32"]),
    (
        {"kv_positions": np.zeros((4, 111), int)},
        ["kv_positions and kv_segment_ids must have one shape", "(4, 111) and (4, 110)"],
    ),
    (
        {"kv_positions": KV_POSITIONS[:2], "kv_segment_ids": KV_IDS[:2]},
        ["one batch size", "4 and 2"],
    ),
]
NAMES = ("query_positions", "query_segment_ids", "kv_positions", "kv_segment_ids")


@pytest.mark.parametrize(
    "change,words",
    [
        *MASK_ERRORS,
        ({"fwd_params": Params(0, 64)}, ["fwd_params must have positive integers as block sizes"]),
        ({"fwd_params": 3}, ["fwd_params must have positive integers as block sizes, but is 3"]),
        ({"bwd_params": Params(64, 1.5)}, ["bwd_params must have positive integers as block"]),
    ],
)
def test_errors_of_create_attention_mask(change, words):
    with pytest.raises(ValueError) as error:
        create_attention_mask(**dict(zip(NAMES, TOKENS, strict=True)) | change)
    assert all(word in str(error.value) for word in words), error.value


@functools.cache
def three_masks():
    return create_attention_mask(*TOKENS, Params(16, 32), Params(64, 8), calc_bwd_mask=True)


@pytest.mark.parametrize(
    "change,words",
    [
        *MASK_ERRORS[1:],
        ({"mask": lambda: ()}, ["one AttentionMask (forward) or three", "holds 0"]),
        ({"mask": lambda: three_masks()[:2]}, ["one AttentionMask", "holds 2"]),
        ({"mask": lambda: three_masks()[0]}, ["must be the tuple", "AttentionMask"]),
        (
            {
                "mask": lambda: (
                    packax.create_attention_mask(packax.causal(), q_len=90, kv_len=110),
                    3,
                )
            },
            ["must be the tuple", "tuple of AttentionMask, int"],
        ),
        (
            {"fwd_params": Params(16, 16)},
            ["fwd_params has blocks of 16", "made with 16 and 32"],
        ),
        ({"bwd_params": Params(8, 64)}, ["bwd_params has blocks", "made with"]),
        ({"scale": None}, ["scale must be a number, but is None"]),
        ({"scale": float("nan")}, ["scale must be finite", "nan"]),
        (
            {"query": np.zeros((4, 91, 4, 16), np.float32)},
            ["query has shape (4, 91,", "have (4, 90)"],
        ),
        ({"value": np.zeros((4, 110, 1, 16), np.float32)}, ["value must have the number of heads"]),
        (
            {
                "query": np.zeros((4, 80, 4, 16), np.float32),
                "query_positions": TOKENS[0][:, :80],
                "query_segment_ids": TOKENS[1][:, :80],
            },
            ["mask was built for 90 query rows and 110 keys"],
        ),
    ],
)
def test_errors_of_flash_attention(change, words):
    query, key, value, _ = tensors()
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        **dict(zip(NAMES, TOKENS, strict=True)),
    }
    arguments |= {"mask": three_masks} | change
    arguments["mask"] = arguments["mask"]()
    with pytest.raises(ValueError) as error:
        flash_attention(**arguments)
    assert all(word in str(error.value) for word in words), error.value


def test_a_bias_is_not_implemented():
    with pytest.raises(NotImplementedError, match="bias must be None"):
        flash_attention(*tensors()[:3], *TOKENS, three_masks(), bias=jnp.zeros(()))


def test_settings_that_change_nothing():
    query, key, value, _ = tensors()
    settings = {
        "fwd_params": Params(16, 32, num_warps=1),
        "bwd_params": Params(64, 8),
        "memory_optimized_gqa_backward": True,
        "debug": True,
        "permute_tokens_for_load_balance": False,
    }
    got = jax.jit(lambda q: flash_attention(q, key, value, *TOKENS, three_masks(), **settings))(
        query
    )
    np.testing.assert_allclose(
        got, flash_attention(query, key, value, *TOKENS, three_masks()), atol=1e-6
    )
