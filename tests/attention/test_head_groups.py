"""Attention of some query heads, one group after another into one output: primitives, rules, and
the calls for CUDA.

Guards against heads of another group read, written or forgotten, and against a copy of the output
between groups.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import abstract, by_name, calls, text_of, with_sm90
from packax._src.ops import ffi
from packax._src.ops import head_groups as some_heads
from primitive_calls import SPEC, arrays_of, assert_maps, backward, forward, of_pass
from tiers import some

GROUPS = (range(2), range(2, 6))  # of six query heads; two share a key/value head
Q_LEN, KV_LEN = 70, 90


def operands(dtype=jnp.float32, *more):
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(-1, 4, (2, KV_LEN))).astype(np.int32)
    places = np.broadcast_to(np.arange(KV_LEN), ids.shape)
    rows = {"segment_ids": ids[:, :Q_LEN], "positions": places[:, :Q_LEN]}
    expression = packax.documents(**rows, kv_segment_ids=ids, kv_positions=places)
    expression &= packax.causal()
    mask = arrays_of(packax.create_attention_mask(expression, q_len=Q_LEN, kv_len=KV_LEN))

    def draw(*shape):
        return jnp.asarray(rng.standard_normal((*more, *shape)), dtype)

    query, key, value = draw(2, Q_LEN, 6, 8), draw(2, KV_LEN, 3, 8), draw(2, KV_LEN, 3, 16)
    return (query, key, value), draw(2, Q_LEN, 6, 16), draw(2, 6, Q_LEN), mask


def of_keys(x, heads):
    return x[..., heads.start // 2 : heads.stop // 2, :]


def some_forward(heads, out, query, key, value, mask, spec=SPEC):
    x = of_pass("forward", mask, query=query, key=key, value=value, init=out)
    return some_heads.run("forward", heads, spec, x)


def grouped_forward(query, key, value, mask):
    out, lses = None, []
    for heads in GROUPS:
        keys, values = (of_keys(x, heads) for x in (key, value))
        out, lse = some_forward(heads, out, query, keys, values, mask)
        lses.append(lse)
    return out, jnp.concatenate(lses, 1)


def some_backward(heads, dq, tensors, mask, spec=SPEC):
    names = ("query", "key", "value", "out", "lse", "dout", "dlse")
    named = dict(zip(names, tensors, strict=False))
    return some_heads.run("backward", heads, spec, of_pass("backward", mask, **named, init=dq))


def grouped_backward(tensors, mask):
    query, key, value, out, lse, dout, dlse = tensors
    dq, parts = None, []
    for heads in GROUPS:
        keys, values = (of_keys(x, heads) for x in (key, value))
        sums = [x[:, heads.start : heads.stop] for x in (lse, dlse)]
        dq, *part = some_backward(
            heads, dq, (query, keys, values, out, sums[0], dout, sums[1]), mask
        )
        parts.append(part)
    return dq, *(jnp.concatenate(x, 2) for x in zip(*parts, strict=True))


def assert_close(got, want):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_groups_are_the_whole():
    tensors, dout, dlse, mask = operands()
    whole = jax.jit(forward)(*tensors, mask)
    assert_close(jax.jit(grouped_forward)(*tensors, mask), whole)
    everything = ((*tensors, *whole, dout, dlse), mask)
    assert_close(jax.jit(grouped_backward)(*everything), jax.jit(backward)(*everything))


def test_the_other_heads_stay():
    (query, key, value), _, _, mask = operands()
    before = jnp.full((2, Q_LEN, 6, 16), 7.0)
    out, _ = some_forward(range(2, 4), before, query, key[:, :, :1], value[:, :, :1], mask)
    np.testing.assert_array_equal(np.delete(out, (2, 3), axis=2), 7)
    assert not (out[:, :, 2:4] == 7).any()


def test_shapes():
    """With the largest logits, and with the sums that become gradients of scale and slopes."""
    (query, key, value), dout, _, mask = operands(jnp.bfloat16)
    heads = range(2, 4)
    spec = dataclasses.replace(SPEC, max_logits=True)
    results = jax.eval_shape(
        lambda *x: some_forward(heads, None, *x, mask, spec),
        *(query, of_keys(key, heads), of_keys(value, heads)),
    )
    assert [(x.shape, x.dtype) for x in results] == [
        ((2, Q_LEN, 6, 16), jnp.bfloat16),
        *[((2, 2, Q_LEN), jnp.float32)] * 2,
    ]
    sums = jnp.zeros((2, 2, Q_LEN))
    spec = dataclasses.replace(SPEC, needs_grad=(*SPEC.needs_grad, "scales"))
    results = jax.eval_shape(
        lambda *x: some_backward(heads, None, x, mask, spec),
        *(query, of_keys(key, heads), of_keys(value, heads), dout, sums, dout, sums),
    )
    assert [x.shape for x in results] == [
        (2, Q_LEN, 6, 8),
        (2, KV_LEN, 1, 8),
        (2, KV_LEN, 1, 16),
        (2, 2, 2, Q_LEN),
    ]


@pytest.mark.parametrize("mapped", some(["all", "query"], 0))
def test_vmap(mapped):
    tensors, dout, dlse, mask = operands(jnp.float32, 3)
    if mapped == "query":
        tensors = (tensors[0], tensors[1][0], tensors[2][0])
    axes = [0 if x.ndim == 5 else None for x in tensors]
    assert_maps(grouped_forward, (*tensors, mask), (*axes, None))

    def both(query, key, value, dout, dlse, mask):
        out, lse = grouped_forward(query, key, value, mask)
        return grouped_backward((query, key, value, out, lse, dout, dlse), mask)

    assert_maps(both, (*tensors, dout, dlse, mask), (*axes, 0, 0, None))


def test_forward_mode():
    tensors, _, _, mask = operands()
    tangents = tuple(jnp.flip(x, 1) for x in tensors)
    whole = lambda *x: tuple(forward(*x, mask))  # noqa: E731
    groups = lambda *x: grouped_forward(*x, mask)  # noqa: E731
    assert_close(
        jax.tree.leaves(jax.jvp(groups, tensors, tangents)),
        jax.tree.leaves(jax.jvp(whole, tensors, tangents)),
    )


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
