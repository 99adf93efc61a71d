"""Masks and options of current models, each defined as a packax expression and per pair.

`allows(h, i, j, tables)` uses only operators and lookups, so numpy, jax and torch (FlexAttention's
mask_mod) share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lib.output import picked
from lib.packed_trees import PackedTree, binary, prompt_and_answers

Tables = Mapping[str, Any]


def causal(i: Any, j: Any, _: Tables) -> Any:
    return j <= i


def window(size: int) -> Callable[[Any, Any, Tables], Any]:
    return lambda i, j, _: (j <= i) & (i - j < size)


def chunk(size: int) -> Callable[[Any, Any, Tables], Any]:
    return lambda i, j, _: (j <= i) & (i // size == j // size)


def prefix(length: int) -> Callable[[Any, Any, Tables], Any]:
    return lambda i, j, _: (j <= i) | (j < length)


def spans(i: Any, j: Any, tables: Tables) -> Any:
    ids = tables["ids"]
    return (j <= i) | ((ids[i] == ids[j]) & (ids[i] >= 0))


def on_path(i: Any, j: Any, tables: Tables) -> Any:
    return (j <= i) & (i < tables["end"][j])


@dataclasses.dataclass(frozen=True)
class Selection:
    """A block mask that depends on data (selections.py): each block of `rows` rows selects `top`
    blocks of `keys` keys."""

    rows: int
    keys: int
    top: int
    alike: int  # the number of neighboring rows, and keys, with similar scores; 1: independent
    by_head: bool = False  # whether each head has a selection
    own: bool = True  # whether the block on the diagonal is always selected


@dataclasses.dataclass(frozen=True)
class OptionCase:
    name: str
    seq: int
    head_dim: int
    allowed: Callable[[Any, Any, Tables], Any]
    mask: Callable[[Any, Tables], Any]  # from the module packax and the tables to the expression
    heads: int = 32
    kv_heads: int = 8
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    cudnn: dict[str, Any] | None = None  # arguments for jax.nn, if it supports the mask
    selection: Selection | None = None
    tree: PackedTree | None = None
    batch: int = 1
    v_dim: int = 0  # of values and output; 0: head_dim

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.head_dim

    def tables(self) -> dict[str, np.ndarray]:
        """The arrays that `allowed` reads: those of the tree, or ids of images of 576 tokens, one
        every 1500 tokens. For a selection, selections.py adds "chosen"."""
        if self.tree is not None:
            return self.tree.tables()
        at = np.arange(self.seq)
        return {"ids": np.where(at % 1500 < 576, at // 1500, -1).astype(np.int32)}

    def allows(self, h: Any, i: Any, j: Any, tables: Tables) -> Any:
        """Whether row i of query head h attends to key j."""
        found, of = self.allowed(i, j, tables), self.selection
        if of is None:
            return found
        return found & tables["chosen"][h if of.by_head else 0, i // of.rows, j // of.keys]

    def scores(self, s: Any, h: Any, i: Any, j: Any, tables: Tables) -> Any:
        """Like `Case.scores` in cases.py, with the options of this case."""
        import jax.numpy as jnp

        if self.soft_cap is not None:
            s = self.soft_cap * jnp.tanh(s / self.soft_cap)
        if self.alibi:
            s -= jnp.asarray(self.slopes())[h] * jnp.abs(i - j)
        return jnp.where(self.allows(h, i, j, tables), s, -jnp.inf)

    def sink(self, h: Any, s: Any) -> Any:
        import jax.numpy as jnp

        if not self.sinks:
            return s[..., :0]
        return jnp.broadcast_to(jnp.asarray(self.sink_logits())[h][:, None], (*s.shape[:2], 1))

    def expression(self, tables: Tables) -> Any:
        import packax

        found, of = self.mask(packax, tables), self.selection
        if of is None:
            return found
        return found & packax.masks.block_sparse(tables["chosen"][None], (of.rows, of.keys))

    def slopes(self) -> np.ndarray:
        """ALiBi's slopes (Press et al.) if the number of heads is a power of two."""
        return (2.0 ** (-8 * (1 + np.arange(self.heads)) / self.heads)).astype(np.float32)

    def sink_logits(self) -> np.ndarray:
        return np.linspace(-1, 4, self.heads, dtype=np.float32)


def causal_mask(p: Any, _: Tables) -> Any:
    return p.causal()


def _window(size: int) -> Callable[[Any, Tables], Any]:
    return lambda p, _: p.sliding_window(size - 1)


def _dims(dim: int, v_dim: int) -> str:
    return f"{dim}v{v_dim}" if v_dim else f"d{dim}"


def _tree(name: str, tree: PackedTree, dim: int, v_dim: int = 0) -> OptionCase:
    return OptionCase(
        f"{name}_{_dims(dim, v_dim)}", tree.tokens, dim, on_path,
        lambda p, tables: p.causal() & p.masks.tree(tables["segments"], tables["parents"]),
        tree=tree, v_dim=v_dim,
    )  # fmt: skip


def _selection(name: str, selection: Selection, dim: int, v_dim: int = 0) -> OptionCase:
    """A selection joined with a causal mask of 32k tokens."""
    return OptionCase(
        f"{name}_32k_{_dims(dim, v_dim)}", 32768, dim, causal, causal_mask, selection=selection,
        v_dim=v_dim,
    )  # fmt: skip


CAUSAL = {"is_causal": True}
WINDOW = CAUSAL | {"local_window_size": (1023, 0)}
MOBA = Selection(1, 512, 3, alike=256, by_head=True)  # arXiv 2502.13189: blocks of 512, top 3
MOBA_OWN = dataclasses.replace(MOBA, alike=1)
INDEXER = Selection(
    1, 1, 2048, alike=256, own=False
)  # DeepSeek-V3.2: 2048 keys, one choice for all heads
INDEXER_64 = Selection(64, 64, 32, alike=256)  # as many keys, in blocks of 64
CASES = (
    OptionCase("window1k_32k_d64", 32768, 64, window(1024), _window(1024), cudnn=WINDOW),
    OptionCase("window1k_32k_d128", 32768, 128, window(1024), _window(1024), cudnn=WINDOW),
    OptionCase("chunk8k_64k_d128", 65536, 128, chunk(8192), lambda p,
        _: p.causal() & p.chunked(8192)),
    OptionCase("prefix8k_32k_d128", 32768, 128, prefix(8192), lambda p, _: p.prefix(8192)),
    OptionCase("spans_32k_d128", 32768, 128, spans, lambda p, tables: p.masks.spans(tables["ids"])),
    OptionCase("softcap_16k_d128", 16384, 128, causal, causal_mask, soft_cap=50.0),
    OptionCase("softcap_16k_d256", 16384, 256, causal, causal_mask, soft_cap=50.0),
    OptionCase("alibi_16k_d128", 16384, 128, causal, causal_mask, alibi=True),
    OptionCase("sinks_16k_d64", 16384, 64, causal, causal_mask, sinks=True),
    OptionCase("sinks_window128_32k_d64", 32768, 64, window(128), _window(128), sinks=True),
    _selection("moba", MOBA, 128),
    _selection("moba_own", MOBA_OWN, 128),
    _selection("indexer", INDEXER, 128),
    _selection("indexer_blocks", INDEXER_64, 128),
    *(
        _selection(name, selection, dim, v_dim)
        for dim, v_dim in ((192, 128), (256, 0))
        for name, selection in (("moba", MOBA), ("indexer_blocks", INDEXER_64))
    ),
    *(
        _tree(name, tree, dim, v_dim)
        for dim, v_dim in ((128, 0), (64, 0), (192, 128), (256, 0))
        for name, tree in (
            ("tree_4k_16x2k", prompt_and_answers(4096, 16, 2048)),
            ("tree_16k_8x1k", prompt_and_answers(16384, 8, 1024)),
            ("tree_binary6_512", binary(6, 512)),
        )
    ),
    OptionCase("causal_16k_d64", 16384, 64, causal, causal_mask, cudnn=CAUSAL),
    OptionCase("causal_16k_d128", 16384, 128, causal, causal_mask, cudnn=CAUSAL),
)  # fmt: skip


def select(names: str | None) -> list[OptionCase]:
    """The cases with these names, or of the groups `selections` and `trees`; None: all."""
    return picked(
        CASES, names, lambda case: "selections" if case.selection else "trees" if case.tree else ""
    )
