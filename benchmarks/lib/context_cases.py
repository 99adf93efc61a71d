"""Cases and schemes of benchmarks/context.py: rows of 12 documents, of lengths as in corpora, and
with windows; plans, head groups, and kvax's scheme."""

from __future__ import annotations

import dataclasses

import numpy as np

from lib.cases import Case, document_lengths

MEANS = (500, 2000, 8000)
BOARD = Case("docs12_128k_d128", 1, 131072, 32, 8, 128, 12)
QUICK = Case("quick", 1, 1024, 8, 8, 16, 6)


def lognormal_lengths(total: int, mean: int, seed: int = 0) -> list[int]:
    """Log-normal lengths (sigma 1.2) with about this mean; the last one is cut at the row's end."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        length = int(np.clip(rng.lognormal(np.log(mean) - 0.72, 1.2), 1, total))
        lengths.append(min(length, left))
    return lengths


def _rows(totals: tuple[int, ...], means: tuple[int, ...], *heads: int) -> tuple[Case, ...]:
    """For each row length, a case with 12 documents and one for each mean."""
    found = []
    for total in totals:
        splits = {"docs12": document_lengths(total, 12)}
        splits |= {f"mean{mean}": lognormal_lengths(total, mean) for mean in means}
        for name, split in splits.items():
            size = f"{total >> 10}k"
            found.append(Case(f"{name}_{size}", 1, total, *heads, len(split), split=tuple(split)))
    return tuple(found)


def _windows(totals: tuple[int, ...], sizes: tuple[int, ...], *heads: int) -> tuple[Case, ...]:
    """A case with 12 documents for each row length and window."""
    return tuple(
        Case(f"window{size}_{total >> 10}k", 1, total, *heads, 12, window=size)
        for total in totals
        for size in sizes
    )


CASES = _rows((131072, 524288), MEANS, 32, 8, 128)
CASES += _windows((131072, 524288), (128, 512, 1024, 4096), 32, 8, 128)
QUICK_CASES = _rows((1024, 2048), (40, 300), 8, 8, 16) + _windows((1024,), (100,), 8, 8, 16)


@dataclasses.dataclass(frozen=True)
class Scheme:
    plan: str | None
    groups: int | None = None  # gather_head_groups; None: the default
    kvax: bool = False  # moves data as kvax does
    of_causal: bool = False  # uses the plan for the mask without the window

    @property
    def name(self) -> str:
        if self.kvax:
            return "kvax-like"
        groups = "" if self.groups is None else f", groups {self.groups}"
        causal = ", of the causal mask" if self.of_causal else ""
        return f"{self.plan or 'none'}{causal}{groups}"


PLANS = (Scheme(None), Scheme("zigzag"), Scheme("balanced"), Scheme("local"))
SCHEMES = (*PLANS, Scheme("balanced", 1), Scheme("zigzag", kvax=True))
OF_WINDOWS = (*PLANS, Scheme("balanced", of_causal=True))
