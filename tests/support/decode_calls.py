"""`DecodeCall`: one call of `decode_attention` or `decode_shared_prefix`, like `calls.Call`.
`RaggedCall`: one of `ragged_paged_attention`."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import dense
import jax.numpy as jnp
import numpy as np
import packax

Arrays = dict[str, Any]
PAGE, BLOCKS = 4, 9
WINDOWS: dict[str, dict[str, Any]] = {
    "none": {},
    "left": {"window": (7, 0)},
    "both": {"window": (7, 1), "causal": False},
    "right": {"window": (None, 1), "causal": False},
    "huge": {"window": (2**40, 2**31 - 1), "causal": False},
    "all": {"causal": False},
}
# or a number, as are the keys to the left of a window
SCALES: dict[str, Any] = {"default": None, "negative": -0.4}
CAPS: dict[str, Any] = {"none": None, "soft cap": 2.0}
FEATURES: dict[str, tuple[str, ...]] = {
    "cache": ("dense", "pages", "prefix of all", "prefix of pairs"),
    "numbers": (
        "as query",
        "float8",
        "float8 scale",
        "float8 scales of heads",
        "float8 scales of rows",
    ),
    "rows": ("1", "3"),
    "heads": ("4/2", "4/4", "4/1"),
    "dims": ("8x8", "16x8", "8x12"),
    "dtype": ("float32", "bfloat16", "float16"),
    "window": tuple(WINDOWS),
    "starts": ("none", "of sequences", "of rows"),
    "scale": tuple(SCALES),
    "cap": tuple(CAPS),
    "sinks": ("none", "sinks"),
    "drafts": ("none", "one tree", "trees"),
}
# tokens of a packed step, and the sequences that have more than one of them
MIXES = {"mixed": (19, 2), "decoding": (4, 0), "chunk": (50, 1), "more sequences": (3, 1)}
RAGGED_FEATURES = {
    **{name: FEATURES[name] for name in FEATURES if name != "rows"},
    "cache": ("pages", "dense"),
    "starts": ("none", "of rows"),
    "mix": tuple(MIXES),
}
RAGGED_MIXES = [
    "ragged",
    "ragged,cache=dense,heads=4/1,window=left",
    "ragged,mix=chunk,starts=of rows,sinks=sinks",
    "ragged,mix=decoding,numbers=float8 scales of rows,dtype=bfloat16",
    "ragged,mix=more sequences,cap=soft cap,dims=16x8",
    "ragged,cache=dense,mix=chunk,numbers=float8 scales of heads",
    "ragged,mix=chunk,window=both,heads=4/4",
    "ragged,cache=dense,mix=decoding,scale=negative,dtype=float16",
    "ragged,numbers=float8,dims=8x12,sinks=sinks,cap=soft cap",
    "ragged,dtype=bfloat16,starts=of rows,window=left",
    "ragged,cache=dense,mix=more sequences,window=both,sinks=sinks",
    "ragged,mix=chunk,dtype=float16,numbers=float8 scales of rows,cap=soft cap",
    "ragged,drafts=trees,window=left,sinks=sinks",
    "ragged,cache=dense,mix=chunk,drafts=one tree,starts=of rows,numbers=float8 scales of rows",
]
DRAFTS = 5  # for which a packed step has room in each sequence


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """Prints as "decode" and the features that differ from the first of each."""

    cache: str = "dense"
    numbers: str = "as query"
    rows: str = "1"
    heads: str = "4/2"
    dims: str = "8x8"
    dtype: str = "float32"
    window: str = "none"
    starts: str = "none"
    scale: str = "default"
    cap: str = "none"
    sinks: str = "none"
    drafts: str = "none"
    batch: int = 4
    blocks: int = BLOCKS
    page: int = PAGE

    features_of = FEATURES
    function = "decode"

    def __str__(self) -> str:
        fields = dataclasses.asdict(self)
        first = {name: values[0] for name, values in self.features_of.items()}
        given = [f"{name}={fields[name]}" for name in first if fields[name] != first[name]]
        return ",".join([self.function, *given])

    def features(self) -> Iterator[tuple[str, str]]:
        yield from ((name, getattr(self, name)) for name in self.features_of)

    @property
    def paged(self) -> bool:
        return self.cache != "dense"

    @property
    def shared(self) -> int:
        """The number of groups that share a prefix; 0: none."""
        return {"prefix of all": 1, "prefix of pairs": self.batch // 2}.get(self.cache, 0)

    def invalid(self) -> str | None:
        if self.shared and (self.window != "none" or self.starts != "none"):
            return "decode_shared_prefix has no windows or starts"
        if self.drafts != "none" and (self.shared or not self.static().get("causal", True)):
            return "drafts are causal, and have no shared prefix"
        return None

    def with_multiple(self, of: int) -> DecodeCall:
        return self

    def longer(self) -> DecodeCall:
        return dataclasses.replace(self, batch=6, blocks=self.blocks + 2)

    def differentiable(self) -> list[str]:
        return []

    def sequences(self, rng: np.random.Generator) -> Arrays:
        """Tokens and lengths: that of the cache, one of at most the rows, and others."""
        heads, rows, room = int(self.heads.split("/")[0]), int(self.rows), self.page * self.blocks
        dim = int(self.dims.split("x")[0])
        lengths = [room, rng.integers(0, rows + 1), *rng.integers(0, room, self.batch)]
        a: Arrays = {"query": rng.standard_normal((self.batch, rows, heads, dim))}
        a["lengths"] = np.asarray(lengths[: self.batch], np.int32)
        if self.shared:
            a["lengths"] = rng.integers(20 + rows, room, self.batch).astype(np.int32)
            a["prefixes"] = rng.integers(0, 20, self.shared).astype(np.int32)
            if self.numbers == "float8 scales of rows":  # copies of keys in another page differ
                a["prefixes"] = a["prefixes"] // self.page * self.page
        if self.starts != "none":
            shape = (self.batch,) if self.starts == "of sequences" else (self.batch, rows)
            a["starts"] = rng.integers(-2, room // 4, shape).astype(np.int32)
        if self.sinks != "none":
            a["sinks"] = 2 * rng.standard_normal(heads).astype(np.float32)
        if self.drafts != "none":
            shape = (rows, rows) if self.drafts == "one tree" else (self.batch, rows, rows)
            a["drafts"] = rng.random(shape) < 0.5
        return a

    def used(self, a: Arrays) -> np.ndarray:
        """(B, room): the keys to which a row attends."""
        return self.allowed(a).any((1, 2))

    def arrays(self, seed: int = 0, **given: Any) -> Arrays:
        """The operands in numpy. Keys to which no row attends are NaN, as are the first page, the
        last, and their scales; table entries of such keys are any number. `given`: in place of what
        `sequences` draws."""
        rng = np.random.default_rng([seed, zlib.crc32(str(self).encode())])
        a = self.sequences(rng) | given
        kv_heads, room = int(self.heads.split("/")[1]), self.page * self.blocks
        dtype, used = jnp.dtype(self.dtype), self.used(a)
        dims = [int(n) for n in self.dims.split("x")]
        caches = [rng.standard_normal((self.batch, room, kv_heads, n)) for n in dims]
        if self.shared:  # the first sequence of a group has the prefix
            each = self.batch // self.shared
            common = np.arange(room) < np.repeat(a["prefixes"], each)[:, None]
            first = np.arange(self.batch) // each * each
            caches = [np.where(common[..., None, None], x[first], x) for x in caches]
        caches = [np.where(used[..., None, None], x, np.nan) for x in caches]
        if self.paged:
            pages = self.batch * self.blocks + 2
            table = 1 + rng.permutation(pages - 2).reshape(self.batch, -1)
            pools = [np.full((pages, self.page, kv_heads, n), np.nan) for n in dims]
            for pool, x in zip(pools, caches, strict=True):
                pool[table.ravel()] = x.reshape(-1, self.page, *x.shape[2:])
            if self.shared:
                blocks = np.repeat(a["prefixes"], each) // self.page
                table = np.where(np.arange(self.blocks) < blocks[:, None], table[first], table)
            read = used.reshape(self.batch, self.blocks, self.page).any(2)
            unread = rng.choice([-1, 0, pages, 2**31 - 1, -(2**31)], table.shape)
            a["table"] = np.where(read, table, unread).astype(np.int32)
            caches = pools
        for name, x in zip(("key", "value"), caches, strict=True):
            if self.numbers != "as query":
                shapes = {"float8 scales of heads": (kv_heads,)}
                shapes |= {"float8 scales of rows": (len(x), kv_heads)}
                scale = np.exp(rng.uniform(-5, 1, shapes.get(self.numbers, ())))
                scale = np.float32(1 if self.numbers == "float8" else scale)
                of_keys = scale[:, None, :, None] if scale.ndim == 2 else scale[..., None]
                x = np.clip(x / of_keys, -448, 448).astype(jnp.float8_e4m3fn)
                if scale.ndim == 2:
                    scale[np.isnan(x.astype(np.float32)).all((1, 2, 3))] = np.nan
                if self.numbers != "float8":
                    a[f"{name}_scale"] = scale
            a[name] = x if self.numbers != "as query" else x.astype(dtype)
        a["query"] = a["query"].astype(dtype)
        return a

    def labels(self) -> dict[str, str]:
        of_cache, rows = ("pogd", "p") if self.paged else ("bkgd", "b")
        found = {"query": "b.hd", "key": of_cache, "value": of_cache, "lengths": "b"}
        found |= {"table": "bn", "starts": "b." if self.starts == "of rows" else "b"}
        found |= {"sinks": "h", "prefixes": "." if self.shared == 1 else "b"}
        found |= {"drafts": ".." if self.drafts == "one tree" else "b.."}
        of = {"float8 scale": "", "float8 scales of heads": "g"}.get(self.numbers, f"{rows}g")
        found |= {"key_scale": of, "value_scale": of, "cu_q_lens": ".", "num_seqs": ""}
        found |= {"num_drafts": "b"}
        return {name: found[name] for name in self.arrays()}

    def static(self) -> dict[str, Any]:
        scale, cap = SCALES.get(self.scale, self.scale), CAPS.get(self.cap, self.cap)
        given = {"scale": scale, "soft_cap": cap}
        given = {n: float(x) for n, x in given.items() if x is not None}
        if self.window in WINDOWS:
            return given | WINDOWS[self.window]
        return given | {"window": (int(self.window), 0)}

    def attend(self, a: Arrays, mask: Any = None, **more: Any) -> Any:
        """(out, lse)."""
        names = {"key_scale": "key_scale", "value_scale": "value_scale", "sinks": "sinks"}
        names |= {"starts": "kv_starts", "table": "block_table", "drafts": "draft_mask"}
        given = {names[n]: x for n, x in a.items() if n in names} | self.static()
        tensors = a["query"], a["key"], a["value"], a["lengths"]
        if self.shared:
            return packax.decode_shared_prefix(*tensors, a["prefixes"], return_lse=True, **given)
        return packax.decode_attention(*tensors, return_lse=True, **given)

    def step(self, a: Arrays, attend: Any = None, **more: Any) -> dict[str, Any]:
        return dict(zip(("out", "lse"), (attend or self.attend)(a, **more), strict=True))

    def allowed(self, a: Arrays) -> np.ndarray:
        """(B, 1, Sq, room), as the docstring of decode_attention defines it."""
        rows, static = a["query"].shape[1], self.static()
        left, right = static.get("window", (None, None))
        j = np.arange(self.page * self.blocks)
        length = a["lengths"].astype(np.int64)[:, None, None]
        place = length - rows + np.arange(rows)[:, None]
        allowed = (j < length) & (place >= 0)
        of_key = np.broadcast_to(j, (self.batch, 1, len(j)))  # positions
        if "drafts" in a:
            drafts = self.of_drafts(a, place[..., 0])
            first = length - a.get("num_drafts", np.full(self.batch, rows))[:, None, None]
            is_draft = place >= first
            allowed = allowed & np.where(is_draft, (j < first) | drafts, j <= place)
            depth = np.maximum(first, 0) - 1 + (allowed & drafts).sum(2, keepdims=True)
            at = np.clip(j - length + rows, 0, rows - 1)
            place = np.where(is_draft, depth, place)
            of_key = np.where(j >= first, np.take_along_axis(place.swapaxes(1, 2), at, 2), j)
        elif static.get("causal", True):
            allowed = allowed & (j <= place)
        if left is not None:
            allowed = allowed & (of_key >= place - left)
        if right is not None and "drafts" not in a:
            allowed = allowed & (j <= place + right)
        if "starts" in a:
            allowed = allowed & (j >= a["starts"].reshape(self.batch, -1, 1))
        return allowed[:, None]

    def of_drafts(self, a: Arrays, place: np.ndarray) -> np.ndarray:
        """(B, Sq, room): what draft_mask says of query tokens at these places; elsewhere False."""
        found = np.zeros((*place.shape, self.page * self.blocks), bool)
        for n, length in enumerate(a["lengths"].tolist()):
            count = a["num_drafts"][n] if "num_drafts" in a else place.shape[1]
            mask = a["drafts"] if a["drafts"].ndim == 2 else a["drafts"][n]
            first = length - count
            for i, j in np.argwhere(mask[:count, :count]):
                if first + j >= 0 and first + j < found.shape[2]:
                    found[n, place[n] == first + i, first + j] = True
        return found

    def caches(self, a: Arrays) -> dict[str, np.ndarray]:
        """The caches in float64, (B, room, Hkv, D), with 0 for NaN."""
        caches = {}
        for name in ("key", "value"):
            x = a[name].astype(np.float64)
            if f"{name}_scale" in a:
                scale = a[f"{name}_scale"].astype(np.float64)
                x = x * (scale[:, None, :, None] if scale.ndim == 2 else scale[..., None])
            if self.paged:
                pages = np.clip(a["table"], 0, len(x) - 1)
                x = x[pages].reshape(self.batch, -1, *x.shape[2:])
            caches[name] = np.nan_to_num(x)
        return caches

    def references(self, a: Arrays, tf32: bool = False) -> Any:
        """Results in float64 and in the call's dtype."""
        caches = self.caches(a)
        static = self.static()
        scale = static.get("scale", a["query"].shape[-1] ** -0.5)
        operands = caches | {"query": a["query"], "scale": scale}
        operands |= {"sinks": a["sinks"]} if "sinks" in a else {}
        allowed, cap = self.allowed(a), static.get("soft_cap")
        return dense.true_and_plain(operands, allowed, self.dtype, tf32, soft_cap=cap)

    def wrong(
        self, got: dict[str, Any], a: Arrays, factor: float = 0, tf32: bool = False,
        lost: Any = None, references: Any = None,
    ) -> list[str]:  # fmt: skip
        """How results differ from the references, by default those of the arrays. `factor`: 0 for
        that of `calls.Call`. `lost`: the query tokens whose results must be NaN."""
        got = {name: np.asarray(x) for name, x in got.items()}
        factor = factor or (8 if self.dtype == "float32" else 4)
        true, plain = references or self.references(a, tf32)
        if lost is not None:
            true["out"] = np.where(lost[..., None, None], np.nan, true["out"])
            true["lse"] = np.where(np.expand_dims(lost, -2), np.nan, true["lse"])
        return dense.close(got, true, plain, factor)


@dataclasses.dataclass(frozen=True)
class RaggedCall(DecodeCall):
    """A packed step. It draws how many tokens each sequence has: `MIXES` are sizes."""

    cache: str = "pages"
    mix: str = "mixed"
    multiple: int = 1  # of the tokens

    features_of = RAGGED_FEATURES
    function = "ragged"

    __str__ = DecodeCall.__str__

    def with_multiple(self, of: int) -> RaggedCall:
        return dataclasses.replace(self, multiple=of)

    def sequences(self, rng: np.random.Generator) -> Arrays:
        a = super().sequences(rng)
        tokens, chunks = MIXES[self.mix]
        tokens += -tokens % self.multiple
        counts = rng.integers(0, 2, self.batch)
        with_chunks = rng.permutation(self.batch - 1)[:chunks]  # the last one may not be a sequence
        counts[with_chunks] = rng.integers(0, tokens, chunks)
        counts[with_chunks[:1]] = rng.integers(tokens // 2, tokens)  # and attends to a whole cache
        a["lengths"][with_chunks[:1]] = self.page * self.blocks
        last = np.minimum(np.cumsum([rng.integers(0, 2), *counts]), tokens).astype(np.int32)
        a |= {"query": rng.standard_normal((tokens, *a["query"].shape[2:])), "cu_q_lens": last}
        a["num_seqs"] = np.int32(rng.integers(self.batch - 1, self.batch + 1))
        if "drafts" in a:
            shape = a["drafts"].shape[:-2]
            a["drafts"] = rng.random((*shape, DRAFTS, DRAFTS)) < 0.5
            most = np.minimum(np.diff(last), DRAFTS)
            some = np.where(rng.random(self.batch) < 0.5, most, rng.integers(-1, most + 1))
            a["num_drafts"] = some.astype(np.int32)
        if "starts" in a:
            a["starts"] = rng.integers(-2, self.page * self.blocks // 4, tokens).astype(np.int32)
        return a

    def used(self, a: Arrays) -> np.ndarray:
        padded, index = self.padded(a)
        return (self.allowed(padded) & (index >= 0)[:, None, :, None]).any((1, 2))

    def labels(self) -> dict[str, str]:
        found = {name: x.replace("b", "s") for name, x in super().labels().items()}
        found |= {"query": "th.", "starts": "t"}
        return {name: found[name] for name in self.arrays()}

    def attend(self, a: Arrays, mask: Any = None, **more: Any) -> Any:
        names = {"key_scale": "key_scale", "value_scale": "value_scale", "sinks": "sinks"}
        names |= {"starts": "kv_starts", "drafts": "draft_mask", "num_drafts": "num_drafts"}
        given = {names[n]: x for n, x in a.items() if n in names} | self.static()
        arrays = [a.get(n) for n in ("query", "key", "value", "lengths", "table", "cu_q_lens")]
        return packax.ragged_paged_attention(
            *arrays, num_seqs=a["num_seqs"], return_lse=True, **given
        )

    def padded(self, a: Arrays) -> tuple[Arrays, np.ndarray]:
        """The operands with the tokens of each sequence in a row of a batch, at its end, and the
        indices of those tokens in the step, or -1."""
        ends = np.where(np.arange(self.batch) < a["num_seqs"], a["cu_q_lens"][1:], 0)
        counts = np.where(ends > 0, ends - a["cu_q_lens"][:-1], 0)
        width = max(counts.max(), 1)
        index = ends[:, None] - width + np.arange(width)
        index = np.where(np.arange(width) >= width - counts[:, None], index, -1)
        some = index[..., None, None] >= 0
        found = a | {"query": np.where(some, a["query"][index], 0)}
        if "starts" in a:
            found["starts"] = np.where(index >= 0, a["starts"][index], 0)
        return found, index

    def references(self, a: Arrays, tf32: bool = False) -> Any:
        padded, index = self.padded(a)
        tokens, heads, _ = a["query"].shape
        found = []
        for x in super().references(padded, tf32):
            out = np.zeros((tokens, heads, x["out"].shape[3]))
            lse = np.full((tokens, heads), -np.inf)
            out[index[index >= 0]] = x["out"][index >= 0]
            lse[index[index >= 0]] = x["lse"].swapaxes(1, 2)[index >= 0]
            found.append({"out": out, "lse": lse.T})
        return found


def impossible(entry: int | None, **fields: Any) -> tuple[DecodeCall, Arrays, np.ndarray]:
    """A call, its operands, and the rows that must be NaN: a table entry (None: the number of
    pages) that all rows of a sequence attend to, one for later rows, and a length beyond the cache.
    """
    call = DecodeCall(cache="pages", page=8, rows="12", heads="8/2", **fields)
    a = call.arrays(lengths=np.int32([72, 44, 73, 20]))
    a["table"][0, 3] = a["table"][1, 5] = len(a["key"]) if entry is None else entry
    lost = np.zeros((4, 12), bool)
    lost[0] = lost[1, 8:] = lost[2, 11] = True  # the rows of sequence 1 are at 32 to 43
    return call, a, lost


IMPOSSIBLE = (-1, None, 2**31 - 1, -(2**31))


def parse(text: str) -> Any:
    """The call that prints as this text."""
    from calls import Call

    fields: dict[str, Any] = dict(x.split("=") for x in text.split(",") if "=" in x)
    fields |= {n: int(fields[n]) for n in ("batch", "blocks", "page") if n in fields}
    kinds = {"decode": DecodeCall, "ragged": RaggedCall}
    return kinds.get(text.split(",")[0], Call)(**fields)
