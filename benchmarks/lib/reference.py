"""The benchmark's float32 reference, against which every output is checked before it is timed.

Output and dQ are recomputed for a few sampled rows, all heads; dK and dV for one key/value head and
its query heads, block by block over a whole row (of very long rows: over one document). It knows
masks only as "same id, not later, and in the window".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lib.cases import Case
from lib.implementations import Arrays

ROWS = 32
BLOCK = 512
WHOLE_ROW = 131072  # longer rows are checked over one document
LIMIT = 1e-2  # ‖x - reference‖ / ‖reference‖ in bfloat16
LIMITS = {"dtable": 3e-2, "mean": 5e-2}  # an entry of a table sums millions of rounded terms
HIGHEST = jax.lax.Precision.HIGHEST


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *(x.astype(jnp.float32) for x in operands), precision=HIGHEST)


def in_reach(rows, keys, window):
    """Whether a row attends a key of its document; window: the most keys of a row, 0 for all."""
    distance = rows - keys
    return (distance >= 0) & ((distance < window) | (window == 0))


@functools.partial(jax.jit, static_argnames="window")
def sampled_rows(query, key, value, cotangent, segment_ids, rows, *, window):
    """(output, dQ) of `rows` of the first batch row, float32, (rows, heads, D)."""
    kv_heads, dim = key.shape[2:]
    scale = dim**-0.5
    q = query[0, rows].reshape(len(rows), kv_heads, -1, dim)
    do = cotangent[0, rows].reshape(len(rows), kv_heads, -1, value.shape[3])
    k, v = key[0], value[0]
    attends = segment_ids[0, rows][:, None] == segment_ids[0][None]
    attends &= in_reach(rows[:, None], jnp.arange(k.shape[0]), window)
    scores = jnp.where(attends[:, None, None], einsum("rhgd,khd->rhgk", q, k) * scale, -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1)
    out = einsum("rhgk,khd->rhgd", p, v)
    dp = einsum("rhgd,khd->rhgk", do, v)
    ds = p * (dp - jnp.sum(p * dp, axis=-1, keepdims=True)) * scale
    dq = einsum("rhgk,khd->rhgd", ds, k)
    heads = query.shape[2]
    return out.reshape(len(rows), heads, -1), dq.reshape(len(rows), heads, -1)


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def head_gradients(query, key, value, cotangent, segment_ids, *, scale, window):
    """dK, dV of one key/value head, (S, D). query, cotangent: (S, G, D); the rest (S, D)."""
    length = key.shape[0]
    pad = -length % BLOCK
    blocks = jax.tree.map(
        lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, BLOCK, *x.shape[1:]),
        (query, cotangent, segment_ids, jnp.arange(length)),
    )
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)

    def step(carry: Any, block: Any) -> tuple[Any, None]:
        q, do, ids, rows = block
        attends = ids[:, None] == segment_ids[None]
        attends &= in_reach(rows[:, None], jnp.arange(length), window)
        scores = jnp.where(attends[:, None], einsum("rgd,kd->rgk", q, key) * scale, -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1)
        dp = einsum("rgd,kd->rgk", do, value)
        ds = p * (dp - jnp.sum(p * dp, axis=-1, keepdims=True)) * scale
        return (
            carry[0] + einsum("rgk,rgd->kd", ds, q),
            carry[1] + einsum("rgk,rgd->kd", p, do),
        ), None

    # Padded rows repeat row 0 with cotangent 0, so they add nothing.
    blocks = (
        *blocks[:2],
        jnp.where(jnp.arange(length + pad).reshape(-1, BLOCK) < length, blocks[2], segment_ids[0]),
        blocks[3],
    )
    return jax.lax.scan(step, (jnp.zeros_like(key), jnp.zeros_like(value)), blocks)[0]


class Sampled:
    """What of the results is compared: rows of out and dQ, and a window and head of dK and dV."""

    values: dict[str, jax.Array]  # of the reference

    def __init__(self, case: Any) -> None:
        rng = np.random.default_rng(1)
        self.rows = np.sort(rng.choice(case.seq, min(ROWS, case.seq), replace=False))
        self.head = int(rng.integers(case.kv_heads))
        self.window = slice(0, case.seq)

    def slices(self) -> dict[str, list[int]]:
        """As another process takes it."""
        window = [self.window.start, self.window.stop]
        return {"rows": [int(row) for row in self.rows], "window": window, "head": [self.head]}

    def errors(self, out: jax.Array | None, gradients: Arrays | None) -> dict[str, float]:
        """Relative errors of what was computed (either part may be missing)."""
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
        """Relative errors of slices."""
        return {name: relative(x, self.values[name]) for name, x in found.items()}


class Reference(Sampled):
    """The reference of one case and one set of inputs."""

    def __init__(self, case: Case, inputs: Arrays) -> None:
        super().__init__(case)
        query, key, value, cotangent = inputs
        segment_ids = jnp.asarray(case.segment_ids())
        rows = jnp.asarray(self.rows)
        out, dq = sampled_rows(query, key, value, cotangent, segment_ids, rows, window=case.window)
        if case.seq > WHOLE_ROW:
            edges = np.concatenate([[0], np.cumsum(case.lengths)])
            document = int(np.argsort(case.lengths)[case.documents // 2])
            self.window = slice(int(edges[document]), int(edges[document + 1]))
        group = case.heads // case.kv_heads
        heads = slice(self.head * group, (self.head + 1) * group)
        dk, dv = head_gradients(
            query[0, self.window, heads],
            key[0, self.window, self.head],
            value[0, self.window, self.head],
            cotangent[0, self.window, heads],
            segment_ids[0, self.window],
            scale=case.head_dim**-0.5,
            window=case.window,
        )
        self.values = {"out": out, "dq": dq, "dk": dk, "dv": dv}


def wrong(errors: dict[str, float]) -> list[str]:
    """The names whose error is over the limit, or not a number."""
    return [name for name, error in errors.items() if not error <= LIMITS.get(name, LIMIT)]


# A row of one key has dQ = dK = 0, and rounding of that is not an error: elements of inputs are
# about 1, and the gradients of the longest documents here about 0.003.
NOTHING = 1e-3


def relative(x: jax.Array, reference: jax.Array) -> float:
    """‖x - reference‖ / ‖reference‖, of float32."""
    size = jnp.maximum(jnp.linalg.norm(reference.ravel()), NOTHING * reference.size**0.5)
    return float(jnp.linalg.norm((x.astype(jnp.float32) - reference).ravel()) / size)
