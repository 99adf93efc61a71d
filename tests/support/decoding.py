"""A reference for decode_attention from its definition: float64 is the truth, the operands' own
dtype gives the allowed error.

It shares no code with the package: rows, keys and pages are enumerated in Python.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from stand_in import StandIn

GARBAGE = 1e30  # fills memory that must not be read


class Results(NamedTuple):
    out: Any  # (B, Sq, H, Dv)
    lse: Any  # (B, H, Sq)


class Case(NamedTuple):
    """Sizes and options of one call."""

    lengths: tuple[int, ...]
    q_len: int = 1
    capacity: int = 300
    heads: int = 4
    kv_heads: int = 2
    dims: tuple[int, int] = (16, 24)
    page_size: int = 0
    starts: Any = None
    window: tuple[int | None, int | None] | None = None
    causal: bool = True
    soft_cap: float | None = None
    sinks: bool = False

    def options(self) -> dict[str, Any]:
        """The keyword arguments of decode_attention that are not arrays."""
        return {"window": self.window, "causal": self.causal, "soft_cap": self.soft_cap}

    def allowed(self) -> np.ndarray:
        """(B, Sq, capacity), as the docstring of decode_attention defines it."""
        allowed = np.zeros((len(self.lengths), self.q_len, self.capacity), bool)
        left, right = self.window or (None, None)
        for b, length in enumerate(self.lengths):
            for i in range(self.q_len):
                position = length - self.q_len + i
                for j in range(min(length, self.capacity)):
                    start = 0 if self.starts is None else self.starts[b]
                    start = start if np.ndim(start) == 0 else start[i]
                    allowed[b, i, j] = (
                        position >= 0
                        and (j <= position or not self.causal)
                        and j >= start
                        and (left is None or j >= position - left)
                        and (right is None or j <= position + right)
                    )
        return allowed


CASES = {
    "one row": Case((300, 1, 129, 77)),
    "an empty sequence": Case((0, 5, 0)),
    "16 rows": Case((300, 16, 3, 0), q_len=16),
    "causal=False": Case((200, 2, 130), q_len=3, causal=False),
    "one head each": Case((131,), q_len=2, heads=3, kv_heads=3),
    "multi-query": Case((299, 40), q_len=5, heads=8, kv_heads=1, dims=(8, 40)),
    "starts": Case((290, 60, 7), q_len=2, starts=(130, 0, 7)),
    "starts by row": Case((290, 60), q_len=2, starts=((256, 257), (59, -3))),
    "left": Case((290, 60, 2), q_len=3, window=(31, 0)),
    "no limit on the left": Case((290, 60, 2), q_len=3, window=(None, 0)),
    "window beside rows that see later ones": Case(
        (290, 60, 2), q_len=4, window=(31, 2), causal=False
    ),
    "right alone": Case((290, 60, 2, 0), q_len=4, window=(None, 1), causal=False),
    "a window of all": Case((290, 3), q_len=4, window=(2**40, 2**31 - 1), causal=False),
    "soft cap and sinks": Case((290, 60, 0), q_len=2, soft_cap=2.5, sinks=True),
    "pages": Case((300, 1, 129, 0), capacity=320, page_size=16),
    "pages of 1, left": Case((50, 7), q_len=2, capacity=60, page_size=1, window=(9, 0)),
    "pages longer than a block": Case(
        (391, 200), q_len=4, capacity=402, page_size=201, sinks=True, starts=(190, 0)
    ),
}


class Tensors(NamedTuple):
    query: Any
    key_cache: Any
    value_cache: Any
    lengths: np.ndarray
    block_table: np.ndarray | None
    starts: np.ndarray | None
    sinks: Any
    key: np.ndarray  # (B, capacity, Hkv, Dqk) float64: the caches' content, garbage as 0
    value: np.ndarray
    key_scale: Any = None
    value_scale: Any = None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The array arguments of decode_attention, positional and by keyword."""
        given = {"block_table": self.block_table, "kv_starts": self.starts, "sinks": self.sinks}
        given |= {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return self[:4], {name: x for name, x in given.items() if x is not None}


def tensors(case: Case, dtype: Any = jnp.float32, seed: int | None = None) -> Tensors:
    """Random operands. Keys that no row attends and unused block table entries hold garbage."""
    rng = np.random.default_rng(seed)
    batch = len(case.lengths)

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))

    query = draw(batch, case.q_len, case.heads, case.dims[0])
    key, value = (draw(batch, case.capacity, case.kv_heads, dim) for dim in case.dims)
    allowed = case.allowed()
    idle = ~allowed.any(1)
    dirty = [np.where(idle[..., None, None], sign * GARBAGE, x) for sign,
        x in ((1, key), (-1, value))]  # fmt: skip
    query = np.where(allowed.any(2)[..., None, None], query, GARBAGE)
    table = None
    if case.page_size:
        blocks = case.capacity // case.page_size
        pages = batch * blocks + 3
        order = rng.permutation(pages)[: batch * blocks].reshape(batch, blocks)
        used = allowed.any(1).reshape(batch, blocks, case.page_size).any(-1)
        table = np.where(used, order, rng.choice([-1, pages, 2**31 - 1, 0], order.shape))
        table = table.astype(np.int32)
        paged = []
        for sign, x in zip((1, -1), dirty, strict=True):
            pool = np.full((pages, case.page_size, *x.shape[2:]), sign * GARBAGE, x.dtype)
            pool[order.ravel()] = x.reshape(-1, case.page_size, *x.shape[2:])
            paged.append(pool)
        dirty = paged
    clean = [np.where(idle[..., None, None], 0, x.astype(np.float64)) for x in (key, value)]
    sinks = 2 * rng.standard_normal(case.heads).astype(np.float32) if case.sinks else None
    starts = None if case.starts is None else np.asarray(case.starts, np.int32)
    on_device = [jnp.asarray(x, dtype) for x in (query, *dirty)]
    return Tensors(*on_device, np.asarray(case.lengths, np.int32), table, starts, sinks, *clean)


def cast(x: Tensors, dtype: Any) -> Tensors:
    """The tensors rounded to a smaller dtype. In float16 the garbage 1e30 becomes infinity."""
    names = ("query", "key_cache", "value_cache")
    key, value = (np.asarray(jnp.asarray(y, dtype), np.float64) for y in (x.key, x.value))
    rounded = {name: getattr(x, name).astype(dtype) for name in names}
    return x._replace(**rounded, key=key, value=value)


SCALES = ("none", "one", "heads", "rows")


def in_fp8(case: Case, x: Tensors, kind: str, seed: int | None = None) -> Tensors:
    """Quantize the caches to float8_e4m3fn with a kind of scales from SCALES.

    "rows" means one scale per sequence, or per page, and head. Keys that no row attends to are NaN,
    as are scales that cover only such keys. Values range from subnormals to the largest finite.
    """
    rng = np.random.default_rng(seed)
    idle = ~case.allowed().any(1)
    places = np.indices(idle.shape)
    if x.block_table is not None:
        block, within = places[1] // case.page_size, places[1] % case.page_size
        places = np.array([np.where(idle, 0, x.block_table[places[0], block]), within])
    caches, scales, clean = [], [], []
    for cache in (x.key_cache, x.value_cache):
        cache = np.asarray(cache, np.float64)
        shape = {"none": (), "one": (), "heads": cache.shape[2:3], "rows": cache.shape[:3:2]}[kind]
        scale = np.float32(1) if kind == "none" else np.exp(rng.uniform(-5, 1, shape))
        scale = np.asarray(scale, np.float32)
        factor = scale[:, None, :, None] if kind == "rows" else np.float64(scale[..., None])
        lost = np.abs(cache) > 0.9 * GARBAGE
        small = np.clip(np.where(lost, np.nan, cache / factor), -448, 448)
        small = small.astype(jnp.float8_e4m3fn)
        clean.append(np.where(idle[..., None, None], 0, (small * factor)[tuple(places)]))
        if kind == "rows":
            scale = np.where(lost.all((1, 3)), np.nan, scale).astype(np.float32)
        caches.append(jnp.asarray(small))
        scales.append(None if kind == "none" else scale)
    names = ("key_cache", "value_cache", "key_scale", "value_scale", "key", "value")
    return x._replace(**dict(zip(names, [*caches, *scales, *clean], strict=True)))


def exact(case: Case, x: Tensors, scale: float) -> Results:
    """The result in float64."""
    q = np.asarray(x.query, np.float64)
    q = np.where(np.abs(q) > 0.9 * GARBAGE, 0, q)
    return Results(*(np.asarray(r) for r in _dense(np, case, x.sinks, q, x.key, x.value, scale)))


def plain(case: Case, x: Tensors, scale: float, tf32: bool = False) -> Results:
    """Straightforward jax.numpy attention in the operands' dtype.

    tf32: round the operands of products to TF32 (11 significant bits) explicitly, because XLA
    computes products of a single row in float32 whatever precision is requested.
    """
    q = np.where(np.abs(np.asarray(x.query, np.float64)) > 0.9 * GARBAGE, 0, x.query)
    arrays = (jnp.asarray(y, x.query.dtype) for y in (q, x.key, x.value))
    return Results(*_plain(case, x.sinks, *arrays, scale, tf32))


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _plain(case, sinks, q, key, value, scale, tf32):
    return _dense(jnp, case, sinks, q, key, value, scale, _to_tf32 if tf32 else lambda x: x)


def _to_tf32(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32)


def _dense(np_, case, sinks, q, key, value, scale, operand=lambda x: x):
    group = case.heads // case.kv_heads
    q, key, value = map(operand, (q, key, value))
    key, value = np_.repeat(key, group, 2), np_.repeat(value, group, 2)
    allowed = case.allowed()[:, None]
    s = np_.einsum("bihd,bjhd->bhij", q, key) * np_.asarray(scale, q.dtype)
    if case.soft_cap:
        s = case.soft_cap * np_.tanh(s / case.soft_cap)
    some = allowed.any(-1)
    low = np_.asarray(-1e4, q.dtype)
    z = low if sinks is None else np_.asarray(sinks, q.dtype)[:, None]
    top = np_.maximum(np_.where(allowed, s, low).max(-1), z)
    p = np_.where(allowed, np_.exp(np_.where(allowed, s, low) - top[..., None]), 0)
    total = p.sum(-1) + (0 if sinks is None else np_.exp(z - top))
    total = np_.where(some, total, 1)
    out = np_.einsum("bhij,bjhd->bihd", operand(p / total[..., None]), value)
    return out, np_.where(some, top + np_.log(total), -np_.inf)


@functools.cache
def jitted(implementation: str | None, **options: Any) -> Any:
    import packax

    return jax.jit(
        functools.partial(
            packax.decode_attention, return_lse=True, implementation=implementation, **options
        )
    )


def run(case: Case, x: Tensors, scale: float, implementation: str | None = None) -> Results:
    operands, keywords = x.arguments()
    function = jitted(implementation, scale=scale, **case.options())
    return Results(*function(*operands, **keywords))


class Extension(StandIn):
    """A stand-in for packax._ext with what lowering queries."""

    @staticmethod
    def variants():
        chip = {"cc": 80, "arch_specific": False}
        return [
            {"kernel": kernel, "dtype": d, "qk_dim": qk, "v_dim": v, **chip}
            for kernel in ("decode", "decode_combine")
            for d in ("bf16", "f16", "f32", "tf32")
            for qk, v in ((64, 64), (192, 128))
            if (kernel, d) != ("decode_combine", "tf32")
        ] + [
            {"kernel": k, "dtype": "e4m3", "qk_dim": 128, "v_dim": 128, **chip}
            for k in ("decode_fp8", "decode_fp8_pages")
        ]
