"""The attention of public models, each as a batch of one training or prefill step.

A row attends to one range of keys, so `row_ranges` defines the mask for packax, for the float32
reference and for the number of attended pairs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from lib.cases import document_lengths, drawn_lengths
from lib.output import picked

Kind = Literal["full", "causal", "window", "both_sides"]


@dataclasses.dataclass(frozen=True)
class ModelCase:
    name: str
    group: str
    batch: int
    seq: int  # of queries
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    kind: Kind = "causal"
    keys: int = 0  # 0: as many as queries
    v_dim: int = 0  # of values and output; 0: head_dim
    window: int = 0  # keys per row; with "both_sides" the keys before and after the row's own
    split: tuple[int, ...] = ()  # the lengths of packed documents
    shortest: int = 0  # batch rows have between this many keys and all of them, then padding
    sinks: bool = False
    bias: bool = False  # an array, (1, heads, seq, keys), without a gradient

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def kv_len(self) -> int:
        return self.keys or self.seq

    @property
    def offset(self) -> int:
        """The cached keys before the first query's own."""
        return self.kv_len - self.seq if self.kind != "full" else 0

    @property
    def lengths(self) -> list[int]:
        return list(self.split) or [self.seq]

    @property
    def documents(self) -> int:
        return len(self.lengths)

    def key_lengths(self) -> np.ndarray:
        """The keys of each batch row, int32."""
        least = self.shortest or self.kv_len
        return np.linspace(least, self.kv_len, self.batch).astype(np.int32)

    def segment_ids(self) -> np.ndarray:
        ids = np.repeat(np.arange(self.documents, dtype=np.int32), self.lengths)
        return np.broadcast_to(ids, (self.batch, self.seq)).copy()

    def row_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each row attends to, and the key after the last, (batch, seq)."""
        own = np.arange(self.seq) + self.offset
        lo, hi = np.zeros(self.seq, int), np.full(self.seq, self.kv_len)
        if self.split:
            ends = np.cumsum(self.lengths)
            lo, hi = (np.repeat(x, self.lengths) for x in (ends - self.lengths, ends))
        if self.kind in ("causal", "window"):
            hi = np.minimum(hi, own + 1)
        if self.kind == "window":
            lo = np.maximum(lo, own + 1 - self.window)
        if self.kind == "both_sides":
            lo, hi = np.maximum(lo, own - self.window), np.minimum(hi, own + self.window + 1)
        return np.broadcast_to(lo, (self.batch, self.seq)), np.minimum(
            hi, self.key_lengths()[:, None]
        )

    @functools.cached_property
    def area(self) -> int:
        """The attended pairs of one head in the whole batch."""
        lo, hi = self.row_ranges()
        return int(np.sum(hi - lo, dtype=np.int64))

    def flops(self, what: str) -> float:
        """Two products forward, five backward; two operations per element of a pair."""
        qk, v = self.head_dim, self.value_dim
        return 2.0 * self.heads * self.area * (qk + v if what == "fwd" else 3 * qk + 2 * v)

    def expression(self) -> Any:
        """The mask in packax."""
        import packax

        masks = {
            "full": packax.full,
            "causal": lambda: packax.causal(self.offset),
            "window": lambda: packax.sliding_window(self.window - 1),
            "both_sides": lambda: packax.sliding_window(self.window, self.window),
        }
        found = masks[self.kind]()
        if self.split:
            found = found & packax.documents(self.segment_ids())
        if self.shortest:
            ends = np.broadcast_to(self.key_lengths()[:, None], (self.batch, self.seq))
            found = found & packax.masks.ranges(np.zeros_like(ends), ends)
        return found

    def sink_logits(self) -> np.ndarray:
        return np.linspace(-1, 4, self.heads, dtype=np.float32)

    def tables(self) -> dict[str, np.ndarray]:
        """The arrays that `scores` reads, of the first batch row."""
        lo, hi = self.row_ranges()
        return {"lo": lo[0], "hi": hi[0]}

    def scores(self, s: Any, h: Any, i: Any, j: Any, tables: Mapping[str, Any]) -> Any:
        """Like `Case.scores` in cases.py."""
        import jax.numpy as jnp

        if self.bias:
            s = s + tables["bias"][0, h, i, j].astype(s.dtype)
        return jnp.where((j >= tables["lo"][i]) & (j < tables["hi"][i]), s, -jnp.inf)

    def sink(self, h: Any, s: Any) -> Any:
        import jax.numpy as jnp

        if not self.sinks:
            return s[..., :0]
        return jnp.broadcast_to(jnp.asarray(self.sink_logits())[h][:, None], (*s.shape[:2], 1))


def _cases(group: str, rows: dict[str, tuple[Any, ...] | dict[str, Any]]) -> tuple[ModelCase, ...]:
    return tuple(
        ModelCase(name, group, *row[:5], **dict(row[5:]))  # type: ignore[arg-type]
        for name, row in rows.items()
    )


DOCUMENTS = tuple(document_lengths(32768, 12))
DRAWN = drawn_lengths(16384, 1000)
# 16k patches of 24 images with different sizes
IMAGES = (256, 1024, 576, 768, 400, 900, 1200, 484, 625, 1024, 729, 324, 1156, 841, 576, 961, 256,
    676, 784, 529, 441, 1089, 361, 404)  # fmt: skip
FULL, CAUSAL = ("kind", "full"), ("kind", "causal")


def _window(size: int) -> tuple[tuple[str, Any], ...]:
    return (("kind", "window"), ("window", size))


# name: batch, queries, heads, key/value heads, head dim, then other fields
LANGUAGE = _cases("language", {
    "gpt2_256": (64, 256, 16, 16, 64),
    "gpt2_512": (64, 512, 16, 16, 64),
    "gpt2_medium_1k": (32, 1024, 16, 16, 64),
    "gpt2_1k": (16, 1024, 12, 12, 64),
    "gpt2_xl_1k": (8, 1024, 25, 25, 64),
    "pythia_6.9b_2k": (4, 2048, 32, 32, 128),
    "phi2_2k": (4, 2048, 32, 32, 80),
    "phi3_mini_4k": (4, 4096, 32, 32, 96),
    "gptj_6b_2k": (4, 2048, 16, 16, 256),
    "falcon_7b_2k": (4, 2048, 71, 1, 64),
    "llama3.2_1b_4k": (4, 4096, 32, 8, 64),
    "llama3_8b_2k": (4, 2048, 32, 8, 128),
    "llama3_8b_8k": (1, 8192, 32, 8, 128),
    "llama3_70b_8k": (1, 8192, 64, 8, 128),
    "qwen2.5_7b_4k": (2, 4096, 28, 4, 128),
    "qwen3_0.6b_2k": (8, 2048, 16, 8, 128),
    "qwen3_embedding_256": (64, 256, 16, 8, 128),
    "gemma3_4b_8k": (1, 8192, 8, 4, 256),
    "gemma3_4b_window1k_8k": (1, 8192, 8, 4, 256, *_window(1024)),
    "mistral_7b_window4k_16k": (1, 16384, 32, 8, 128, *_window(4096)),
    "gpt_oss_8k": (1, 8192, 64, 8, 64, ("sinks", True)),
    "gpt_oss_window128_8k": (1, 8192, 64, 8, 64, *_window(128), ("sinks", True)),
    "gpt_oss_window128_32k": (1, 32768, 64, 8, 64, *_window(128), ("sinks", True)),
    "window128_8k_d64": (1, 8192, 64, 8, 64, *_window(128)),
    "window512_32k_d64": (1, 32768, 64, 8, 64, *_window(512)),
    "deepseek_v3_mla_4k": (2, 4096, 16, 16, 192, ("v_dim", 128)),
})  # fmt: skip
PACKED = _cases("packed", {
    "llama3_8b_packed_32k": (1, 32768, 32, 8, 128, ("split", DOCUMENTS)),
    "llama3.2_1b_packed_16k": (1, 16384, 32, 8, 64, ("split", DRAWN)),
    "gpt2_packed_16k": (1, 16384, 12, 12, 64, ("split", DRAWN)),
    "gemma3_4b_packed_16k": (1, 16384, 8, 4, 256, ("split", DRAWN)),
    "qwen2_vl_images_16k": (1, sum(IMAGES), 16, 16, 80, FULL, ("split", IMAGES)),
})  # fmt: skip
PREFILL = _cases("prefill", {
    "llama3_8b_prefill_2k_on_14k": (1, 2048, 32, 8, 128, ("keys", 16384)),
    "llama3_8b_prefill_512_on_8k": (1, 512, 32, 8, 128, ("keys", 8704)),
    "llama3.2_1b_prefill_256_on_4k": (4, 256, 32, 8, 64, ("keys", 4352)),
})  # fmt: skip
ENCODERS = _cases("encoders", {
    "bert_large_512": (64, 512, 16, 16, 64, FULL),
    "bert_large_padded_512": (64, 512, 16, 16, 64, FULL, ("shortest", 128)),
    "bert_base_128": (256, 128, 12, 12, 64, FULL),
    "modernbert_window128_8k": (1, 8192, 12, 12, 64, ("kind", "both_sides"), ("window", 64)),
    "t5_base_encoder_512": (32, 512, 12, 12, 64, FULL, ("bias", True)),
    "t5_base_cross_114": (64, 114, 12, 12, 64, FULL, ("keys", 512)),
    "whisper_large_encoder": (8, 1500, 20, 20, 64, FULL),
    "whisper_large_decoder": (16, 448, 20, 20, 64),
    "whisper_large_cross": (16, 448, 20, 20, 64, FULL, ("keys", 1500)),
    "perceiver_256_8k": (8, 256, 16, 16, 64, FULL, ("keys", 8192)),
    "blip2_qformer": (64, 32, 12, 12, 64, FULL, ("keys", 257)),
})  # fmt: skip
VISION = _cases("vision", {
    "vit_b16_224": (64, 197, 12, 12, 64, FULL),
    "vit_l16_224": (64, 197, 16, 16, 64, FULL),
    "vit_l16_224_without_class": (64, 196, 16, 16, 64, FULL),
    "vit_h14_224": (64, 256, 16, 16, 80, FULL),
    "vit_g14_224": (64, 256, 16, 16, 88, FULL),
    "dinov2_g14_518": (8, 1370, 24, 24, 64, FULL),
    "sam_vit_h_1024": (2, 4096, 16, 16, 80, FULL),
    "siglip_so400m_224": (64, 256, 16, 16, 72, FULL),
    "siglip_so400m_378": (32, 729, 16, 16, 72, FULL),
    "siglip_so400m_728": (32, 728, 16, 16, 72, FULL),
})  # fmt: skip
DIFFUSION = _cases("diffusion", {
    "sdxl_self_4k": (8, 4096, 10, 10, 64, FULL),
    "sdxl_self_1k": (8, 1024, 20, 20, 64, FULL),
    "sdxl_cross_4k_77": (8, 4096, 10, 10, 64, FULL, ("keys", 77)),
    "sdxl_cross_1k_77": (8, 1024, 20, 20, 64, FULL, ("keys", 77)),
    "dit_xl2_256": (64, 256, 16, 16, 72, FULL),
    "dit_xl2_512": (16, 1024, 16, 16, 72, FULL),
    "dit_xl2_4k": (4, 4096, 16, 16, 72, FULL),
    "pixart_cross_4k_120": (8, 4096, 16, 16, 72, FULL, ("keys", 120)),
    "sd3_medium_1024": (2, 4250, 24, 24, 64, FULL),
    "flux_1024": (1, 4608, 24, 24, 128, FULL),
    "cogvideox_5b": (1, 17776, 48, 48, 64, FULL),
    "wan2.1_14b": (1, 32760, 40, 40, 128, FULL),
    "wan2.1_14b_cross_512": (1, 32760, 40, 40, 128, FULL, ("keys", 512)),
})  # fmt: skip
CASES = (*LANGUAGE, *PACKED, *PREFILL, *ENCODERS, *VISION, *DIFFUSION)


def select(names: str | None) -> list[ModelCase]:
    """The cases with these names, or of these groups; None: all."""
    return picked(CASES, names, lambda case: case.group)
