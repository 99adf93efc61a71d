"""Attention of some query heads, one group after another into one output: primitives, rules, and
the calls for CUDA.

Guards against heads of another group read, written or forgotten, and against a copy of the output
between groups.
"""

import re

import jax
import jax.numpy as jnp
import packax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import abstract, by_name, calls, text_of, with_sm90
from packax._src.ops import ffi

# --- Calls for CUDA.


def grouped(q, k, v, head_groups, **options):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2], axis_types=(AxisType.Auto,))
    sharding = packax.AttentionSharding(P(None, "x"), P(None, "x"), mesh=mesh)
    mask = packax.create_attention_mask(packax.causal(), q_len=256, kv_len=256, sharding=sharding)
    return packax.flash_attention(q, k, v, mask, gather_head_groups=head_groups, **options)


def lowered(differentiate=(), **options):
    def loss(q, k, v):
        return grouped(q, k, v, 2, **options).astype(jnp.float32).sum()

    function = jax.grad(loss, differentiate) if differentiate else loss
    return text_of(function, *abstract(q_len=256, kv_len=256))


def attention_calls(text):
    """(target, attributes, operands, results, {operand: result that aliases it})."""
    lines = [x for x in text.splitlines() if re.search("custom_call @packax_(for|back)ward", x)]
    aliases = []
    for line in lines:
        found = re.findall(
            r"output_operand_alias<output_tuple_indices = \[(\d*)\], operand_index = (\d+)", line
        )
        aliases.append({int(operand): int(result) for result, operand in found})
    ffi_calls = [x for x in calls(text) if re.match("packax_(for|back)ward", x[0])]
    return [(*x, y) for x, y in zip(ffi_calls, aliases, strict=True)]


@pytest.mark.usefixtures("extension")
def test_groups_write_on_one_output():
    found = attention_calls(lowered((0, 1, 2)))
    kinds = ["forward", "forward", "backward", "backward"]
    assert [x[0] for x in found] == [f"packax_{kind}_v1" for kind in kinds]
    rows, keys = "2x128x8x64xbf16", "2x256x1x64xbf16"
    for i, (target, attributes, inputs, outputs, aliases) in enumerate(found):
        is_first_group = i % 2 == 0
        assert attributes["first_head"] == f"{4 * (i % 2)} : i32"
        assert attributes["heads"] == "4 : i32"
        of = by_name((target, attributes, inputs, outputs))
        assert aliases == ({} if is_first_group else {list(of).index("init"): 0})
        assert of["init"] == ("0xf32" if is_first_group else rows)
        assert inputs[:3] == [rows, keys, keys] and outputs[0] == rows
        if "forward" in target:
            assert outputs[1:] == ["2x4x128xf32", "0xf32", "1xi32"]
        else:
            of_pass = [of[name] for name in ("out", "lse", "dout", "dlse")]
            assert of_pass == [rows, "2x4x128xf32", rows, "0xf32"]
            assert outputs[1:3] == [keys, keys]
            assert outputs[-1] == f"{2 * 4 * 128}xf32"  # portable: rows of the group's heads


def test_workspace_for_sm90_is_the_group_s(extension, monkeypatch):
    monkeypatch.setattr(ffi.ext, "variants", lambda: with_sm90())
    monkeypatch.setattr(ffi, "local_capabilities", lambda: {90})
    found = [x for x in attention_calls(lowered((0, 1, 2))) if x[0] == "packax_backward_v1"]
    rows = 2 * 4 * 128
    assert [x[3][-1] for x in found] == [f"{2 * rows + 2 * 128 + rows * 64}xf32"] * 2


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    ("options", "differentiate"), [({"soft_cap": 9.0}, (0, 1, 2)), ({}, (1, 2))]
)
def test_what_slices_instead(options, differentiate):
    """Fallback kernels, and a backward without dq, which has no output to continue."""
    found = attention_calls(lowered(differentiate, **options))
    assert [x[0] for x in found] == ["packax_forward_v1"] * 2 + ["packax_backward_v1"] * 2
    heads = "0 : i32" if options else "4 : i32"  # 0: all heads of the query
    assert [x[1]["heads"] for x in found] == [heads] * 2 + ["0 : i32"] * 2


@pytest.mark.usefixtures("extension")
def test_one_group_is_a_plain_call():
    def function(q, k, v):
        return grouped(q, k, v, 1)

    ((target, *_),) = attention_calls(text_of(function, *abstract(q_len=256, kv_len=256)))
    assert target == "packax_forward_v1"
