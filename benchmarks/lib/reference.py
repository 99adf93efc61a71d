"""The float32 reference with which every output is compared before it is timed.

Output and dQ are computed for a few sampled rows of all heads; dK and dV for one key/value head and
its query heads, block by block over a whole row, or over one document of a very long row. Masks and
options are defined by the case's function `scores`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lib.implementations import Arrays, keys_of

ROWS = 32
BLOCK = 256
WHOLE_ROW = 131072  # of longer rows, dK and dV are compared in one document
LIMIT = 1e-2  # ‖x - reference‖ / ‖reference‖ in bfloat16
LIMITS = {"dtable": 3e-2, "mean": 5e-2}  # an entry of a table sums millions of rounded terms
HIGHEST = jax.lax.Precision.HIGHEST
# Timing candidates for products would take longer than a single run of them.
once = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *(x.astype(jnp.float32) for x in operands), precision=HIGHEST)


def dense_rows(case: Any, tables: Any, q: Any, k: Any, v: Any, i: Any, j: Any, h: Any) -> jax.Array:
    """The output of rows `i` and keys `j` for the query heads `h` of one key/value head, (rows, G,
    D). q: (rows, G, D); k, v: (keys, D); h: (G,)."""
    s = einsum("rgd,kd->rgk", q, k) * q.shape[-1] ** -0.5
    s = case.scores(s, h[:, None], i[:, None, None], j, tables)
    p = jax.nn.softmax(jnp.concatenate([s, case.sink(h, s)], -1), -1)[..., : k.shape[0]]
    return einsum("rgk,kd->rgd", p, v)


class Reference:
    """The reference of one case and its inputs: some rows of out and dQ, and one head and window of
    keys of dK and dV.

    `case.scores(scores, head, row, key, tables)` defines the mask and the options.
    """

    def __init__(self, case: Any, inputs: Arrays, tables: Mapping[str, Any] | None = None) -> None:
        rng = np.random.default_rng(1)
        self.rows = np.sort(rng.choice(case.seq, min(ROWS, case.seq), replace=False))
        self.head = int(rng.integers(case.kv_heads))
        keys = keys_of(case)
        self.window = slice(0, keys)  # of keys; a whole row has all queries
        queries = slice(0, case.seq)
        if case.seq > WHOLE_ROW:
            edges = np.concatenate([[0], np.cumsum(case.lengths)])
            document = int(np.argsort(case.lengths)[case.documents // 2])
            queries = self.window = slice(int(edges[document]), int(edges[document + 1]))
        group = case.heads // case.kv_heads
        heads = jnp.arange(case.heads).reshape(-1, group)
        query, key, value, cotangent = (x[0] for x in inputs)
        looked_up = {name: jnp.asarray(x) for name, x in (tables or case.tables()).items()}

        def grouped(x: jax.Array) -> jax.Array:
            return x.reshape(len(x), case.kv_heads, group, -1).astype(jnp.float32)

        @once
        def some_rows(tables, q, do, k, v, rows):
            def of_head(operands):
                q, do, k, v, h = operands
                every = rows, jnp.arange(keys), h
                out, back = jax.vjp(lambda q: dense_rows(case, tables, q, k, v, *every), q)
                return out, back(do)[0]

            by_head = (jnp.moveaxis(x, 1, 0) for x in (grouped(q), grouped(do), k, v))
            found = jax.lax.map(of_head, (*by_head, heads))
            return [jnp.moveaxis(x, 0, 1).reshape(len(rows), case.heads, -1) for x in found]

        @once
        def one_head(tables, q, do, k, v, at, j, h):
            """dK and dV, (keys, D) each; `at`, `j`: the indices of the rows and keys."""
            blocks = [
                jnp.pad(x, [(0, -len(x) % BLOCK)] + [(0, 0)] * (x.ndim - 1))
                for x in (q, do)  # rows with cotangent 0 contribute nothing
            ]
            rows = jnp.pad(at, (0, -len(at) % BLOCK), constant_values=at[0])

            def step(sums, block):
                q, do, i = block
                _, back = jax.vjp(lambda k, v: dense_rows(case, tables, q, k, v, i, j, h), k, v)
                return jax.tree.map(jnp.add, sums, back(do)), None

            apart = tuple(x.reshape(-1, BLOCK, *x.shape[1:]) for x in (*blocks, rows))
            return jax.lax.scan(step, (jnp.zeros_like(k), jnp.zeros_like(v)), apart)[0]

        rows = jnp.asarray(self.rows)
        out, dq = some_rows(looked_up, query[rows], cotangent[rows], key, value, rows)
        of_group = slice(self.head * group, (self.head + 1) * group)
        own = [x[queries, of_group] for x in (query, cotangent)]
        own += [x[self.window, self.head] for x in (key, value)]
        own = [x.astype(jnp.float32) for x in own]
        at, j = (jnp.arange(x.start, x.stop) for x in (queries, self.window))
        dk, dv = one_head(looked_up, *own, at, j, heads[self.head])
        self.values = {"out": out, "dq": dq, "dk": dk, "dv": dv}

    def slices(self) -> dict[str, list[int]]:
        """The compared slices, in JSON types for another process."""
        window = [self.window.start, self.window.stop]
        return {"rows": [int(row) for row in self.rows], "window": window, "head": [self.head]}

    def errors(self, out: jax.Array | None, gradients: Arrays | None) -> dict[str, float]:
        """The relative errors of the output and the gradients; either may be None."""
        found: dict[str, jax.Array] = {}
        if out is not None:
            found["out"] = out[0, self.rows]
        if gradients is not None:
            dq, dk, dv = gradients
            found["dq"] = dq[0, self.rows]
            found["dk"] = dk[0, self.window, self.head]
            found["dv"] = dv[0, self.window, self.head]
        return self.slice_errors(found)

    def slice_errors(self, found: Mapping[str, jax.Array]) -> dict[str, float]:
        """The relative errors of the compared slices."""
        return {name: relative(x, self.values[name]) for name, x in found.items()}


def wrong(errors: dict[str, float], limit: float | None = None) -> list[str]:
    """The names with an error above the limit, or NaN."""
    limits = LIMITS if limit is None else dict.fromkeys(errors, limit)
    return [name for name, error in errors.items() if not error <= limits.get(name, LIMIT)]


# A row with one key has dQ = dK = 0, whose rounding error is not relative to it. So errors are
# relative to at least this element size: elements of inputs are about 1, and those of the gradients
# of the longest documents about 0.003.
NOTHING = 1e-3


@jax.jit  # fuses the float32 differences, which would take 8 GiB for 512k tokens
def _relative(x: jax.Array, reference: jax.Array, nothing: float) -> jax.Array:
    x, reference = (y.astype(jnp.float32).ravel() for y in (x, reference))
    size = jnp.maximum(jnp.linalg.norm(reference), nothing * reference.size**0.5)
    return jnp.linalg.norm(x - reference) / size


def relative(x: jax.Array, reference: jax.Array, nothing: float = NOTHING) -> float:
    """‖x - reference‖ / ‖reference‖, where the divisor is at least `nothing` per element (RMS)."""
    return float(_relative(x, reference, nothing))
