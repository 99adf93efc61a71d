"""packax.kvax on one device: every argument has kvax's meaning, against dense attention in float64.

Guards against a mask that differs from what the arguments mean, an argument in another position
than kvax's, a checkpoint policy that stops working, and a request that gives a wrong result.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import packax
import pytest
from jaxprs import count
from kvax_cases import (
    ALONE,
    BATCH,
    DIM,
    KV_LEN,
    Q_LEN,
    TOKENS,
    tensors,
)
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.ops.mask_creator import AttentionMask, calculate_mask_sparsity
from packax.kvax.utils import attention_specs


@pytest.fixture(autouse=True)
def alone():
    with attention_specs(*ALONE):
        yield


def allowed(*, by_index=False, padding=False):
    q_pos, q_ids, kv_pos, kv_ids = TOKENS
    if by_index:
        q_pos, kv_pos = np.arange(Q_LEN)[None], np.arange(KV_LEN)[None]
    same = (q_ids[:, :, None] == kv_ids[:, None]) & (padding | (q_ids != -1)[:, :, None])
    return same & (q_pos[:, :, None] >= kv_pos[:, None])


@functools.partial(jax.jit, static_argnames=("skip_pad_tokens", "sequential", "bounds"))
def run(query, key, value, dout, skip_pad_tokens=True, sequential=False, bounds=False):
    """Output and gradients, with a mask for the forward pass only."""
    masks = create_attention_mask(*TOKENS, skip_pad_tokens=skip_pad_tokens)
    if bounds:
        masks = tuple(AttentionMask.unflatten(mask.flatten()) for mask in masks)

    def attention(query, key, value):
        return flash_attention(
            query, key, value, *TOKENS, masks,
            assume_sequential_positions=sequential,
        )  # fmt: skip

    out, transpose = jax.vjp(attention, query, key, value)
    return out, *transpose(dout)


def check(got, dense, scale=1.0):  # kvax's default
    inputs = tensors()
    true = oracle.exact(*inputs[:3], dense, scale, inputs[3])
    yardstick = oracle.plain(*inputs[:3], dense, scale, inputs[3])
    out, *gradients = got
    oracle.check(oracle.Results(out, yardstick.lse, *gradients), true, yardstick)


def test_segments_and_positions_decide():
    check(run(*tensors()), allowed())
    assert (
        not allowed().any(2)[1, 60:].any() and not allowed().any(2)[1, 11:18].any()
    )  # rows without keys


def test_assume_sequential_positions_compares_places():
    assert (allowed(by_index=True) != allowed()).any()
    check(run(*tensors(), sequential=True), allowed(by_index=True))


def test_padding_that_is_not_skipped_attends_padding():
    assert (allowed(padding=True) != allowed()).any()
    check(run(*tensors(), skip_pad_tokens=False), allowed(padding=True))


def test_a_mask_of_bounds_alone_takes_the_calls_ids_and_positions():
    """How programs carried kvax's masks across jit: flatten, and unflatten inside."""
    for x, y in zip(run(*tensors(), bounds=True), run(*tensors()), strict=True):
        np.testing.assert_array_equal(x, y)


def test_masks_cross_jit_scan_and_remat():
    masks = jax.jit(functools.partial(create_attention_mask, *TOKENS, calc_bwd_mask=True))()
    assert isinstance(masks, tuple) and [type(mask) for mask in masks] == [AttentionMask] * 3
    query, key, value, dout = tensors()

    @jax.jit
    def two_layers(query, masks):
        @jax.checkpoint
        def layer(query, masks):
            return flash_attention(query, key, value, *TOKENS, masks)[..., :DIM]

        def body(carry, _):
            query, masks = carry
            return (layer(query, masks), masks), None

        return jax.lax.scan(body, (query, masks), None, length=2)[0][0]

    def plain(query):
        once = flash_attention(query, key, value, *TOKENS, masks)[..., :DIM]
        return flash_attention(once, key, value, *TOKENS, masks)[..., :DIM]

    got = jax.vjp(lambda q: two_layers(q, masks), query)
    expected = jax.vjp(jax.jit(plain), query)
    np.testing.assert_allclose(got[0], expected[0], atol=1e-6)
    got, expected = (transpose(dout[..., :DIM])[0] for _, transpose in (got, expected))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_remat_by_kvaxs_name_runs_the_kernel_once():
    query, key, value, _ = tensors()

    def loss(query):
        return flash_attention(query, key, value, *TOKENS, create_attention_mask(*TOKENS)).sum()

    for names, times in (
        (("attention_outputs",), 1),
        (packax.CHECKPOINT_NAMES, 1),
        (("anything_else",), 2),
    ):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        gradient = jax.grad(jax.checkpoint(loss, policy=policy))
        assert count("packax_forward", gradient, query) == times, names


def test_a_layer_costs_packaxs_own_call_and_nothing_more():
    query, key, value, _ = tensors()
    masks = jax.jit(functools.partial(create_attention_mask, *TOKENS, calc_bwd_mask=True))()

    tokens = [jnp.asarray(x) for x in TOKENS]  # NumPy arrays would be transferred in each layer

    def through_kvax(query, sequential):
        return flash_attention(
            query, key, value, *tokens, masks, assume_sequential_positions=sequential
        )

    mask = masks[0].row_masks.by_position
    direct = jax.make_jaxpr(lambda query: packax.flash_attention(query, key, value, mask, scale=1))(
        query
    )
    for sequential in (False, True):
        jaxpr = jax.make_jaxpr(through_kvax, static_argnums=1)(query, sequential)
        assert [x.primitive.name for x in jaxpr.eqns] == [x.primitive.name for x in direct.eqns]


def test_masks_that_a_program_does_not_use_are_not_made():
    query, key, value, _ = tensors()

    def compiled(build):
        program = jax.jit(lambda *xs: packax.flash_attention(*xs, build(), scale=1.0))
        return program.lower(query, key, value).compile().as_text()

    q_pos, q_ids, kv_pos, kv_ids = (jnp.asarray(x) for x in TOKENS)
    documents = packax.documents(q_ids, kv_segment_ids=kv_ids, positions=q_pos, kv_positions=kv_pos)
    direct = compiled(lambda: packax.create_attention_mask(packax.causal() & documents))
    ours = compiled(
        lambda: create_attention_mask(*TOKENS, calc_bwd_mask=True)[0].row_masks.by_position
    )
    size = lambda text: len(re.findall(r"^\s+\S+ = ", text, re.M))  # noqa: E731
    assert size(ours) <= 1.02 * size(direct)


def test_an_empty_batch():
    ids = np.zeros((0, 16), np.int32)
    masks = create_attention_mask(ids, ids, ids, ids, calc_bwd_mask=True)
    x = jnp.zeros((0, 16, 2, 8))
    assert flash_attention(x, x, x, ids, ids, ids, ids, masks).shape == x.shape
    assert calculate_mask_sparsity(masks[0], 64, 64, 16, 16) == 0
    with pytest.raises(ValueError, match=r"length at least 1, but has \(2, 0\)"):
        create_attention_mask(*[np.zeros((2, 0), np.int32)] * 4)


def test_vmap():
    query, key, value, _ = tensors()
    masks = create_attention_mask(*TOKENS)
    several = jnp.stack([query, 2 * query])
    attention = functools.partial(flash_attention, key=key, value=value, mask=masks)
    names = ("query_positions", "query_segment_ids", "kv_positions", "kv_segment_ids")
    attention = functools.partial(attention, **dict(zip(names, TOKENS, strict=True)))
    got = jax.jit(jax.vmap(attention))(several)
    np.testing.assert_allclose(got[0], run(*tensors())[0], atol=1e-6)


@pytest.mark.exhaustive
def test_export_with_symbolic_sizes():
    """One program for every batch and length: bounds, output and gradients equal those of known
    sizes."""

    def step(query, key, value, dout, *tokens):
        masks = create_attention_mask(*tokens, calc_bwd_mask=True, skip_pad_tokens=False)
        attention = lambda *x: flash_attention(*x, *tokens, masks)  # noqa: E731
        out, transpose = jax.vjp(attention, query, key, value)
        return out, transpose(dout), [mask.flatten() for mask in masks]

    x = [*tensors(), *map(jnp.asarray, TOKENS)]
    sizes = dict(zip((BATCH, Q_LEN, KV_LEN), jax.export.symbolic_shape("b, s, t"), strict=True))
    shapes = [
        jax.ShapeDtypeStruct((*(sizes[n] for n in y.shape[:2]), *y.shape[2:]), y.dtype) for y in x
    ]
    program = jax.export.export(jax.jit(step))(*shapes)
    got, expected = program.call(*x), jax.jit(step)(*x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
