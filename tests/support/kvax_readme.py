"""The flow of "How to use" in kvax's README, call by call, with packax in the imports.

As in that README, a Flax transformer permutes its tokens, creates one mask and passes it to its
layers, under a mesh and `attention_specs`. test_kvax_readme.py runs it on CPUs, test_gpu_kvax.py on
a GPU.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dense import close
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.utils import (
    PADDING_SEGMENT_ID,
    attention_specs,
    permute_tokens_context_parallelism,
    unpermute_tokens_context_parallelism,
)

HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 16, 11


def config(**options):
    options = {"fwd_params": None, "bwd_params": None, "dtype": None, "head_dim": 8} | options
    return types.SimpleNamespace(skip_pad_tokens=True, assume_sequential_positions=False, **options)


def dense(query, key, value, query_positions, query_segment_ids, scale, **_):
    """Dense reference for the layer's flash_attention: queries and keys are one unpermuted
    sequence."""
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
        query = nn.DenseGeneral((HEADS, self.config.head_dim), dtype=self.config.dtype)(embedding)
        key = nn.DenseGeneral((KV_HEADS, self.config.head_dim), dtype=self.config.dtype)(embedding)
        value = nn.DenseGeneral((KV_HEADS, self.config.head_dim), dtype=self.config.dtype)(
            embedding
        )
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
            scale=self.config.head_dim**-0.5,
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


def packed(times=1):
    """tokens, positions, segment ids: one row built from Python lists and padded at its end, as in
    the README, and a second row."""
    ids = [0] * 20 + [1] * 30 + [PADDING_SEGMENT_ID] * 14, [4] * 5 + [2] * 50 + [7] * 9
    ids = np.repeat(ids, times, axis=1)
    starts = np.diff(ids, axis=1, prepend=-9) != 0
    index = np.arange(ids.shape[1])
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    tokens = np.random.default_rng(5).integers(0, TOKENS, ids.shape)
    return jnp.asarray(tokens), jnp.asarray(positions, jnp.int32), jnp.asarray(ids, jnp.int32)


@contextlib.contextmanager
def started(model, mesh_shape, kind="cpu", times=1):
    """Yields (jitted step, parameters, state) under the mesh and the specs. Rows have 64 * `times`
    tokens."""
    mesh_devices = np.reshape(jax.devices(kind)[: np.prod(mesh_shape)], mesh_shape)
    mesh = jax.sharding.Mesh(mesh_devices, ("data", "context"))
    tokens, positions, segment_ids = packed(times)
    table = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))
    optimizer = optax.sgd(0.1)
    plain = Transformer(model.config, attention=dense)  # same parameters, faster to initialize
    parameters = jax.jit(plain.init)(jax.random.key(0), table[tokens], positions, segment_ids)

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
            yield step, parameters, optimizer.init(parameters)


class Run(NamedTuple):
    losses: list[float]
    gradients: Any  # of the first step
    parameters: Any  # the initial ones; `trained`: after the last step
    trained: Any


def training(model, mesh_shape, steps, kind="cpu", times=1):
    with started(model, mesh_shape, kind, times) as (step, parameters, state):
        first, losses, gradients = parameters, [], []
        for _ in range(steps):
            parameters, state, value, gradient = step(parameters, state)
            losses.append(float(value))
            gradients.append(gradient)
        return Run(losses, *jax.tree.map(np.asarray, (gradients[0], first, parameters)))


def check_training(model, kind, times):
    """Train two steps: all values are finite, the loss falls, every parameter changes, and the
    first gradients are within twice the error of dense attention in the model's dtype, measured
    against dense attention in float32.
    """

    def in_float32(query, key, value, **kwargs):
        return dense(*(x.astype(jnp.float32) for x in (query, key, value)), **kwargs)

    def of(attention):
        other = Transformer(model.config, attention=attention)
        return training(other, (1, 1), 1, kind, times)

    # For the layers around attention and for the float32 reference.
    with jax.default_matmul_precision("highest"):
        run = training(model, (1, 1), 2, kind, times)
        true, plain = of(in_float32), of(dense)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((run.losses, run.trained)))
    assert run.losses[1] < run.losses[0] - 1e-3, run.losses
    np.testing.assert_allclose(run.losses[0], true.losses[0], rtol=1e-2)
    leaves, _ = jax.tree_util.tree_flatten_with_path(run.parameters)
    for (path, before), after in zip(leaves, jax.tree.leaves(run.trained), strict=True):
        assert (before != after).any(), f"{jax.tree_util.keystr(path)} did not move"
    names = [
        f"of{i}" + "".join(f"_{key.key}" for key in path) for i, (path, _) in enumerate(leaves)
    ]
    found = (
        dict(zip(names, map(np.asarray, jax.tree.leaves(x.gradients)), strict=True))
        for x in (run, true, plain)
    )
    assert not (wrong := close(*found)), wrong
