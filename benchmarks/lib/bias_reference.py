"""The float32 reference of attention with a bias and dropout.

It covers output and dQ of some rows in all heads, dK and dV of one key/value head, and the gradient
of the bias or of its table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from packax._src.ops.dropout import philox

from lib.bias_cases import DROPOUT_KEY, BiasCase
from lib.reference import einsum, relative

ROWS, BLOCK = 32, 256


def kept(case: BiasCase, rows: jax.Array, heads: jax.Array) -> jax.Array:
    """bool, (B, heads, rows, S): the elements that packax's dropout keeps."""
    words = jax.random.bits(DROPOUT_KEY, (2,), jnp.uint32)
    index = jnp.meshgrid(
        jnp.arange(case.batch), heads, rows, jnp.arange(case.seq // 4), indexing="ij"
    )
    batch, head, row, four = (x.astype(jnp.uint32) for x in index)
    made = philox((four, row, head, batch), (words[0], words[1]))
    threshold = np.uint32(round(case.dropout * 2**32))
    return jnp.stack([x >= threshold for x in made], -1).reshape(*batch.shape[:3], case.seq)


def dense(case: BiasCase, q: Any, k: Any, v: Any, bias: Any, rows: Any, heads: Any) -> jax.Array:
    """The output of some rows, (B, rows, H, D). q: (B, rows, H, D); k, v: (B, S, H, D); bias:
    (1, H, rows, S) or None; heads: the indices of the heads."""
    s = einsum("bihd,bjhd->bhij", q, k) * case.head_dim**-0.5
    if bias is not None:
        s += bias.astype(jnp.float32)
    if case.causal:
        s = jnp.where(jnp.arange(case.seq) <= rows[:, None], s, -jnp.inf)
    p = jax.nn.softmax(s)
    if case.dropout:
        p = jnp.where(kept(case, rows, heads), p / (1 - case.dropout), 0)
    return einsum("bhij,bjhd->bihd", p, v)


class Reference:
    """The reference for one case and its inputs; `values` has the results by name."""

    def __init__(self, case: BiasCase, inputs: tuple[jax.Array, ...], operand: Any) -> None:
        rng = np.random.default_rng(1)
        self.case = case
        self.rows = np.sort(rng.choice(case.seq, min(ROWS, case.seq), replace=False))
        self.head = int(rng.integers(case.kv_heads))
        group = case.heads // case.kv_heads
        one_row = dataclasses.replace(case, batch=1)
        own = jnp.arange(self.head * group, (self.head + 1) * group)

        def wide(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, case.heads // x.shape[2], 2)

        @jax.jit
        def some_rows(q, k, v, dout, operand, rows):
            def of(q, bias):
                return dense(case, q, wide(k), wide(v), bias, rows, jnp.arange(case.heads))

            out, back = jax.vjp(of, q[:, rows], case.bias_rows(operand, rows))
            return out, *back(dout[:, rows].astype(jnp.float32))

        @jax.jit
        def one_head(q, k, v, dout, operand):
            """dK and dV of one key/value head of the first batch row."""

            def step(sums, rows):
                bias = case.bias_rows(operand, rows)
                bias = None if bias is None else bias[:, own]

                def of(k, v):
                    k, v = (jnp.repeat(x[:, :, None], group, 2) for x in (k, v))
                    return dense(one_row, q[:1, rows][:, :, own], k, v, bias, rows, own)

                _, back = jax.vjp(of, *(x[:1, :, self.head].astype(jnp.float32) for x in (k, v)))
                parts = back(dout[:1, rows][:, :, own].astype(jnp.float32))
                return jax.tree.map(jnp.add, sums, parts), None

            zero = jnp.zeros((1, case.seq, case.head_dim))
            blocks = jnp.arange(case.seq).reshape(-1, min(BLOCK, case.seq))
            return jax.lax.scan(step, (zero, zero), blocks)[0]

        @jax.jit
        def of_table(q, k, v, dout, table):
            def step(total, rows):
                def of(table):
                    bias = case.bias_rows(table, rows)
                    of_rows = (bias, rows, jnp.arange(case.heads))
                    return dense(case, q[:, rows], wide(k), wide(v), *of_rows)

                _, back = jax.vjp(of, table.astype(jnp.float32))
                return total + back(dout[:, rows].astype(jnp.float32))[0], None

            blocks = jnp.arange(case.seq).reshape(-1, min(64, case.seq))
            return jax.lax.scan(step, jnp.zeros(table.shape), blocks)[0]

        query, key, value, dout = inputs
        out, dq, dbias = some_rows(query, key, value, dout, operand, jnp.asarray(self.rows))
        if case.dropout:
            whole = dataclasses.replace(case, dropout=0.0)
            rows, heads = jnp.asarray(self.rows), jnp.arange(case.heads)
            bias = case.bias_rows(operand, rows)
            more = (bias, rows, heads)
            self.without_dropout = jax.jit(
                lambda q, k, v: dense(whole, q[:, rows], wide(k), wide(v), *more)
            )(query, key, value)
        dk, dv = one_head(query, key, value, dout, operand)
        self.values = {"out": out, "dq": dq, "dk": dk[0], "dv": dv[0]}
        if case.bias == "array":
            self.values["dbias"] = dbias
        if case.bias == "table":
            self.values["dtable"] = of_table(query, key, value, dout, operand)

    def errors(self, out: Any, gradients: Any, *, other_bits: bool = False) -> dict[str, float]:
        """Relative errors. other_bits: dropout drops other elements, so only the projection of the
        output on the output without dropout is compared with 1."""
        found = {} if out is None else {"out": out[:, self.rows]}
        if other_bits:
            if out is None:
                return {}
            x, whole = (y.astype(jnp.float32).ravel() for y in (found["out"], self.without_dropout))
            return {"mean": abs(float(x @ whole / (whole @ whole)) - 1)}
        if gradients is not None:
            dq, dk, dv, *rest = gradients
            found |= {"dq": dq[:, self.rows], "dk": dk[0, :, self.head], "dv": dv[0, :, self.head]}
            if self.case.bias == "array":
                found["dbias"] = rest[0][:, :, self.rows]
            if self.case.bias == "table":
                found["dtable"] = rest[0]
        return {name: relative(x, self.values[name]) for name, x in found.items()}
