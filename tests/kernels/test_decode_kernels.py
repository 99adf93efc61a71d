"""The decoding kernels in the interpreter, on sequences and on packed rows of several sequences.

Guards against shares that overlap, miss keys or have none, tile columns beyond the head dim, rows
of another sequence in a tile, an item that both kernels or neither computes, a list of work that is
too short, and reads of what no row attends: it is NaN, or its block table entry is invalid.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import decode_calls
import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter as interpreter
from decode_calls import IMPOSSIBLE, DecodeCall, impossible, parse
from gluon_language import launch
from gluon_threads import TensorMap
from packax._src import decode, ragged
from packax._src.core.spec import Operands
from packax._src.ops import packed_rows
from packax._src.ops.primitives import decode_p
from tiers import marked, once_each, some

KERNELS: dict[str, dict[str, Any]] = {
    "short": {"kernels": {"decode": (16, 16)}},
    "tall": {"kernels": {"decode_tall": (32, 32)}},
    "halves": {"kernels": {"decode_tall": (32, 32)}, "v_parts": 2},
    "both": {"kernels": {"decode_tall": (32, 16), "decode": (16, 16)}},
    "float32": {"kernels": {"decode": (16, 16)}, "exact": 1},
    "tall float32": {"kernels": {"decode_tall": (32, 16)}, "exact": 1},
    "fp8": {"kernels": {"decode_fp8": (16, 32)}},
    "tall fp8": {"kernels": {"decode_tall_fp8": (32, 32)}},
    "both fp8": {"kernels": {"decode_tall_fp8": (32, 32), "decode_fp8": (16, 32)}},
}


def operands_of(call: DecodeCall, a: Any) -> tuple[Operands, Any]:
    """The operands of the primitive and its spec."""
    jaxpr = jax.make_jaxpr(call.attend)(a)
    (found,) = (e for e in jaxpr.jaxpr.eqns if e.primitive is decode_p)
    only_inputs = jaxpr.jaxpr.replace(outvars=found.invars)
    values = jax.core.eval_jaxpr(only_inputs, jaxpr.consts, *jax.tree.leaves(a))
    return without_idle(Operands.of(found.params["names"], values)), found.params["spec"]


def without_idle(x: Operands) -> Operands:
    """With NaN in queries that attend to nothing."""
    idle = np.maximum(x.kv_start, 0) >= x.kv_end
    query = np.where(idle[..., None, None], np.nan, x.query).astype(x.query.dtype)
    return x._replace(query=query)


def division(keys: str) -> dict[str, int]:
    """Into which shares keys are divided. "3": three of each sequence; "3 of 8": eight are dealt
    out, at most three to a sequence."""
    splits, _, shares = keys.partition(" of ")
    return {"splits": int(splits), "shares": int(shares or 0)}


def run(call: DecodeCall, a: Any, kernels: str, keys: str = "1") -> dict[str, Any]:
    x, spec = operands_of(call, a)
    out, lse = interpreter.decode(x, spec, **KERNELS[kernels], **division(keys))
    return {"out": out, "lse": lse}


ROWS = [  # kernels, call, shares of the first tier, other shares
    ("short", "dims=24x40", "3", "1"),
    ("short", "batch=2,blocks=33", "7, 128", "1"),  # more shares than steps, and than are merged
    ("short", "rows=3,window=all", "", "3"),
    ("short", "rows=2,heads=3/3,window=huge", "3", ""),
    ("short", "rows=5,heads=8/1,dims=8x40", "3", ""),
    ("short", "rows=2,starts=of sequences", "", "3"),
    ("short", "rows=2,starts=of rows", "3, 7 of 8", ""),
    ("short", "rows=3,window=left", "3", ""),
    ("short", "rows=4,window=both", "3", "9 of 9"),
    ("short", "rows=4,window=right", "", "3"),
    ("short", "rows=2,cap=soft cap,sinks=sinks,dims=24x40", "3", "7 of 8"),
    ("short", "cache=pages,page=16,blocks=5", "7 of 8", "3"),
    ("short", "cache=pages,page=1,blocks=150,rows=2,window=left", "2", ""),
    ("short", "cache=pages,page=51,blocks=2,rows=4,sinks=sinks,starts=of sequences", "3", ""),
    ("short", "batch=64,heads=2/1,rows=2", "2 of 4", "9 of 9, 128 of 128"),
    *(("short", f"batch=2,scale={x}", *(("1", "") if x != "1e-30" else ("", "1")))
        for x in ("negative", "0", "1e-40", "1e-30", "1e30")),
    # where 2^x of the tanh overflows, and where 1 - tanh would cancel
    *(("short", f"batch=2,scale={scale},cap={cap}", first, more) for scale, cap, first, more in
        ((300, 0.01, "1", ""), (0.3, 1e-30, "", "1"), (0.3, 30, "1", ""), (0.3, 1e30, "", "1"))),
    ("tall", "rows=16,heads=6/2,dims=16x24,blocks=19", "2", "7 of 8"),
    ("tall", "rows=3,heads=6/2,window=all,dims=16x16", "", "2"),
    ("halves", "rows=2,heads=6/2,starts=of rows,dims=16x32", "2", ""),
    ("halves", "rows=2,heads=6/2,cache=pages,page=1,window=left,dims=32x16", "2", ""),
    ("float32", "rows=2,cap=soft cap,sinks=sinks,dims=24x40", "2", ""),
    ("float32", "cache=pages,page=51,blocks=2,rows=4,sinks=sinks,dims=24x40", "", "2"),
    ("float32", "batch=2,scale=1e-40", "1", ""),
    ("float32", "batch=2,scale=1e30", "", "1"),
    ("tall float32", "rows=16,blocks=19,dims=24x40", "2", ""),
    ("tall float32", "rows=5,heads=8/1,dims=24x40", "", "2"),
    *(("fp8", f"numbers=float8{text},dims=32x48", first, more) for text, first, more in (
        (" scale,rows=2,cap=soft cap,sinks=sinks,dtype=bfloat16", "3", ""),
        (" scales of heads,blocks=19,dtype=float16", "3", ""),
        (" scales of rows,rows=2,starts=of rows,dtype=float16", "", "3"),
        (" scales of rows,cache=pages,page=16,blocks=5,dtype=bfloat16", "3", ""),
        (" scales of rows,cache=pages,page=51,blocks=2,rows=4,sinks=sinks,dtype=float16", "", "3"),
        (",cache=pages,page=1,rows=2,window=left,dtype=bfloat16", "3", ""))),
    ("tall fp8", "numbers=float8 scales of rows,rows=16,dims=32x48,dtype=bfloat16", "3", ""),
]  # fmt: skip
PACKED = [  # the same; the number of programs into which the lowering divides the keys
    ("both", "", "", "1024"),
    ("both", "heads=4/1,mix=chunk,window=left", "", "1024"),
    ("short", "mix=chunk,starts=of rows,sinks=sinks", "1", ""),
    ("short", "mix=decoding,cap=soft cap", "", "1024"),
    ("both", "heads=4/1,mix=more sequences,dims=16x8", "", "1024"),
    ("both", "heads=4/1,window=both,scale=negative", "", "8"),
    ("both fp8", "dtype=bfloat16,numbers=float8 scales of rows,dims=16x16", "1024", ""),
    ("both fp8", "heads=4/1,mix=chunk,dtype=float16,numbers=float8,dims=16x16", "", "8"),
]
DRAFTS = [
    ("short", "decode,rows=3,drafts=trees,window=2,sinks=sinks"),
    ("both", "ragged,heads=4/1,mix=chunk,drafts=trees,window=left,sinks=sinks"),
    ("both fp8", "ragged,drafts=one tree,numbers=float8 scales of rows,dims=16x16,starts=of rows"),
]


def rows(of: list[tuple[str, ...]]) -> list[Any]:
    split = [(*row[:2], x.split(", "), n == 0) for row in of for n, x in enumerate(row[2:]) if x]
    return [marked((*row, keys), first) for *row, each, first in split for keys in each]


@pytest.mark.parametrize("kernels,text,keys", rows(ROWS))
def test_sequences(kernels: str, text: str, keys: str) -> None:
    call = parse(f"decode,{text}")
    a = call.arrays()
    assert not call.wrong(run(call, a, kernels, keys), a, 2)


@pytest.mark.parametrize("kernels,text,programs", rows(PACKED))
def test_packed_rows(kernels: str, text: str, programs: str, monkeypatch: Any) -> None:
    """With few programs, tiles have one share; with many, long ones have several."""
    for name, number in {"PROGRAMS": int(programs), "LEAST_KEYS": 8, "TILE_ROWS": 32}.items():
        monkeypatch.setattr(packed_rows, name, number)
    call = parse(f"ragged,{text}")
    a = call.arrays()
    x, spec = operands_of(call, a)
    out, lse = interpreter.decode(x, spec, **KERNELS[kernels])
    assert not call.wrong({"out": out[0], "lse": lse[0]}, a, 2)
    tokens = x.query.shape[1]
    of_tokens = np.asarray(packed_rows.work_list(x))[: 2 * tokens].reshape(tokens, 2)
    assert programs == "8" or (of_tokens[:, 1].max() == 1) == (programs == "1")


@pytest.mark.parametrize("kernels,text", some(DRAFTS, 1))
def test_drafts(kernels: str, text: str, monkeypatch: Any) -> None:
    """The kernels have the keys before the drafts. They read no query without such keys."""

    def bind(*leaves: Any, spec: Any, names: Any) -> tuple[jax.Array, jax.Array]:
        x = without_idle(Operands.of(names, leaves))
        out, lse = interpreter.decode(x, spec, **KERNELS[kernels])
        return jnp.asarray(out, call.dtype), jnp.asarray(lse)

    for module in (decode, ragged):
        monkeypatch.setattr(module, "decode_p", SimpleNamespace(bind=bind))
    call = parse(f"{text},dtype=bfloat16" if "fp8" in kernels else text)
    a = call.arrays(1)
    assert not call.wrong(call.step(a), a, 2)


def test_rows_that_attend_to_nothing_read_no_shares(monkeypatch: Any) -> None:
    """Padding, and rows before position 0. The list gives them the shares of another row."""
    call = parse("ragged,sinks=sinks")
    bounds, lengths = np.int32([1, 2, 9, 9, 15]), np.int32([8, 3, 0, 20])
    a = call.arrays(cu_q_lens=bounds, lengths=lengths, num_seqs=np.int32(4))
    x, spec = operands_of(call, a)
    idle = np.asarray(x.kv_start >= x.kv_end)[0]
    work = np.array(packed_rows.work_list(x))
    of_tokens = work[: 2 * len(idle)].reshape(-1, 2)
    of_tokens[idle] = of_tokens[~idle][0]
    monkeypatch.setattr(packed_rows, "work_list", lambda _: work)
    out, lse = interpreter.decode(x, spec, **KERNELS["short"])
    assert idle.sum() == 1 + 4 + 4
    assert not call.wrong({"out": out[0], "lse": lse[0]}, a, 2)


# --- Chunks of packed rows in the kernel for Hopper, over several steps


def on_hopper(call: Any, a: Any, page_rows: int, out: np.ndarray, lse: np.ndarray) -> None:
    """Computes the rows of chunks into out and lse, by two programs."""
    x, spec = operands_of(call, a)

    def rows_of(y: Any) -> TensorMap:
        return TensorMap(np.asarray(y).transpose(0, 2, 1, 3))

    cache_of = np.array if page_rows == 1 else rows_of
    _, tokens, heads, _ = x.query.shape
    pages, page_size, kv_heads, v_dim = x.value.shape
    items = packed_rows.room(tokens, call.batch, heads, kv_heads).items
    launch("sm90.ragged", "ragged_sm90", 2, {
        "query": rows_of(x.query), "key": cache_of(x.key), "value": cache_of(x.value), "out": out,
        "lse": lse, "sinks": lse if x.sinks is None else np.array(x.sinks),
        **{name: np.array(getattr(x, name)) for name in ("kv_start", "kv_end", "block_table")},
        "workspace": np.array(packed_rows.work_list(x)), "counter": np.zeros(1, np.int32),
        "scale": float(spec.scale), "has_sinks": int(x.sinks is not None), "q_len": tokens,
        "pages": pages, "page_size": page_size, "table_width": x.block_table.shape[1],
        "heads": heads, "kv_heads": kv_heads, "v_eighths": v_dim // 8, "room": items,
        "QK_DIM": 16, "V_DIM": 16, "QK_CHUNK": 16, "V_CHUNK": 8, "WARP_GROUPS": 2, "BLOCK_N": 16,
        "STAGES": 2, "PAGE_ROWS": page_rows, "REMATERIALIZE": 1,
        "CONSUMER_REGISTERS": 0, "PRODUCER_REGISTERS": 0,
    }, 0)  # fmt: skip


CHUNKS = [  # PAGE_ROWS, call
    (4, "heads=4/1,dtype=bfloat16,dims=16x8"),
    (4, "dtype=bfloat16,starts=of rows,window=left,sinks=sinks"),
    (8, "cache=dense,heads=4/1,dtype=bfloat16,window=both"),
    (4, "dtype=float16,starts=of rows,heads=4/4"),
    (8, "page=16,blocks=12,heads=4/2,dtype=bfloat16,window=left"),
    (1, "page=3,blocks=60,heads=4/2,dtype=bfloat16,window=left,sinks=sinks"),
    (1, "page=1,blocks=180,heads=4/1,dtype=float16,dims=16x8"),
    (1, "page=2,blocks=90,dtype=bfloat16,starts=of rows,window=both"),
    (1, "page=8,blocks=23,heads=4/4,dtype=bfloat16,dims=8x16,sinks=sinks"),
    (1, "page=12,blocks=15,dtype=float16,starts=of rows,window=left"),
    (1, "page=48,blocks=4,heads=4/1,dtype=bfloat16,dims=16x16"),
]


def check_chunks(page_rows: int, text: str, length: int, monkeypatch: Any) -> None:
    """A chunk with a tile and a part of one, of a sequence of `length` tokens."""
    monkeypatch.setitem(decode_calls.MIXES, "mixed", (200, 2))
    for name, number in {"CHUNK": 30, "CHUNK_PROGRAMS": 1, "LEAST_KEYS": 8}.items():
        monkeypatch.setattr(packed_rows, name, number)
    call = parse(f"ragged,{text}" if "blocks" in text else f"ragged,blocks=45,{text}")
    bounds, lengths = np.int32([1, 2, 180, 180, 199]), np.int32([90, length, 0, 40])
    a = call.arrays(cu_q_lens=bounds, lengths=lengths, num_seqs=np.int32(4))
    x, spec = operands_of(call, a)
    out, lse = interpreter.decode(x, spec, **KERNELS["both"], elsewhere=1)
    lost = np.isnan(out).all((0, 2, 3))
    np.testing.assert_array_equal(np.flatnonzero(lost), np.arange(2, 180))
    out = out.astype(call.dtype)
    on_hopper(call, a, page_rows, out, lse)
    assert not call.wrong({"out": out[0], "lse": lse[0]}, a, 2)


@pytest.mark.parametrize("page_rows,text", some(CHUNKS, 1, 5))
def test_chunks_on_hopper(page_rows: int, text: str, monkeypatch: Any) -> None:
    """Both kernels write every row once."""
    check_chunks(page_rows, text, 180, monkeypatch)


@pytest.mark.parametrize("page_rows,length", once_each([1, 4], [0, 30]))
def test_chunks_of_tokens_without_keys(page_rows: int, length: int, monkeypatch: Any) -> None:
    """Whatever the block table has. Of 178 tokens, a tile is before position 0, or all are."""
    check_chunks(page_rows, "dtype=bfloat16,starts=of rows,dims=16x16", length, monkeypatch)


# --- Numbers


@pytest.mark.parametrize(
    "kernels,text", [("short", "rows=2,cap=soft cap,sinks=sinks"), ("tall", "rows=16,dims=16x24")]
)
def test_tf32_rounds_every_operand_to_11_bits(kernels: str, text: str) -> None:
    """The log-sum-exp is that of rounded queries and keys; for the output, the probabilities are
    rounded, too."""
    call = parse(f"decode,{text}")
    a = call.arrays()
    rounded = a | {name: dense.to_tf32(a[name]) for name in ("query", "key", "value")}
    (want, _), (unrounded, _) = (call.references(x) for x in (rounded, a))
    x, spec = operands_of(call, a)
    out, lse = interpreter.decode(x, spec, **KERNELS[kernels] | {"exact": 0}, splits=2)
    close = {"atol": 1e-5, "rtol": 1e-6}
    np.testing.assert_allclose(lse, want["lse"], **close)
    largest = np.nanmax(np.abs(a["value"]))
    np.testing.assert_allclose(out, want["out"], atol=2.0**-11 * largest)
    assert not np.allclose(unrounded["lse"], want["lse"], **close)


OF_ROWS = "decode,rows=1,numbers=float8 scales of rows,heads=2/1,dims=16x16,blocks=12"
CACHES = ["dense", "pages"]


@pytest.mark.parametrize("cache,size", once_each(CACHES, [2.0**-100, 2.0**-30, 2.0**100]))
def test_queries_and_scales_of_many_sizes_over_fp8(cache: str, size: float) -> None:
    """float16 could hold neither the query nor a scaled value. At 2^-120, small elements of the
    query would be subnormal in bfloat16."""
    call = parse(f"{OF_ROWS},cache={cache},dtype=bfloat16")
    a = call.arrays()
    scales = {name: a[name] / np.float32(size) for name in ("key_scale", "value_scale")}
    got = run(call, a | scales | {"query": a["query"] * a["query"].dtype.type(size)}, "fp8", "2")
    want, _ = call.references(a)
    np.testing.assert_allclose(got["lse"], want["lse"], atol=1e-5, rtol=1e-5)
    largest = np.abs(call.caches(a)["value"]).max()
    np.testing.assert_allclose(got["out"] * size, want["out"], atol=2.0**-10 * largest)


@pytest.mark.parametrize("cache", CACHES)
def test_scales_of_fp8_that_are_negative_or_0(cache: str) -> None:
    call = parse(f"{OF_ROWS},cache={cache},dtype=float16")
    a = call.arrays()
    sign = np.where(np.arange(len(a["key"])) % 3, np.float32(-1), 0)[:, None]
    a |= {name: a[name] * sign for name in ("key_scale", "value_scale")}
    assert not call.wrong(run(call, a, "fp8", "2"), a, 2)


def test_a_sink_of_each_sequence() -> None:
    """vmap produces such sinks."""
    call = parse("decode,batch=2,sinks=sinks,heads=2/1")
    a = call.arrays(lengths=np.int32([36, 9]))
    x, spec = operands_of(call, a)
    sinks = np.array([[1.0, -2.0], [np.inf, 0.5]], np.float32)
    out, lse = interpreter.decode(x._replace(sinks=sinks), spec, **KERNELS["short"], splits=2)
    assert not out[1, :, 0].any() and np.isposinf(lse[1, 0]).all()
    a["sinks"] = np.where(np.isinf(sinks), 0, sinks)
    want, _ = call.references(a)
    out[1, :, 0], lse[1, 0] = want["out"][1, :, 0], want["lse"][1, 0]
    assert not call.wrong({"out": out, "lse": lse}, a, 2)


@pytest.mark.parametrize(
    "entry,kernels,keys", once_each(IMPOSSIBLE, ["short", "tall"], ["1", "2 of 3"])
)
def test_what_cannot_be(entry: int | None, kernels: str, keys: str) -> None:
    """NaN in the rows that attend to it alone. All other pages are NaN, too."""
    call, a, lost = impossible(entry)
    assert not call.wrong(run(call, a, kernels, keys), a, 2, lost=lost)


@pytest.mark.parametrize(
    "batch,each", some([(1, 1), (2, 33), (3, 1), (17, 4), (64, 1), (64, 2)], 0, 1, 2, 3)
)
def test_every_key_is_dealt_once(batch: int, each: int) -> None:
    """No share is dealt twice, so two programs never write the same sums, and no share is longer
    than necessary."""
    rng = np.random.default_rng()
    step, kv_len, splits = 16, 1 << 12, int(rng.integers(2, 40))
    shares = batch * each
    hi = rng.integers(-3, kv_len + 9, (batch, 3), np.int32) // rng.choice(
        [1, 1, 8, 64, 4096], (batch, 1)
    )
    hi = np.ascontiguousarray(hi, np.int32)
    lo = np.where(rng.random((batch, 3)) < 0.5, 0, hi - rng.integers(-2, 900, hi.shape)).astype(
        np.int32
    )
    found = interpreter.dealt_shares(lo, hi, kv_len, shares, splits, step)
    some = (np.maximum(lo, 0) < hi) & (hi <= kv_len)
    first = np.where(some, np.maximum(lo, 0), kv_len).min(1)
    last = np.where(some, hi, 0).max(1)
    steps = -(-np.maximum(last - first, 0) // step)
    longest = max(-(-steps.sum() // shares), -(-steps.max() // splits), 128 // step)
    real = found[found[:, 0] < batch]
    assert (found[len(real) :, 0] == batch).all() and len({(b, n) for b, n,
        *_ in real.tolist()}) == len(real)  # fmt: skip
    for b in range(batch):
        of_sequence = real[real[:, 0] == b]
        assert 1 <= len(of_sequence) <= splits and (of_sequence[:, 2] == len(of_sequence)).all()
        assert sorted(of_sequence[:, 1]) == list(range(len(of_sequence)))
        times = np.zeros(kv_len, int)
        for begin, stop in of_sequence[:, 3:]:
            times[begin:stop] += 1
            assert begin == stop or stop - begin <= longest * step
        keys = np.arange(kv_len)
        np.testing.assert_array_equal(times, (keys >= first[b]) & (keys < last[b]))
