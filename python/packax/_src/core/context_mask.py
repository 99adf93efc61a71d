"""`ContextMask`, an `AttentionMask` with what a sharding or a context plan adds to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from packax._src.core.mask import FIELDS, AttentionMask, Axes, Field, register
from packax._src.core.sharding import AttentionSharding
from packax._src.core.spec import MaskMode


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ContextMask(AttentionMask):
    """A mask whose rows are split over ranks or permuted by a plan. Its fields are described in the
    page "The mask format" of the documentation."""

    arrays: ClassVar[dict[str, Field]] = FIELDS | {  # no kernel reads the additional ones
        name: Field(name, axes)
        for name, axes in (("kv_plan", "B.."), ("plan_mismatch", "B"), ("halos_suffice", "B"))
    }

    # If a plan permutes the keys: their order and its inverse, (Bp, 2, chunks).
    kv_plan: jax.Array | None = None
    # The parts of the mask, for local plans and halos. With a local plan, a shared part has the
    # rows and keys of documents that are split over all ranks, or over the ranks of a host. The
    # private part has all rows of the rank, and the rank's keys.
    shared_parts: tuple[ContextMask, ...] = ()
    private_part: ContextMask | None = None
    # (B,), 1: the plan was made from other segment ids, so results are NaN. None: known to match.
    plan_mismatch: jax.Array | None = None
    # (1,), 1: ranks fetch halos; 0: they gather all keys. None: decided statically by `halo`.
    halos_suffice: jax.Array | None = None

    sharding: AttentionSharding | None = None
    shards: int = 1  # the pieces into which the context axes of `sharding` cut the rows
    permuted: bool = False  # whether a plan permuted the rows
    # For a part: the first context axis of each gather of its keys. (): its keys are not gathered.
    gathers: tuple[int, ...] | None = None
    # The fields of context.halo.Halo: which keys next to its chunks a rank fetches. None: no halos.
    halo: tuple[Any, ...] | None = None
    fetched: int = 0  # keys that a rank fetches from other ranks in one pass, for logs

    @staticmethod
    def of(mask: AttentionMask, **changes: Any) -> ContextMask:
        """The mask, if necessary as a ContextMask, with these fields changed."""
        if not isinstance(mask, ContextMask):
            fields = (x.name for x in dataclasses.fields(mask) if x.init)
            mask = ContextMask(**{name: getattr(mask, name) for name in fields})
        return dataclasses.replace(mask, **changes)

    @property
    def parts(self) -> tuple[ContextMask, ...]:
        """The private part, then the shared ones; empty without parts."""
        return () if self.private_part is None else (self.private_part, *self.shared_parts)

    def _described(self) -> list[str]:
        texts = super()._described()
        if self.shards > 1 and self.sharding is not None:
            texts.append(f"queries in {self.shards} pieces over {self.sharding.query[1]!r}")
        if self.permuted:
            texts.append(f"queries{'' if self.kv_plan is None else ' and keys'} permuted by a plan")
        if self.private_part is not None and self.halo is None:
            shared = " and ".join(str(x.kv_len) for x in self.shared_parts) or "0"
            texts.append(f"{shared} keys are attended by more than one rank")
        if self.fetched:
            texts.append(f"a rank fetches {self.fetched} keys of others")
        return texts

    def with_batch(self) -> ContextMask:
        return self._with_parts(super().with_batch(), ContextMask.with_batch)

    def without_halos(self) -> ContextMask:
        """The same mask without halos: ranks gather all keys instead."""
        if self.halo is None:
            return self
        all_others = self.kv_len // self.shards * (self.shards - 1)
        no_parts: dict[str, Any] = {"private_part": None, "shared_parts": (), "halo": None}
        return dataclasses.replace(self, **no_parts, halos_suffice=None, fetched=all_others)

    def specs(
        self, spec: Callable[..., Any], batch: Axes, context: Axes, heads: Axes
    ) -> ContextMask:
        whole = super().specs(spec, batch, context, heads)
        return self._with_parts(whole, lambda part: part.specs(spec, batch, context, heads))

    def _dims(self, name: str, batch: Axes, context: Axes, heads: Axes) -> tuple[Axes, ...]:
        return dims_of(name, self.gathers, self.mask_mode, batch, context, heads)

    def _with_parts(self, whole: Any, function: Callable[[ContextMask], Any]) -> Any:
        """`whole` with the function applied to each part of this mask."""
        if not self.parts:
            return whole
        private, *shared = map(function, self.parts)
        return dataclasses.replace(whole, private_part=private, shared_parts=tuple(shared))


register(ContextMask, parts=("shared_parts", "private_part"))


def dims_of(
    name: str, gathers: tuple[int, ...] | None, mask_mode: MaskMode, batch: Axes, context: Axes,
    heads: Axes = (),
) -> tuple[Axes, ...]:  # fmt: skip
    """`Field.dims` for an array of a whole mask (`gathers` None), or of a part, whose gathers begin
    at the context axes `gathers`.

    Key arrays of parts differ between groups of ranks that gather separately, so they are sharded
    over the axes before the first gather, and over all context axes if nothing is gathered.
    """
    like = {"kv_ids": "kv_start", "kv_pos": "kv_start", "kv_plan": "q_blocks"}
    if gathers is not None and name in like:
        name, context = like[name], context[: gathers[0]] if gathers else context
    return ContextMask.arrays[name].dims(mask_mode, batch, context, heads)
