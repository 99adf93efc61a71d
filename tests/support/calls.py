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
from packax._src.ops import xla_tiles

Arrays = dict[str, Any]
BIASES = {  # the axes of a bias; "c": one for each two rows of a batch of four
    "pairs": "bhqk", "keys": "...k", "rows": "b.qk", "heads": ".h.k", "shared": ".hqk",
    "groups": "chqk",
}  # fmt: skip
RATE, CAP = 0.25, 2.0
IDS = (-1, 0, 1, 2, 7, 1025, 2**31 - 1, -(2**31))

Pair = tuple[Callable[[Arrays], Any], Callable[..., Any]]
Selector = tuple[Callable[[Arrays], Any] | None, Any, tuple[str, ...]]
# name: the expression, from the arrays; and whether position i attends to position j.
SIZED: dict[str, Callable[..., Pair]] = {  # a name with numbers, such as "window 60 25"
    "window": lambda left, right: (
        lambda a: packax.sliding_window(left, right),
        lambda i, j, a: (i - left <= j) & (j <= i + right),
    ),
    "chunked": lambda size: (
        lambda a: packax.causal() & packax.chunked(size),
        lambda i, j, a: (j <= i) & (j // size == i // size),
    ),
    "union": lambda size, left: (
        lambda a: (packax.causal() & packax.chunked(size)) | packax.sliding_window(left),
        lambda i, j, a: (j <= i) & ((j // size == i // size) | (i - j <= left)),
    ),
}
INTERVALS: dict[str, Pair] = {
    "full": (lambda a: packax.full(), lambda i, j, a: (i == i) & (j == j)),
    "causal": (lambda a: packax.causal(), lambda i, j, a: j <= i),
    "offset": (
        lambda a: packax.causal(_number(a["offset"])),
        lambda i, j, a: j <= i + a["offset"][:, None, None],
    ),
    "window": SIZED["window"](5, 2),
    "left": (lambda a: packax.sliding_window(window=9), lambda i, j, a: (i - 9 < j) & (j <= i)),
    "chunked": SIZED["chunked"](6),
    "prefix": (
        lambda a: packax.prefix(_number(a["lengths"])),
        lambda i, j, a: (j <= i) | (j < a["lengths"][:, None, None]),
    ),
    "union": SIZED["union"](8, 4),
    "spans": (
        lambda a: packax.masks.spans(a["spans"], packax.sliding_window(4)),
        lambda i, j, a: (i - 4 <= j) & (j <= i) | _same_span(a),
    ),
}


def _number(x: Any) -> Any:
    """One for the whole batch is given without an axis."""
    return x[0] if x.shape[0] == 1 else x


def _not_0(offset: np.ndarray) -> np.ndarray:
    """An expression with a number of 0 as offset is one without an offset, of another structure."""
    return np.where(offset == 0, 6, offset)


def _same_span(a: Arrays) -> np.ndarray:
    """(B, S, S): both tokens are in the same run of equal ids of spans, documents and segments."""
    spans = a["spans"]
    ids = [np.broadcast_to(a.get(n, np.int32(0)), spans.shape) for n in ("ids", "segments")]
    changes = np.any([np.diff(x, axis=1) != 0 for x in (spans, *ids)], axis=0)
    run = np.pad(np.cumsum(changes, 1), ((0, 0), (1, 0)))
    return (run[:, :, None] == run[:, None]) & (spans != -1)[:, :, None]


def _same_document(a: Arrays) -> np.ndarray:
    keys = a.get("kv_ids", a["ids"])
    return (a["ids"][:, :, None] == keys[:, None]) & (a["ids"] != -1)[:, :, None]


def _in_range(a: Arrays) -> np.ndarray:
    j = np.arange(a["key"].shape[1])
    return (a["lo"][..., None] <= j) & (j < a["hi"][..., None])


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


def _blocks(rows: int, keys: int, *names: str) -> Selector:
    """`names`: the arrays of documents."""

    def expression(a: Arrays) -> Any:
        made = packax.masks.block_sparse(a["blocks"], (rows, keys))
        return made & _documents(a) if names else made

    def pairs(a: Arrays) -> np.ndarray:
        i, j = (np.arange(a[name].shape[1]) // n for name, n in (("query", rows), ("key", keys)))
        found = a["blocks"][:, :, i[:, None], j]
        return found & _same_document(a)[:, None] if names else found

    return expression, pairs, ("blocks", *names)


BLOCK_MASK = _blocks(3, 5)
# name: the expression, the pairs, and the names of the arrays. With the rows and keys of a block:
# "block mask 64 128", "blocks and documents 64 128", "blocks and positions 64 128".
SELECTORS: dict[str, Selector] = {
    "none": (None, lambda a: np.bool_(True), ()),
    "documents": (_documents, _same_document, ("ids",)),
    "positions": (_documents, _same_document, ("ids", "positions")),
    "kv ids": (_documents, _same_document, ("ids", "kv_ids")),
    "ranges": (lambda a: packax.masks.ranges(a["lo"], a["hi"]), _in_range, ("lo", "hi")),
    "block mask": BLOCK_MASK,
    "blocks and documents": _blocks(3, 5, "ids"),
    "tree": (_tree, _on_path, ("segments", "parents")),
    "tree and documents": (
        lambda a: _tree(a) & _documents(a),
        lambda a: _on_path(a) & _same_document(a),
        ("segments", "parents", "ids"),
    ),
    "tree and blocks": (
        lambda a: _tree(a) & packax.masks.ranges(a["lo"], a["hi"]) & BLOCK_MASK[0](a),
        lambda a: (_on_path(a) & _in_range(a))[:, None] & BLOCK_MASK[1](a),
        ("segments", "parents", "lo", "hi", "blocks"),
    ),
    "shared prefix": (
        lambda a: packax.masks.shared_prefix(a["groups"], a["answers"]),
        _in_answer,
        ("groups", "answers"),
    ),
    # Ids that increase; ids and positions of any token. The table's calls have no tiles.
    "packed": (_documents, _same_document, ("ids",)),
    "any positions": (_documents, _same_document, ("ids", "positions")),
}
LONG = "packed", "any positions"
xla_tiles.SHORT = 64  # so that blockwise XLA has several tiles for 165 tokens, and one for 33
TREES = ("tree", "tree and documents", "tree and blocks", "shared prefix")

FEATURES: dict[str, tuple[str, ...]] = {
    "function": ("flash_attention", "jax.nn"),
    "interval": tuple(INTERVALS),
    "selector": tuple(name for name in SELECTORS if name not in LONG),
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


def interval_of(name: str) -> Pair:
    kind, *sizes = name.split()
    return SIZED[kind](*map(int, sizes)) if sizes else INTERVALS[name]


def selector_of(name: str) -> Selector:
    if not name[-1].isdigit():
        return SELECTORS[name]
    kind, *sizes = name.rsplit(maxsplit=2)
    names = {"block mask": (), "blocks and documents": ("ids",)}
    return _blocks(*map(int, sizes), *names.get(kind, ("ids", "positions")))


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

    Prints as the fields that are not the default. Those after `ranks` are no columns of the table,
    which has no numbers for scale, cap, interval and selector either, and few sizes."""

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
    bias_dtype: str = ""  # default: that of the tensors
    results: str = "out+lse+top"  # top: the largest logits, for which other kernels may run
    frozen: str = ""  # operands without a gradient, such as "key+value"
    implementation: str = ""

    features_of = FEATURES

    def __post_init__(self) -> None:
        if self.bias == "groups":
            object.__setattr__(self, "batch", {2: 4, 3: 6}.get(self.batch, self.batch))

    def __str__(self) -> str:
        fields = [(x.name, getattr(self, x.name), x.default) for x in dataclasses.fields(self)]
        return ",".join(f"{name}={x}" for name, x, default in fields if x != default) or "full"

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
        placed = self.selector in TREES or "positions" in self.selector
        others = "positions", "any positions", "kv ids", "shared prefix"
        if self.interval == "spans" and (cross or self.selector in others):
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

    @property
    def block(self) -> tuple[int, int]:
        """The rows and keys of a block of the block mask."""
        sizes = self.selector.split()[-2:]
        return (int(sizes[0]), int(sizes[1])) if sizes[-1].isdigit() else (3, 5)

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
        names += selector_of(self.selector)[2]
        names += ["pairs"] * (self.function == "jax.nn")
        cross = self.sizes()[0] != self.sizes()[1]
        if cross and "ids" in names and "kv_ids" not in names:
            names.append("kv_ids")
        if cross and "positions" in names:
            names.append("kv_positions")
        return names

    def differentiable(self) -> list[str]:
        return [name for name in self.parameters() if name not in self.frozen.split("+")]

    def parameters(self) -> list[str]:
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
        if self.selector == "packed":
            ids = _packed(rng, batch, longest)
        if self.selector == "any positions":
            ids, places = rng.choice(IDS[:3], ids.shape), rng.integers(-50, 50, places.shape)
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
        blocks = [-(-n // m) for n, m in zip((q_len, kv_len), self.block, strict=True)]
        own = heads if self.selector.startswith("block mask") else 1
        chosen = rng.random((batch, own, *blocks)) < 0.6
        if self.selector[-1].isdigit():  # whole tiles of rows and of keys attend to nothing
            for axis, length, of in ((2, q_len, self.block[0]), (3, kv_len, self.block[1])):
                empty = slice(length // 4 // of, length // 2 // of)
                chosen[(slice(None),) * axis + (empty,)] = False
        drawn = {
            "scale": np.float32(0.85 * qk_dim**-0.5), "seed": np.int32(seed), "spans": spans,
            "sinks": rng.standard_normal(heads), "slopes": 0.5 ** (1 + rng.permutation(heads)),
            "offset": _not_0(rng.integers(-3, 6, batch)), "lengths": rng.integers(0, q_len, batch),
            "ids": ids[:, :q_len], "positions": places[:, :q_len], "kv_ids": ids[:, :kv_len],
            "kv_positions": places[:, :kv_len], "lo": lo,
            "hi": lo + rng.integers(-2, kv_len, lo.shape), "segments": segments,
            "blocks": chosen, "parents": parents,
            "groups": groups, "answers": answers, "bias": bias,
        }  # fmt: skip
        for name, axes in TENSORS.items():
            drawn[name] = rng.standard_normal([sizes[n] for n in axes])
        if self.selector == "kv ids" and q_len == kv_len:
            drawn["kv_ids"] = np.where(np.arange(kv_len) % 4 == 1, -1, np.roll(ids, 3, 1))
        given = {name: drawn[name] for name in self.names() if name != "pairs"}
        of = dict.fromkeys(TENSORS, self.dtype) | {"dlse": "float32", "scale": "float32"}
        of |= {"sinks": "float32", "slopes": "float32", "blocks": "bool"}
        of["bias"] = self.bias_dtype or self.dtype
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
        made = interval_of(self.interval)[0](a)
        selector = selector_of(self.selector)[0]
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
        if self.scale not in ("default", "array"):
            given["scale"] = self.number
        if self.cap != "none":
            given["soft_cap"] = self.soft_cap
        if self.implementation:
            given["implementation"] = self.implementation
        wanted = self.results.split("+")
        return given | {"return_lse": "lse" in wanted, "return_max_logits": "top" in wanted}

    @property
    def number(self) -> float:
        """The scale, if it is no array."""
        if self.scale in ("default", "array"):
            return float(self.dims.split("x")[0]) ** -0.5
        return -0.4 if self.scale == "negative" else float(self.scale)

    @property
    def soft_cap(self) -> float | None:
        named = {"none": None, "soft cap": CAP}
        return named[self.cap] if self.cap in named else float(self.cap)

    def attend(self, a: Arrays, mask: Any = None, places: Any = None, **more: Any) -> Any:
        """The results. `places`: the positions of queries and keys for ALiBi, if the sequence is in
        another order."""
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
        found = packax.flash_attention(a["query"], a["key"], a["value"], mask, **options)
        return found if isinstance(found, tuple) else (found,)

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
        named = dict(zip(self.results.split("+"), results, strict=False))
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
        selected = np.asarray(selector_of(self.selector)[1](a))
        if self.selector in TREES:
            path = _in_answer(a) if self.selector == "shared prefix" else _on_path(a)
            depth = np.tril(path, -1).sum(-1)
            i, j = depth[:, :, None], depth[:, None]
        if "positions" in a:
            i, j = a["positions"][:, :, None], a.get("kv_positions", a["positions"])[:, None]
        limits = interval_of(self.interval)[1](i, j, a)
        limits = limits[:, None] if selected.ndim == 4 else limits
        return dense.four_axes(limits & selected)

    def options(self, a: Arrays) -> dict[str, Any]:
        """The options of `dense`."""
        index = [np.arange(a[name].shape[1])[None] for name in ("query", "key")]
        found: dict[str, Any] = {"places": self.places(a) or index}
        if self.cap != "none":
            found["soft_cap"] = self.soft_cap
        if "seed" in a:
            shape = (len(a["query"]), a["query"].shape[2], *(len(x[0]) for x in index))
            found["factors"] = philox.factors(jax.random.key(int(a["seed"])), RATE, shape)
        return found

    def operands(self, a: Arrays) -> Arrays:
        """The arrays of `dense`."""
        names = {*TENSORS, *self.parameters()}
        if "pairs" in a:
            a = a | {"dlse": np.zeros_like(a["dlse"])}
        return {"scale": np.float64(self.number)} | {name: a[name] for name in names if name in a}

    def references(self, a: Arrays) -> Any:
        """The results in float64, and those of plain attention in the dtype of the call."""
        options = self.options(a)
        return dense.true_and_plain(self.operands(a), self.allowed(a), self.dtype, **options)

    @property
    def factor(self) -> float:
        """The accepted error, in errors of plain attention: among many draws, some exceed 2."""
        if self.dtype == "float32":
            return 8
        return 2 if self.implementation else 4

    def wrong(self, got: dict[str, Any], a: Arrays, references: Any = None) -> list[str]:
        """How results differ from the references, by default those of the arrays. Of kernels, the
        largest logits are exact to float32, and sums over all pairs are few numbers, whose plain
        error may be small by luck."""
        got = {name: np.asarray(x) for name, x in got.items()}
        true, plain = references or self.references(a)
        if not self.implementation:
            return dense.close(got, true, plain, self.factor)
        sums = {name: got.pop(name) for name in ("dscale", "dslopes") if name in got}
        wrong = dense.close(got, true, plain, self.factor)
        wrong += dense.close(sums, true, plain, 2 * self.factor)
        if "top" in got and not np.allclose(got["top"], true["top"], rtol=1e-5, atol=1e-5):
            wrong.append("the largest logits are not exact")
        return wrong


def _runs(rng: Any, batch: int, length: int) -> np.ndarray:
    """Runs of ids; some reappear, some are padding."""
    rows = []
    for _ in range(batch):
        values = rng.choice(IDS, length)
        rows.append(np.repeat(values, rng.integers(1, max(length // 3, 2), length))[:length])
    return np.stack(rows)


def _packed(rng: Any, batch: int, length: int) -> np.ndarray:
    """Documents one after another, with padding between some of them."""
    rows = []
    for _ in range(batch):
        values = np.where(rng.random(length) < 0.3, -1, np.arange(length))
        rows.append(np.repeat(values, rng.integers(1, max(length // 2, 2), length))[:length])
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
