"""Checks the trained model on a real row: attention matches dense, documents are separate."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import packax
from packax import check, segments
from packax.demo import model
from packax.demo.data import VOCABULARY, Rows
from packax.demo.settings import Settings

SLICE = 1024  # number of tokens compared with the dense reference, which is quadratic


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


class Row(NamedTuple):
    """A packed row, (1, length) each."""

    tokens: jax.Array
    segment_ids: jax.Array
    positions: jax.Array


def run_all(parameters: model.Parameters, rows: Rows, settings: Settings) -> list[Check]:
    most = row_with_most_documents(rows)
    arrays = (rows.tokens, rows.segment_ids, rows.positions)
    row = Row(*(jnp.asarray(x[most : most + 1]) for x in arrays))
    return [
        *against_dense(parameters, row, settings),
        gradient_stays_inside(parameters, row, settings.model),
        other_documents_change_nothing(parameters, row, settings),
    ]


def row_with_most_documents(rows: Rows) -> int:
    return int(np.argmax(rows.segment_ids.max(axis=1)))


def longest_document(segment_ids: jax.Array) -> int:
    """The longest document except the first: a causal mask alone would let it see others."""
    ids = np.asarray(segment_ids).ravel()
    return int(np.argmax(np.bincount(ids[ids > 0], minlength=1)))


def causal_documents(segment_ids: jax.Array) -> packax.AttentionMask:
    return packax.create_attention_mask(packax.causal() & packax.documents(segment_ids))


def against_dense(parameters: model.Parameters, row: Row, settings: Settings) -> list[Check]:
    """Compares packax and plain attention with float32, on a slice in the first layer."""
    tokens, segment_ids, positions = (x[:, :SLICE] for x in row)
    config = settings.model

    @jax.jit
    def first_layer(parameters: model.Parameters) -> tuple[jax.Array, jax.Array, jax.Array]:
        layer = jax.tree.map(lambda w: w[0].astype(config.dtype), parameters["layers"])
        x = parameters["embedding"][tokens].astype(config.dtype)
        x = model.normalize(x, layer["attention_norm"])
        return model.heads(layer, x, model.rope_angles(positions, config), config)

    query, key, value = first_layer(parameters)
    cotangent = jax.random.normal(jax.random.key(settings.seed), query.shape, query.dtype)
    operands = [query, key, value, cotangent]
    mask = jax.jit(causal_documents)(segment_ids)
    length = segment_ids.shape[1]
    expression = packax.causal() & packax.documents(segment_ids)
    attends = jnp.asarray(expression.as_array(length, length))[:, None, None]
    dense = check.dense(attends, None)
    exact = check.results(dense, operands, jnp.float32)
    plain = check.results(dense, operands, query.dtype)
    ours = check.results(
        lambda q, k, v: packax.flash_attention(q, k, v, mask), operands, query.dtype
    )
    names = ("output", "query gradient", "key gradient", "value gradient")
    checks = []
    for name, reference, same_dtype, result in zip(names, exact, plain, ours, strict=True):
        error, plain_error = check.error(result, reference), check.error(same_dtype, reference)
        if query.dtype == jnp.float32:  # plain attention is the reference itself
            limit, bound = 1e-5, "limit 1e-05"
        else:
            limit, bound = 2 * plain_error, f"dense {query.dtype.name} {plain_error:.1e}"
        detail = f"error {error:.1e}, {bound}"
        checks.append(Check(f"{name} equals the dense reference", error <= limit, detail))
    return checks


def gradient_stays_inside(parameters: model.Parameters, row: Row, config: model.Config) -> Check:
    """The loss of one document has gradient exactly 0 for the embeddings of all others."""
    document = longest_document(row.segment_ids)
    inside = np.asarray(row.segment_ids)[0] == document
    following, weight = segments.next_tokens(np.asarray(row.tokens), np.asarray(row.segment_ids))

    @jax.jit
    def gradient(parameters: model.Parameters, row: Row) -> jax.Array:
        mask = causal_documents(row.segment_ids)

        def document_loss(embedded: jax.Array) -> jax.Array:
            scores = model.transform(parameters, embedded, row.positions, mask, config)
            losses = model.token_losses(scores, jnp.asarray(following))
            return jnp.sum(jnp.where((row.segment_ids == document) & (weight > 0), losses, 0))

        return jax.grad(document_loss)(parameters["embedding"][row.tokens])

    size = np.abs(np.asarray(gradient(parameters, row), np.float32))
    size = size[0].max(axis=-1)
    # The last token predicts nothing and may have no gradient; every other token must have one.
    silent = int(np.sum(size[inside][:-1] == 0))
    leaked = int(np.sum(size[~inside] != 0))
    detail = (
        f"loss of document {document}: {silent} of its {inside.sum()} tokens have no gradient, "
        f"{leaked} of the {(~inside).sum()} other tokens have one"
    )
    passed = leaked == 0 and silent == 0 and bool(np.isfinite(size).all())
    return Check("no gradient crosses a document boundary", passed, detail)


def other_documents_change_nothing(
    parameters: model.Parameters, row: Row, settings: Settings
) -> Check:
    """A document's logits are bit-identical if all other tokens change."""
    inside = row.segment_ids == longest_document(row.segment_ids)
    noise = jax.random.randint(jax.random.key(settings.seed), inside.shape, 1, VOCABULARY)

    @jax.jit
    def function(tokens: jax.Array) -> jax.Array:
        mask = causal_documents(row.segment_ids)
        return model.logits(parameters, tokens, row.positions, mask, settings.model)

    before = np.asarray(function(row.tokens))
    after = np.asarray(function(jnp.where(inside, row.tokens, noise)))
    changed = np.any(before != after, axis=-1)
    here = np.asarray(inside)
    detail = (
        f"{changed[here].sum()} of {here.sum()} rows of logits inside differ, "
        f"{changed[~here].sum()} of {(~here).sum()} outside"
    )
    passed = not changed[here].any() and (here.all() or changed[~here].any())
    return Check("other documents change nothing, bit for bit", bool(passed), detail)
