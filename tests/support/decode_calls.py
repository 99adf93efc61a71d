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
CAP, PAGE, BLOCKS = 2.0, 4, 9
FEATURES: dict[str, tuple[str, ...]] = {
    "cache": ("dense", "pages", "prefix of all", "prefix of pairs"),
    "numbers": ("as query", "float8", "float8 scales of heads", "float8 scales of rows"),
    "rows": ("1", "3"),
    "heads": ("4/2", "4/4", "4/1"),
    "dims": ("8x8", "16x8", "8x12"),
    "dtype": ("float32", "bfloat16", "float16"),
    "window": ("none", "left", "both"),
    "starts": ("none", "of sequences", "of rows"),
    "scale": ("default", "negative"),
    "cap": ("none", "soft cap"),
    "sinks": ("none", "sinks"),
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
]


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
        return None

    def with_multiple(self, of: int) -> DecodeCall:
        return self

    def longer(self) -> DecodeCall:
        return dataclasses.replace(self, batch=6, blocks=self.blocks + 2)

    def differentiable(self) -> list[str]:
        return []

    def arrays(self, seed: int = 0) -> Arrays:
        """The operands in numpy. Keys beyond a length are NaN, as is what no table names."""
        rng = np.random.default_rng([seed, zlib.crc32(str(self).encode())])
        heads, kv_heads = map(int, self.heads.split("/"))
        dims = [int(n) for n in self.dims.split("x")]
        rows, room = int(self.rows), self.page * self.blocks
        dtype = jnp.dtype(self.dtype)
        a: Arrays = {"query": rng.standard_normal((self.batch, rows, heads, dims[0]))}
        a["lengths"] = np.asarray([room, *rng.integers(0, room, self.batch - 1)], np.int32)
        if self.shared:
            a["lengths"] = rng.integers(20 + rows, room, self.batch).astype(np.int32)
            a["prefixes"] = rng.integers(0, 20, self.shared).astype(np.int32)
        if self.starts != "none":
            shape = (self.batch,) if self.starts == "of sequences" else (self.batch, rows)
            a["starts"] = rng.integers(-2, 9, shape).astype(np.int32)
        if self.sinks != "none":
            a["sinks"] = rng.standard_normal(heads).astype(np.float32)
        used = np.arange(room) < a["lengths"][:, None]
        caches = [rng.standard_normal((self.batch, room, kv_heads, n)) for n in dims]
        if self.shared:  # the first sequence of a group has the prefix
            each = self.batch // self.shared
            a["prefixes"] = a["prefixes"] // self.page * self.page
            common = np.arange(room) < np.repeat(a["prefixes"], each)[:, None]
            first = np.arange(self.batch) // each * each
            caches = [np.where(common[..., None, None], x[first], x) for x in caches]
        caches = [np.where(used[..., None, None], x, np.nan) for x in caches]
        if self.paged:
            pages = self.batch * self.blocks + 2
            table = rng.permutation(pages)[: self.batch * self.blocks].reshape(self.batch, -1)
            pools = [np.full((pages, self.page, kv_heads, n), np.nan) for n in dims]
            for pool, x in zip(pools, caches, strict=True):
                pool[table.ravel()] = x.reshape(-1, self.page, *x.shape[2:])
            if self.shared:
                blocks = np.repeat(a["prefixes"], each) // self.page
                own = table[first]
                table = np.where(np.arange(self.blocks) < blocks[:, None], own, table)
            beyond = np.arange(self.blocks) * self.page >= a["lengths"][:, None]
            a["table"] = np.where(beyond, rng.choice([-1, 2**31 - 1]), table).astype(np.int32)
            caches = pools
        for name, x in zip(("key", "value"), caches, strict=True):
            if self.numbers != "as query":
                shape = {"float8": (), "float8 scales of heads": (kv_heads,)}.get(
                    self.numbers, (len(x), kv_heads)
                )
                a[f"{name}_scale"] = np.exp(rng.uniform(-2, 1, shape)).astype(np.float32)
                x = np.clip(x, -400, 400).astype(jnp.float8_e4m3fn)
            a[name] = x if self.numbers != "as query" else x.astype(dtype)
        a["query"] = a["query"].astype(dtype)
        return a

    def labels(self) -> dict[str, str]:
        of_cache, rows = ("p.gd", "p") if self.paged else ("bkgd", "b")
        found = {"query": "b.hd", "key": of_cache, "value": of_cache, "lengths": "b"}
        found |= {"table": "bn", "starts": "b." if self.starts == "of rows" else "b"}
        found |= {"sinks": "h", "prefixes": "." if self.shared == 1 else "b"}
        of = {"float8": "", "float8 scales of heads": "g"}.get(self.numbers, f"{rows}g")
        found |= {"key_scale": of, "value_scale": of, "cu_q_lens": ".", "num_seqs": ""}
        return {name: found[name] for name in self.arrays()}

    def static(self) -> dict[str, Any]:
        given: dict[str, Any] = {"scale": -0.4} if self.scale == "negative" else {}
        if self.cap != "none":
            given["soft_cap"] = CAP
        if self.window != "none":
            given["window"] = (7, 0) if self.window == "left" else (7, 1)
            given["causal"] = self.window == "left"
        return given

    def attend(self, a: Arrays, mask: Any = None, **more: Any) -> Any:
        """(out, lse)."""
        names = {"key_scale": "key_scale", "value_scale": "value_scale", "sinks": "sinks"}
        names |= {"starts": "kv_starts", "table": "block_table"}
        given = {names[n]: x for n, x in a.items() if n in names} | self.static()
        tensors = a["query"], a["key"], a["value"], a["lengths"]
        if self.shared:
            return packax.decode_shared_prefix(*tensors, a["prefixes"], return_lse=True, **given)
        return packax.decode_attention(*tensors, return_lse=True, **given)

    def step(self, a: Arrays, attend: Any = None, **more: Any) -> dict[str, Any]:
        return dict(zip(("out", "lse"), (attend or self.attend)(a, **more), strict=True))

    def allowed(self, a: Arrays) -> np.ndarray:
        """(B, 1, Sq, room), as the docstring of decode_attention defines it."""
        rows, room = a["query"].shape[1], self.page * self.blocks
        length, j = a["lengths"][:, None, None], np.arange(room)
        place = length - rows + np.arange(rows)[:, None]
        allowed = (j < length) & (place >= 0)
        if self.window != "both":
            allowed = allowed & (j <= place)
        if self.window != "none":
            right = 0 if self.window == "left" else 1
            allowed = allowed & (j >= place - 7) & (j <= place + right)
        if "starts" in a:
            allowed = allowed & (j >= a["starts"].reshape(self.batch, -1, 1))
        return allowed[:, None]

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

    def references(self, a: Arrays) -> Any:
        """Results in float64 and in the call's dtype."""
        caches = self.caches(a)
        scale = -0.4 if self.scale == "negative" else a["query"].shape[-1] ** -0.5
        out = np.zeros((*a["query"].shape[:3], caches["value"].shape[3]))
        operands = caches | {"query": a["query"], "scale": scale, "dout": out}
        operands |= {"sinks": a["sinks"]} if "sinks" in a else {}
        cap = {"soft_cap": CAP} if self.cap != "none" else {}
        return dense.true_and_plain(operands, self.allowed(a), self.dtype, **cap)

    def wrong(self, got: dict[str, Any], a: Arrays) -> list[str]:
        """How results differ from the reference."""
        true, plain = self.references(a)
        got = {name: np.asarray(x) for name, x in got.items()}
        return dense.close(got, true, plain, 8 if self.dtype == "float32" else 4)


@dataclasses.dataclass(frozen=True)
class RaggedCall(DecodeCall):
    """A packed step. It draws how many tokens each sequence has: `MIXES` are sizes."""

    cache: str = "pages"
    mix: str = "mixed"

    features_of = RAGGED_FEATURES
    function = "ragged"

    __str__ = DecodeCall.__str__

    def arrays(self, seed: int = 0) -> Arrays:
        a = super().arrays(seed)
        rng = np.random.default_rng([seed, zlib.crc32(str(self).encode()), 1])
        tokens, chunks = MIXES[self.mix]
        counts = rng.integers(0, 2, self.batch)
        with_chunks = rng.permutation(self.batch)[:chunks]
        counts[with_chunks] = rng.integers(0, tokens, chunks)
        last = np.minimum(np.cumsum([rng.integers(0, 2), *counts]), tokens).astype(np.int32)
        query = rng.standard_normal((tokens, *a["query"].shape[2:]))
        a |= {"query": query.astype(a["query"].dtype), "cu_q_lens": last}
        a["num_seqs"] = np.int32(rng.integers(self.batch - 1, self.batch + 1))
        if "starts" in a:
            a["starts"] = rng.integers(-2, 9, tokens).astype(np.int32)
        return a

    def labels(self) -> dict[str, str]:
        found = {name: x.replace("b", ".") for name, x in super().labels().items()}
        found |= {"query": ".h.", "starts": "."}
        return {name: found[name] for name in self.arrays()}

    def attend(self, a: Arrays, mask: Any = None, **more: Any) -> Any:
        names = {"key_scale": "key_scale", "value_scale": "value_scale", "sinks": "sinks"}
        names |= {"starts": "kv_starts"}
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

    def references(self, a: Arrays) -> Any:
        padded, index = self.padded(a)
        tokens, heads, _ = a["query"].shape
        found = []
        for x in super().references(padded):
            out = np.zeros((tokens, heads, x["out"].shape[3]))
            lse = np.full((tokens, heads), -np.inf)
            out[index[index >= 0]] = x["out"][index >= 0]
            lse[index[index >= 0]] = x["lse"].swapaxes(1, 2)[index >= 0]
            found.append({"out": out, "lse": lse.T})
        return found


def parse(text: str) -> Any:
    """The call that prints as this text."""
    from calls import Call

    fields = dict(x.split("=") for x in text.split(",") if "=" in x)
    kinds = {"decode": DecodeCall, "ragged": RaggedCall}
    return kinds.get(text.split(",")[0], Call)(**fields)
