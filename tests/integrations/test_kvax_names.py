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
import packax.kvax as kvax
import pytest
from kvax_cases import ALONE, TOKENS, tensors
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
    with pytest.raises(ValueError, match="query_specs must have 4 entries"):
        set_attention_specs((None,) * 3, (None,) * 4)
    assert get_attention_specs().kv_specs == inner[1]  # a refused call changes nothing


def test_no_specs(monkeypatch):
    monkeypatch.setattr(specs, "_current", specs.AttentionSpecs())
    for call in (get_attention_specs, functools.partial(create_attention_mask, *TOKENS)):
        with pytest.raises(ValueError, match="no attention specs are set"):
            call()


def three_masks():
    return create_attention_mask(*TOKENS, Params(16, 32), Params(64, 8), calc_bwd_mask=True)


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
