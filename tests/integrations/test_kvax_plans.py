"""packax.kvax with packax's plans equals one device, and a local plan fetches only its share.

kvax has one order of tokens; callers pass `plan=` to keep short documents on one rank.
"""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from cases import positions_of
from context import assert_same, mesh_of
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.utils import (
    attention_specs,
    permute_tokens_context_parallelism,
    unpermute_tokens_context_parallelism,
)
from tiers import some

BATCH, LENGTH, HEADS, KV_HEADS, DIM, RANKS = 2, 2048, 4, 2, 8, 4
SPECS = (("data", "context", "tensor", None), ("data", None, "tensor", None))
ALONE = ((None,) * 4,) * 2


def documents():
    """Row 0: many short documents and padding; row 1: one for all ranks, and one for each rank."""
    rng = np.random.default_rng(6)
    lengths = [rng.integers(70, 120, 20), [1024, 256, 256, 256, 256]]
    ids = np.full((BATCH, LENGTH), -1, np.int32)
    for row, sizes in zip(ids, lengths, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    return ids


IDS = documents()
# They restart in every document, and decrease inside one document of row 1.
POSITIONS = np.stack([positions_of(row) for row in IDS])
POSITIONS[1, 1400:1420] = POSITIONS[1, 1400:1420][::-1]
TOKENS = (POSITIONS, IDS, POSITIONS, IDS)


def plan_of(kind, **more):
    expression = packax.causal() & packax.documents(IDS, positions=POSITIONS)
    return packax.context_plan(expression, ranks=RANKS, kind=kind, **more)


def tensors():
    rng = np.random.default_rng(3)
    shapes = [(BATCH, LENGTH, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def forward(query, key, value, *, plan=None, permute=True, pad=True, sequential=False):
    """The output, in sequence order."""
    arrays = (query, key, value, *TOKENS[:2])
    if permute:
        arrays = permute_tokens_context_parallelism(arrays, plan=plan)
    query, key, value, positions, ids = arrays
    tokens = (positions, ids, *TOKENS[2:])
    mask = create_attention_mask(*tokens, calc_bwd_mask=True, skip_pad_tokens=pad, plan=plan)
    out = flash_attention(
        query, key, value, *tokens, mask, scale=0.3, assume_sequential_positions=sequential
    )
    return unpermute_tokens_context_parallelism(out, plan=plan) if permute else out


def results(query, key, value, dout, **settings):
    out, transpose = jax.vjp(functools.partial(forward, **settings), query, key, value)
    return out, np.ones(1), *transpose(dout)


@functools.cache
def one_device(**settings):
    with attention_specs(*ALONE):
        return jax.jit(functools.partial(results, permute=False, **settings))(*tensors())


@pytest.mark.parametrize(
    "plan,settings",
    some(
        itertools.product(
            [("local", {"shared": 0.5}), ("local", {}), ("balanced", {})],
            [{}, {"pad": False}, {"sequential": True}],
        ),
        1,
    ),
    ids=str,
)
def test_equals_one_device(plan, settings):
    kind, more = plan
    plan = plan_of(kind, **more)
    with jax.set_mesh(mesh_of(1, 1, RANKS, 2)), attention_specs(*SPECS):
        got = jax.jit(functools.partial(results, plan=plan, **settings))(*tensors())
        got = jax.block_until_ready(got)
    assert_same(got, one_device(**settings))


def gathered_rows(plan):
    """Rows of keys in each gather of the compiled forward pass."""
    with jax.set_mesh(mesh_of(1, 1, RANKS, 1)), attention_specs(*SPECS):
        step = jax.jit(functools.partial(forward, plan=plan))
        text = step.lower(*tensors()[:3]).compile().as_text()
    shapes = re.findall(r"= \(?f32\[([\d,]+)\][^=]*? all-gather\(", text)
    return [max(int(n) for n in shape.split(",")) for shape in shapes]


@pytest.mark.exhaustive
def test_a_local_plan_fetches_no_more_than_its_share():
    local, balanced = plan_of("local", shared=0.5), plan_of("balanced")
    assert 0 < local.shared < LENGTH // RANKS
    assert max(gathered_rows(balanced)) == LENGTH
    assert max(gathered_rows(local)) == RANKS * local.shared


def rejected(error, *texts):
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, texts)))


def test_errors():
    plan = plan_of("local")
    permuted = plan.permute(POSITIONS), plan.permute(IDS)
    with jax.set_mesh(mesh_of(1, 1, RANKS, 1)), attention_specs(*SPECS):
        with rejected(ValueError, "plan must come from packax.context_plan, but is a str"):
            permute_tokens_context_parallelism(IDS, plan="local")
        with rejected(ValueError, "must have 2048 tokens, the plan's length", "(2, 1024)"):
            permute_tokens_context_parallelism(IDS[:, :1024], plan=plan)
        with rejected(ValueError, "plan must come from context_plan, but is a str"):
            create_attention_mask(*TOKENS, plan="local")
        with rejected(ValueError, "plan was made for 2048 queries, but there are 1024"):
            create_attention_mask(*(x[:, :1024] for x in TOKENS), plan=plan)
        with rejected(ValueError, "query_segment_ids must be kv_segment_ids permuted by plan"):
            create_attention_mask(permuted[0], *TOKENS[1:], plan=plan)
        with rejected(ValueError, "query_positions must be kv_positions permuted by plan"):
            create_attention_mask(*TOKENS, plan=plan)
        longer = (np.zeros((BATCH, LENGTH + 4), np.int32),) * 2
        with rejected(
            ValueError, "plan permutes queries and keys in the same way", "(2, 2048)", "(2, 2052)"
        ):
            create_attention_mask(*permuted, *longer, plan=plan)

        def in_another_order(query, key, value):
            mask = create_attention_mask(*permuted, *TOKENS[2:], plan=plan)
            return flash_attention(
                query, key, value, *permuted, *TOKENS[2:], mask,
                permute_tokens_for_load_balance=False,
            )  # fmt: skip

        with rejected(ValueError, "permute_tokens_for_load_balance must be True"):
            jax.eval_shape(in_another_order, *tensors()[:3])
    with jax.set_mesh(mesh_of(1, 1, 2, 1)), attention_specs(*SPECS):
        with rejected(ValueError, "made for 4 ranks, but the context axis has size 2"):
            permute_tokens_context_parallelism(IDS, plan=plan)
        with rejected(ValueError, "made for 4 ranks, but the context axes of sharding have size 2"):
            create_attention_mask(*TOKENS, plan=plan)


def test_an_explicit_mesh_is_refused():
    plan = plan_of("local")
    axes = ("data", "fsdp", "context", "tensor")
    explicit = (jax.sharding.AxisType.Explicit,) * 4
    mesh = jax.make_mesh((1, 1, RANKS, 1), axes, axis_types=explicit)
    tokens = plan.permute(POSITIONS), plan.permute(IDS), *TOKENS[2:]
    refused = rejected(NotImplementedError, "axes of type Explicit")
    with jax.set_mesh(mesh), attention_specs(*SPECS), refused:
        create_attention_mask(*tokens, plan=plan)
