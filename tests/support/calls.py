"""`Call`: one call of attention, its operands, the pairs that it attends, and its reference.

A call has one value of each feature below. The pairs are computed here from the definition of each
mask, not by the package's `as_array`.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import packax
import philox

Arrays = dict[str, Any]
BIASES = {  # the axes of a bias; "c": one for each two rows of a batch of four
    "pairs": "bhqk", "keys": "...k", "rows": "b.qk", "heads": ".h.k", "shared": ".hqk",
    "groups": "chqk",
}  # fmt: skip
RATE, CAP, BLOCK = 0.25, 2.0, (3, 5)
IDS = (-1, 0, 1, 2, 7, 1025, 2**31 - 1, -(2**31))

# name: the expression, from the arrays; and whether position i attends to position j.
INTERVALS: dict[str, tuple[Callable[[Arrays], Any], Callable[..., Any]]] = {
    "full": (lambda a: packax.full(), lambda i, j, a: (i == i) & (j == j)),
    "causal": (lambda a: packax.causal(), lambda i, j, a: j <= i),
    "offset": (
        lambda a: packax.causal(_number(a["offset"])),
        lambda i, j, a: j <= i + a["offset"][:, None, None],
    ),
    "window": (
        lambda a: packax.sliding_window(5, 2),
        lambda i, j, a: (i - 5 <= j) & (j <= i + 2),
    ),
    "left": (lambda a: packax.sliding_window(window=9), lambda i, j, a: (i - 9 < j) & (j <= i)),
    "chunked": (
        lambda a: packax.causal() & packax.chunked(6),
        lambda i, j, a: (j <= i) & (j // 6 == i // 6),
    ),
    "prefix": (
        lambda a: packax.prefix(_number(a["lengths"])),
        lambda i, j, a: (j <= i) | (j < a["lengths"][:, None, None]),
    ),
    "union": (
        lambda a: (packax.causal() & packax.chunked(8)) | packax.sliding_window(4),
        lambda i, j, a: (j <= i) & ((j // 8 == i // 8) | (i - j <= 4)),
    ),
    "spans": (
        lambda a: packax.masks.spans(a["spans"], packax.sliding_window(4)),
        lambda i, j, a: (i - 4 <= j) & (j <= i) | _same_span(a),
    ),
}


def _number(x: Any) -> Any:
    """One for the whole batch is given without an axis."""
    return x[0] if x.shape[0] == 1 else x


def _same_span(a: Arrays) -> np.ndarray:
    """(B, S, S): both tokens are in the same run of equal span ids and equal document ids."""
    spans = a["spans"]
    ids = np.broadcast_to(a.get("ids", np.int32(0)), spans.shape)
    changes = (np.diff(spans, axis=1) != 0) | (np.diff(ids, axis=1) != 0)
    run = np.pad(np.cumsum(changes, 1), ((0, 0), (1, 0)))
    return (run[:, :, None] == run[:, None]) & (spans != -1)[:, :, None]


def _same_document(a: Arrays) -> np.ndarray:
    keys = a.get("kv_ids", a["ids"])
    return (a["ids"][:, :, None] == keys[:, None]) & (a["ids"] != -1)[:, :, None]


def _in_range(a: Arrays) -> np.ndarray:
    j = np.arange(a["key"].shape[1])
    return (a["lo"][..., None] <= j) & (j < a["hi"][..., None])


def _in_block(a: Arrays) -> np.ndarray:
    lengths = zip(("query", "key"), BLOCK, strict=True)
    i, j = (np.arange(a[name].shape[1]) // n for name, n in lengths)
    return a["blocks"][:, :, i[:, None], j]


def _on_path(a: Arrays) -> np.ndarray:
    """Each token's segment and its ancestors, by walking up."""
    rows = []
    for ids, parents in zip(
        a["segments"],
        np.broadcast_to(a["parents"], (len(a["segments"]), a["parents"].shape[1])),
        strict=True,
    ):
        path = np.zeros((len(parents) + 1,) * 2, bool)  # the last row is that of padding
        for n in range(len(parents)):
            at = n
            while at != -1:
                path[n, at] = True
                at = parents[at]
        rows.append(path[np.ix_(ids, ids)])
    return np.stack(rows)


def _in_answer(a: Arrays) -> np.ndarray:
    groups, answers = a["groups"], a["answers"]
    same = (groups[:, :, None] == groups[:, None]) & (groups != -1)[:, :, None]
    return same & ((answers == -1)[:, None] | (answers[:, :, None] == answers[:, None]))


def _documents(a: Arrays) -> Any:
    names = {"positions": "positions", "kv_ids": "kv_segment_ids", "kv_positions": "kv_positions"}
    return packax.documents(a["ids"], **{given: a[n] for n, given in names.items() if n in a})


def _tree(a: Arrays) -> Any:
    return packax.masks.tree(a["segments"], a["parents"])


def _blocks(a: Arrays) -> Any:
    return packax.masks.block_sparse(a["blocks"], BLOCK)


# name: the expression, the pairs, and the names of the arrays.
SELECTORS: dict[str, tuple[Callable[[Arrays], Any] | None, Any, tuple[str, ...]]] = {
    "none": (None, lambda a: np.bool_(True), ()),
    "documents": (_documents, _same_document, ("ids",)),
    "positions": (_documents, _same_document, ("ids", "positions")),
    "kv ids": (_documents, _same_document, ("ids", "kv_ids")),
    "ranges": (lambda a: packax.masks.ranges(a["lo"], a["hi"]), _in_range, ("lo", "hi")),
    "block mask": (_blocks, _in_block, ("blocks",)),
    "blocks and documents": (
        lambda a: _blocks(a) & _documents(a),
        lambda a: _in_block(a) & _same_document(a)[:, None],
        ("blocks", "ids"),
    ),
    "tree": (_tree, _on_path, ("segments", "parents")),
    "tree and documents": (
        lambda a: _tree(a) & _documents(a),
        lambda a: _on_path(a) & _same_document(a),
        ("segments", "parents", "ids"),
    ),
    "shared prefix": (
        lambda a: packax.masks.shared_prefix(a["groups"], a["answers"]),
        _in_answer,
        ("groups", "answers"),
    ),
}
TREES = ("tree", "tree and documents", "shared prefix")

FEATURES: dict[str, tuple[str, ...]] = {
    "function": ("flash_attention", "jax.nn"),
    "interval": tuple(INTERVALS),
    "selector": tuple(SELECTORS),
    "rows": ("own masks", "one mask"),
    "heads": ("4/2", "4/4", "4/1"),
    "dims": ("8x8", "16x8", "8x12"),
    "lengths": ("33x33", "165x165", "22x34", "34x22"),
    "dtype": ("float32", "bfloat16", "float16"),
    "scale": ("default", "negative", "array"),
    "cap": ("none", "soft cap"),
    "bias": ("none", "alibi", *BIASES),
    "sinks": ("none", "sinks"),
    "dropout": ("none", "dropout"),
    "mask": ("expression", "built", "stacked"),
    "order": ("any", "deterministic"),
    "ranks": (
        *("2", "4", "data", "keys of all heads", "levels", "levels reversed", "explicit"),
        *("shard_map", "shard_map of a mask", "vmap", "axes of one", "context of one"),
        *("keys in order", "one device", "shard_batch", "one explicit axis"),
        "shard_map of some axes",
    ),
}
SUBJECT = {name: values[0] for name, values in FEATURES.items()}
TENSORS = {"query": "bqhd", "key": "bkgd", "value": "bkge", "dout": "bqhe", "dlse": "bhq"}
LABELS = {  # the axes of each array: batch, queries, keys, heads, key/value heads; none: "."
    **TENSORS, "scale": "", "seed": "", "sinks": "h", "slopes": "h", "offset": "b", "lengths": "b",
    "spans": "bq", "ids": "bq", "positions": "bq", "kv_ids": "bk", "kv_positions": "bk",
    "lo": "bq", "hi": "bq", "blocks": "bh..", "segments": "bq", "parents": "b.", "groups": "bq",
    "answers": "bq", "bias": "bhqk", "pairs": "bhqk",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of flash_attention, or with a dense mask of the function for jax.nn's calls.

    Prints as the features that differ from the first of each."""

    function: str = "flash_attention"
    interval: str = "full"
    selector: str = "none"
    rows: str = "own masks"
    heads: str = "4/2"
    dims: str = "8x8"
    lengths: str = "33x33"
    dtype: str = "float32"
    scale: str = "default"
    cap: str = "none"
    bias: str = "none"
    sinks: str = "none"
    dropout: str = "none"
    mask: str = "expression"
    order: str = "any"
    ranks: str = "2"  # of the properties of context parallelism: tests/table/ranks.py
    batch: int = 2

    features_of = FEATURES

    def __post_init__(self) -> None:
        if self.bias == "groups":
            object.__setattr__(self, "batch", {2: 4, 3: 6}.get(self.batch, self.batch))

    def __str__(self) -> str:
        fields = dataclasses.asdict(self)
        given = [f"{name}={fields[name]}" for name in FEATURES if fields[name] != SUBJECT[name]]
        return ",".join(given) or "full"

    def features(self) -> Iterator[tuple[str, str]]:
        yield from ((name, getattr(self, name)) for name in FEATURES)

    def invalid(self) -> str | None:
        """Why there is no such call."""
        cross = self.sizes()[0] != self.sizes()[1]
        if self.function == "jax.nn":
            names = "dims", "scale", "cap", "sinks", "dropout", "mask", "order"
            others = any(getattr(self, name) != SUBJECT[name] for name in names)
            if others or self.bias not in ("none", "pairs"):
                return "jax.nn's function has no such option"
        placed = self.selector in (*TREES, "positions")
        if self.interval == "spans" and (cross or placed or self.selector == "kv ids"):
            return "spans are for self-attention, and their pairs by positions are in tests/masks"
        if cross and self.selector in TREES:
            return "a tree is for self-attention"
        if self.interval == "offset" and placed:
            return "an offset with positions is an error"
        if self.selector == "shared prefix" and self.interval == "offset":
            return "an offset with a tree is an error"
        return None

    def sizes(self) -> tuple[int, int]:
        q_len, kv_len = map(int, self.lengths.split("x"))
        return q_len, kv_len

    def with_multiple(self, of: int) -> Call:
        """Lengths that are multiples: those that a mesh or a plan divides."""
        return dataclasses.replace(
            self, lengths="x".join(str(-(-n // of) * of) for n in self.sizes())
        )

    def longer(self) -> Call:
        """The same call with other sizes."""
        lengths = "x".join(str(n + 7) for n in self.sizes())
        return dataclasses.replace(self, batch=3, lengths=lengths)

    def names(self) -> list[str]:
        """The arrays of the call; first those that it is differentiable in."""
        optional = {
            "scale": self.scale == "array",
            "sinks": self.sinks != "none",
            "slopes": self.bias == "alibi",
            "bias": self.bias in BIASES,
            "seed": self.dropout != "none",
            "offset": self.interval == "offset",
            "lengths": self.interval == "prefix",
            "spans": self.interval == "spans",
        }
        names = [*TENSORS, *(name for name, given in optional.items() if given)]
        names += SELECTORS[self.selector][2]
        names += ["pairs"] * (self.function == "jax.nn")
        cross = self.sizes()[0] != self.sizes()[1]
        if cross and "ids" in names and "kv_ids" not in names:
            names.append("kv_ids")
        if cross and self.selector == "positions":
            names.append("kv_positions")
        return names

    def differentiable(self) -> list[str]:
        return [n for n in self.names() if n in (*dense.OF_ROWS, "query", "key", "value", "bias")]

    def arrays(self, seed: int = 0) -> Arrays:
        """The operands in numpy. Other seeds give other values of the same shapes."""
        q_len, kv_len = self.sizes()
        rng = np.random.default_rng([seed, zlib.crc32(str(self).encode())])
        heads, kv_heads = map(int, self.heads.split("/"))
        qk_dim, v_dim = map(int, self.dims.split("x"))
        sizes = {"b": self.batch, "q": q_len, "k": kv_len, "h": heads, "g": kv_heads}
        sizes |= {"d": qk_dim, "e": v_dim, "c": self.batch // 2}
        batch = 1 if self.rows == "one mask" else self.batch
        longest = max(q_len, kv_len)
        ids, places = _runs(rng, batch, longest), np.cumsum(rng.integers(0, 3, (batch, longest)), 1)
        spans = _runs(rng, batch, q_len)
        groups, answers = _groups(rng, batch, q_len)
        segments, parents = _trees(rng, batch, q_len)
        lo = rng.integers(-3, kv_len, (batch, q_len))
        of_bias = BIASES.get(self.bias, "")
        bias = rng.standard_normal([sizes.get(n, 1) for n in of_bias])
        if of_bias:
            bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
        if "q" in of_bias and q_len > 5:
            bias[:, :, 5] = -np.inf  # a row without keys
        blocks = [-(-n // m) for n, m in zip((q_len, kv_len), BLOCK, strict=True)]
        own = heads if self.selector == "block mask" else 1
        drawn = {
            "scale": np.float32(0.3), "seed": np.int32(seed), "spans": spans,
            "sinks": rng.standard_normal(heads), "slopes": 0.5 ** (1 + rng.permutation(heads)),
            "offset": rng.integers(-3, 6, batch), "lengths": rng.integers(0, q_len, batch),
            "ids": ids[:, :q_len], "positions": places[:, :q_len], "kv_ids": ids[:, :kv_len],
            "kv_positions": places[:, :kv_len], "lo": lo,
            "hi": lo + rng.integers(-2, kv_len, lo.shape), "segments": segments,
            "blocks": rng.random((batch, own, *blocks)) < 0.6, "parents": parents,
            "groups": groups, "answers": answers, "bias": bias,
        }  # fmt: skip
        for name, axes in TENSORS.items():
            drawn[name] = rng.standard_normal([sizes[n] for n in axes])
        if self.selector == "kv ids" and q_len == kv_len:
            drawn["kv_ids"] = np.where(np.arange(kv_len) % 4 == 1, -1, np.roll(ids, 3, 1))
        given = {name: drawn[name] for name in self.names() if name != "pairs"}
        of = dict.fromkeys(TENSORS, self.dtype) | {"dlse": "float32", "scale": "float32"}
        of |= {"sinks": "float32", "slopes": "float32", "bias": self.dtype, "blocks": "bool"}
        a = {n: np.asarray(x).astype(jnp.dtype(of.get(n, "int32"))) for n, x in given.items()}
        if self.function == "jax.nn":
            pairs = np.array(self.defined(a))
            pairs[..., 0] = True  # jax.nn gives a row without keys the mean of all values
            if "bias" in a:
                a["bias"] = np.where(np.isfinite(a["bias"]), a["bias"], -3).astype(self.dtype)
            a["pairs"] = pairs
        return a

    def labels(self) -> dict[str, str]:
        """The axes of each array, by LABELS; "." where the size is 1, or for no named axis."""
        shapes = {name: x.shape for name, x in self.arrays().items()}
        return {
            name: "".join(
                at if n > 1 or at == "g" else "." for at, n in zip(LABELS[name], shape, strict=True)
            )
            for name, shape in shapes.items()
        }

    def expression(self, a: Arrays) -> Any:
        made = INTERVALS[self.interval][0](a)
        selector = SELECTORS[self.selector][0]
        return made if selector is None else made & selector(a)

    def built(self, a: Arrays, **options: Any) -> Any:
        """The mask, or the second of a stack, whose first has other arrays if it may."""
        build = functools.partial(
            packax.create_attention_mask, q_len=a["query"].shape[1], kv_len=a["key"].shape[1]
        )
        mask = build(self.expression(a), **options)
        if self.mask != "stacked":
            return mask
        alike = "block" in self.selector or self.selector in TREES or options.get("plan")
        other = dataclasses.replace(self, interval="full").expression(a) if alike else packax.full()
        if "ids" in a and not alike:
            other = packax.documents(a["ids"], kv_segment_ids=a.get("kv_ids", a["ids"]))
        return packax.masks.stack_masks([build(other, **options), mask])[jnp.int32(1)]

    def static(self) -> dict[str, Any]:
        """The keyword arguments that are not arrays."""
        given: dict[str, Any] = {"deterministic": self.order == "deterministic"}
        if self.scale == "negative":
            given["scale"] = -0.4
        if self.cap != "none":
            given["soft_cap"] = CAP
        return given

    def attend(self, a: Arrays, mask: Any = None, places: Any = None, **more: Any) -> Any:
        """(out, lse, top), or (out,). `places`: the positions of queries and keys for ALiBi, if the
        sequence is in another order."""
        given = {name: a[name] for name in ("scale", "sinks", "bias") if name in a}
        if "pairs" in a:
            tensors = a["query"], a["key"], a["value"]
            return (packax.dot_product_attention(*tensors, a.get("bias"), a["pairs"]),)
        if "slopes" in a:
            positions = self.places(a) if places is None else places
            given["bias"] = packax.alibi(
                a["slopes"],
                positions=positions and positions[0],
                kv_positions=positions and positions[1],
            )
        if "seed" in a:
            given |= {"dropout_rate": RATE, "dropout_key": jax.random.key(a["seed"])}
        if mask is None:
            as_it_is = self.mask == "expression" or "sharding" in more
            mask = self.expression(a) if as_it_is else self.built(a)
        options = self.static() | given | more
        return packax.flash_attention(
            a["query"], a["key"], a["value"], mask, return_lse=True, return_max_logits=True,
            **options,
        )  # fmt: skip

    def places(self, a: Arrays) -> Any:
        """The positions that ALiBi gets."""
        if "positions" not in a:
            return None
        return a["positions"], a.get("kv_positions", a["positions"])

    def step(self, a: Arrays, attend: Any = None, **more: Any) -> dict[str, Any]:
        """The results and all gradients of a call, named as `dense` names them."""
        attend = functools.partial(attend or self.attend, **more)
        operands = {name: a[name] for name in self.differentiable()}
        results, back = jax.vjp(lambda x: attend(a | x), operands)
        named = dict(zip(("out", "lse", "top"), results, strict=False))
        given = {"out": a["dout"], "lse": a["dlse"]}
        (gradients,) = back(
            tuple(jnp.asarray(given.get(n, jnp.zeros_like(x)), x.dtype) for n, x in named.items())
        )
        return named | {"d" + name: x for name, x in gradients.items()}

    def allowed(self, a: Arrays) -> np.ndarray:
        """The attended pairs, (B or 1, H or 1, Sq, Skv)."""
        return a["pairs"] if "pairs" in a else self.defined(a)

    def defined(self, a: Arrays) -> np.ndarray:
        """The pairs of the expression, from the definitions."""
        q_len, kv_len = a["query"].shape[1], a["key"].shape[1]
        i, j = np.arange(q_len)[None, :, None], np.arange(kv_len)[None, None]
        selected = np.asarray(SELECTORS[self.selector][1](a))
        if self.selector in TREES:
            path = _in_answer(a) if self.selector == "shared prefix" else _on_path(a)
            depth = np.tril(path, -1).sum(-1)
            i, j = depth[:, :, None], depth[:, None]
        if "positions" in a:
            i, j = a["positions"][:, :, None], a.get("kv_positions", a["positions"])[:, None]
        limits = INTERVALS[self.interval][1](i, j, a)
        limits = limits[:, None] if selected.ndim == 4 else limits
        return dense.four_axes(limits & selected)

    def options(self, a: Arrays) -> dict[str, Any]:
        """The options of `dense`."""
        index = [np.arange(a[name].shape[1])[None] for name in ("query", "key")]
        found: dict[str, Any] = {"places": self.places(a) or index}
        if self.cap != "none":
            found["soft_cap"] = CAP
        if "seed" in a:
            shape = (len(a["query"]), a["query"].shape[2], *(len(x[0]) for x in index))
            found["factors"] = philox.factors(jax.random.key(int(a["seed"])), RATE, shape)
        return found

    def operands(self, a: Arrays) -> Arrays:
        """The arrays of `dense`."""
        scale = -0.4 if self.scale == "negative" else a["query"].shape[-1] ** -0.5
        names = {*TENSORS, *self.differentiable()}
        if "pairs" in a:
            a = a | {"dlse": np.zeros_like(a["dlse"])}
        return {"scale": np.float64(scale)} | {name: a[name] for name in names}

    def references(self, a: Arrays) -> Any:
        """The results in float64, and those of plain attention in the dtype of the call."""
        options = self.options(a)
        return dense.true_and_plain(self.operands(a), self.allowed(a), self.dtype, **options)

    @property
    def factor(self) -> float:
        """The accepted error, in errors of plain attention: among many draws, some exceed 2."""
        return 8 if self.dtype == "float32" else 4

    def wrong(self, got: dict[str, Any], a: Arrays) -> list[str]:
        """How results differ from the reference."""
        got = {name: np.asarray(x) for name, x in got.items()}
        return dense.close(got, *self.references(a), self.factor)


def _runs(rng: Any, batch: int, length: int) -> np.ndarray:
    """Runs of ids; some reappear, some are padding."""
    rows = []
    for _ in range(batch):
        values = rng.choice(IDS, length)
        rows.append(np.repeat(values, rng.integers(1, max(length // 3, 2), length))[:length])
    return np.stack(rows)


def _groups(rng: Any, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of a prompt and answers, with padding at the end."""
    groups, answers = np.full((2, batch, length), -1)
    for b in range(batch):
        at, group = 0, 0
        while at < length - 3:
            for answer in range(-1, 3):
                size = int(rng.integers(1, 6))
                part = slice(at, min(at + size, length - 3))
                groups[b, part], answers[b, part] = group, answer
                at += size
            group += 1
    return groups, answers


def _trees(rng: Any, batch: int, length: int, count: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Random trees in depth-first order, with padding anywhere."""
    parents = np.full((batch, count), -1)
    for b in range(batch):
        path = [0]
        for n in range(1, count):
            path = path[: int(rng.integers(0, len(path) + 1))]
            parents[b, n] = path[-1] if path else -1
            path.append(n)
    segments = np.sort(rng.integers(0, count, (batch, length)), 1)
    return np.where(rng.random((batch, length)) < 0.1, -1, segments), parents
