"""The flow that kvax's README shows under "How to use", call by call, with packax in the imports.

Flax modules as there: a transformer that permutes its tokens, makes one mask and hands it to its
layers, under a mesh and `attention_specs`. A training step on one device and on four (data and
context) must have the loss and the gradients of dense attention.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nn = pytest.importorskip("flax.linen")
optax = pytest.importorskip("optax")

from packax.kvax.ops import create_attention_mask, flash_attention  # noqa: E402
from packax.kvax.utils import (  # noqa: E402
    PADDING_SEGMENT_ID,
    FlashAttentionParamsConfig,
    attention_specs,
    permute_tokens_context_parallelism,
    unpermute_tokens_context_parallelism,
)

HEADS, KV_HEADS, DIM, WIDTH, TOKENS = 4, 2, 8, 16, 11


def dense(query, key, value, query_positions, query_segment_ids, scale, **_):
    """What flash_attention of the layer means: rows and keys are those of one sequence, in order."""
    ids, positions = query_segment_ids, query_positions
    allowed = (ids[:, :, None] == ids[:, None]) & (positions[:, :, None] >= positions[:, None])
    allowed = allowed & (ids != -1)[:, None]
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, 2) for x in (key, value))
    scores = jnp.einsum("bihd,bjhd->bhij", query, key) * scale
    weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -1e30), where=allowed[:, None])
    return jnp.einsum("bhij,bjhd->bihd", weights, value)


class AttentionLayer(nn.Module):
    config: Any
    attention: Any

    @nn.compact
    def __call__(
        self, embedding, query_positions, query_segment_ids, kv_positions, kv_segment_ids, attn_mask
    ):
        query = nn.DenseGeneral((HEADS, DIM), dtype=self.config.dtype)(embedding)
        key = nn.DenseGeneral((KV_HEADS, DIM), dtype=self.config.dtype)(embedding)
        value = nn.DenseGeneral((KV_HEADS, DIM), dtype=self.config.dtype)(embedding)
        out = self.attention(
            query=query,
            key=key,
            value=value,
            query_positions=query_positions,
            query_segment_ids=query_segment_ids,
            kv_positions=kv_positions,
            kv_segment_ids=kv_segment_ids,
            mask=attn_mask,
            assume_sequential_positions=self.config.assume_sequential_positions,
            scale=DIM**-0.5,
        )
        return embedding + nn.DenseGeneral(WIDTH, axis=(-2, -1))(out)


class Transformer(nn.Module):
    config: Any
    permute: bool = False
    attention: Any = flash_attention
    num_layers: int = 1

    def setup(self):
        self.attn_layers = [
            AttentionLayer(self.config, self.attention) for _ in range(self.num_layers)
        ]
        self.mlp_layers = [nn.Dense(WIDTH) for _ in range(self.num_layers)]
        self.logits = nn.Dense(TOKENS)

    def __call__(self, embedding, positions, segment_ids):
        kv_positions, kv_segment_ids = positions, segment_ids
        query_positions, query_segment_ids = positions, segment_ids
        if self.permute:
            embedding, query_positions, query_segment_ids = permute_tokens_context_parallelism(
                (embedding, positions, segment_ids),
            )
        attention_mask = None
        if self.attention is flash_attention:
            attention_mask = create_attention_mask(
                query_positions,
                query_segment_ids,
                kv_positions,
                kv_segment_ids,
                fwd_params=self.config.fwd_params,
                bwd_params=self.config.bwd_params,
                skip_pad_tokens=self.config.skip_pad_tokens,
                calc_bwd_mask=True,
            )
        for attn_layer, mlp_layer in zip(self.attn_layers, self.mlp_layers, strict=True):
            embedding = attn_layer(
                embedding,
                query_positions,
                query_segment_ids,
                kv_positions,
                kv_segment_ids,
                attention_mask,
            )
            embedding = embedding + nn.gelu(mlp_layer(embedding))
        if self.permute:
            embedding = unpermute_tokens_context_parallelism(embedding)
        return self.logits(embedding)


def packed(length=64):
    """tokens, positions, segment ids: Python lists of one row padded at its end, as there, and another."""
    ids = [0] * 20 + [1] * 30 + [PADDING_SEGMENT_ID] * 14, [4] * 5 + [2] * 50 + [7] * 9
    starts = np.diff(ids, axis=1, prepend=-9) != 0
    index = np.arange(length)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    tokens = np.random.default_rng(5).integers(0, TOKENS, (2, length))
    return jnp.asarray(tokens), jnp.asarray(positions, jnp.int32), jnp.asarray(ids, jnp.int32)


def training(model, mesh_shape, steps, kind="cpu"):
    """Losses of `steps` steps, and the first gradients."""
    mesh_devices = np.reshape(jax.devices(kind)[: np.prod(mesh_shape)], mesh_shape)
    mesh = jax.sharding.Mesh(mesh_devices, ("data", "context"))
    tokens, positions, segment_ids = packed()
    table = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))
    optimizer = optax.sgd(0.1)
    plain = Transformer(model.config, attention=dense)  # the same parameters, sooner made
    parameters = plain.init(jax.random.key(0), table[tokens], positions, segment_ids)

    def loss(parameters):
        logits = model.apply(parameters, table[tokens], positions, segment_ids)
        following = (segment_ids == jnp.roll(segment_ids, -1, 1)) & (segment_ids >= 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1))
        return jnp.sum(losses * following.at[:, -1].set(False)) / tokens.size

    @jax.jit
    def step(parameters, state):
        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value, gradients

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:`
        with (
            mesh,
            attention_specs(
                query_specs=("data", "context", None, None),
                kv_specs=("data", None, None, None),
            ),
        ):
            state, losses, first = optimizer.init(parameters), [], None
            for _ in range(steps):
                parameters, state, value, gradients = step(parameters, state)
                losses.append(float(value))
                first = gradients if first is None else first
    return losses, jax.tree.map(np.asarray, first)


def config(**options):
    options = {"fwd_params": None, "bwd_params": None, "dtype": None} | options
    return types.SimpleNamespace(skip_pad_tokens=True, assume_sequential_positions=False, **options)


@pytest.fixture(scope="module")
def expected():
    return training(Transformer(config(), attention=dense), (1, 1), 1)


@pytest.mark.parametrize("mesh_shape", [(1, 1), (2, 2)])
def test_a_step_of_training_is_that_of_dense_attention(mesh_shape, expected):
    given = {}
    if mesh_shape == (2, 2):
        blocks = FlashAttentionParamsConfig(query_block_size=16, kv_block_size=16)
        given = {"fwd_params": blocks, "bwd_params": blocks}
    losses, gradients = training(
        Transformer(config(**given), permute=mesh_shape != (1, 1)), mesh_shape, 2
    )
    np.testing.assert_allclose(losses[0], expected[0][0], rtol=1e-5)
    assert losses[1] < losses[0] - 1e-3
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), gradients, expected[1]
    )
