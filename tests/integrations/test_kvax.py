"""packax.kvax on one device: masks that cross jit, remat by kvax's name, cost.

test_faces.py compares every argument with the reference. Guards against a checkpoint policy that
stops working, and masks that a program computes in vain.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jaxprs import count
from kvax_cases import ALONE, DIM, TOKENS, tensors
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.ops.mask_creator import AttentionMask, calculate_mask_sparsity
from packax.kvax.utils import attention_specs


@pytest.fixture(autouse=True)
def alone():
    with attention_specs(*ALONE):
        yield


def test_masks_cross_jit_scan_and_remat():
    """Also as their bounds alone, `flatten` and `unflatten`, as programs carried kvax's masks: the
    ids and positions of the call decide."""
    masks = jax.jit(functools.partial(create_attention_mask, *TOKENS, calc_bwd_mask=True))()
    assert isinstance(masks, tuple) and [type(mask) for mask in masks] == [AttentionMask] * 3
    query, key, value, dout = tensors()

    def once(query, masks):
        return flash_attention(query, key, value, *TOKENS, masks)[..., :DIM]

    def scanned(query, masks):
        def body(carry, _):
            query, masks = carry
            return (jax.checkpoint(once)(query, masks), masks), None

        return jax.lax.scan(body, (query, masks), None, length=2)[0][0]

    def of_bounds(query, masks):
        return scanned(query, tuple(AttentionMask.unflatten(mask.flatten()) for mask in masks))

    def both_passes(function, query):
        out, transpose = jax.vjp(lambda q: function(q, masks), query)
        return out, transpose(dout[..., :DIM])[0]

    run = jax.jit(both_passes, static_argnums=0)
    want = run(lambda q, masks: once(once(q, masks), masks), query)
    for function in (scanned, of_bounds):
        for x, y in zip(run(function, query), want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


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
