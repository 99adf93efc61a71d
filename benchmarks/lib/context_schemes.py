"""Ways to spread a row over ranks that benchmarks/context.py times: plans, head groups, kvax's."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scheme:
    plan: str | None
    groups: int | tuple[int, ...] | None = None  # None: the default
    scheduler: bool = False  # XLA's latency-hiding one, else its default
    kvax: bool = False
    one_level: bool = False  # of a local plan, though there are hosts
    of_causal: bool = False  # under a window: planned for a model's layers without one

    @property
    def name(self) -> str:
        if self.kvax:
            return "kvax-like"
        hiding = ", latency-hiding scheduler" if self.scheduler else ""
        groups = "" if self.groups is None else f", groups {self.groups}"
        levels = ", one level" if self.one_level else ""
        causal = ", of the causal mask" if self.of_causal else ""
        return f"{self.plan or 'none'}{levels}{causal}{groups}{hiding}"


SCHEMES = (
    Scheme("balanced"),
    Scheme("zigzag"),
    Scheme(None),
    Scheme("balanced", 1),
    Scheme("balanced", 2),
    Scheme("balanced", (2, 6)),
    Scheme("balanced", (2, 4, 2)),
    Scheme("balanced", (1, 3, 4)),
    Scheme("balanced", 4),
    Scheme("balanced", (2, 6), scheduler=True),
    Scheme("local"),
    Scheme("zigzag", kvax=True),
)
PLANS = (Scheme(None), Scheme("zigzag"), Scheme("balanced"), Scheme("local"))
OF_WINDOWS = (*PLANS, Scheme("balanced", of_causal=True))
OF_HOSTS = (*PLANS, Scheme("local", 8), Scheme("local", one_level=True))
