"""`stack_masks`: masks of one sequence, stacked so that a layer selects one by its index."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.context.halo import Halo
from packax._src.core.arguments import described
from packax._src.core.context_mask import ContextMask
from packax._src.core.mask import AttentionMask
from packax._src.core.sharding import over_auto_axes, typed_axes, vary_together
from packax._src.core.spec import MaskMode

_INT32 = np.iinfo(np.int32)
Mask = TypeVar("Mask", bound=AttentionMask)
_ALIKE = (
    *("q_len", "kv_len", "sharding", "shards", "permuted", "block_size", "gathers"),
    *("halo", "fetched"),
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["masks"], meta_fields=["number"])
@dataclasses.dataclass(frozen=True, eq=False)
class MaskStack:
    """What `stack_masks` returns, a pytree. `stack[kind]` is the mask with that index, a Python or
    traced integer or bool. A traced index that is out of range selects the nearest mask.
    """

    masks: AttentionMask  # each array has an additional first axis
    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, kind: Any) -> AttentionMask:
        index = kind if isinstance(kind, jax.Array) else np.asarray(kind)
        if index.ndim or not (index.dtype == bool or jnp.issubdtype(index.dtype, np.integer)):
            raise ValueError(
                f"kind must be the index of a mask, an integer or bool, but is {described(kind)}"
            )
        if isinstance(index, np.ndarray) and not -self.number <= index < self.number:
            raise IndexError(f"kind is {kind}, but the stack has {self.number} masks")
        kind = index.astype(np.int32)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, kind, keepdims=False), self.masks
        )


def stack_masks(masks: Sequence[AttentionMask]) -> MaskStack:
    """Stacks masks of one sequence, so that layers with different masks share one compiled body.

    Use it for models whose layers alternate, for example between a window and all keys, in one
    `scan` over layers. Masks of different kinds hold different arrays; in a stack, every mask gets
    the arrays of the most general one. The results of attention do not change, bit for bit. Under
    context parallelism, layers with a window fetch only halos (the keys next to a rank's tokens),
    and other layers gather all keys. If windows differ in size, only the halos of one size are
    used, and layers with another window gather all keys, too.

    Args:
        masks: from `create_attention_mask`, with the same lengths, sharding and plan. Either all or
            none have a tree, and either all or none have a block_sparse(...), of one block size.

    Returns:
        MaskStack: `stack[kind]` is the mask of a layer, including inside `scan`.

    Raises:
        ValueError: not a sequence, no masks, or masks that differ in any of the above.

    Examples:
        >>> document = packax.documents(segment_ids)
        >>> kinds = packax.sliding_window(15) & document, packax.causal() & document
        >>> stack = packax.masks.stack_masks([packax.create_attention_mask(x) for x in kinds])
        >>> def layer(x, kind):  # the body of a scan; a model also has weights
        ...     return x + packax.flash_attention(x, x, x, stack[kind]), None
        >>> out, _ = jax.lax.scan(layer, query, jnp.array([0, 0, 1, 0, 0, 1]))
    """
    if not isinstance(masks, Iterable):
        raise ValueError(f"masks must be a sequence of masks, but is {described(masks)}")
    masks = list(masks)
    if not masks:
        raise ValueError("masks must hold at least one mask, but is empty")
    for n, mask in enumerate(masks):
        if not isinstance(mask, AttentionMask):
            raise ValueError(
                f"masks[{n}] must come from create_attention_mask, but is {described(mask)}"
            )
    on_ranks = [mask for mask in masks if isinstance(mask, ContextMask)]
    if len(on_ranks) == len(masks):
        masks = _with_same_halos(on_ranks)
    alike = _with_same_arrays(masks)
    structures: list[Any] = [jax.tree.structure(mask) for mask in alike]
    for n, other in enumerate(structures):
        if other != structures[0]:
            raise ValueError(f"masks[0] and masks[{n}] {_difference(alike[0], alike[n])}")

    def stacked(*arrays: Any) -> jax.Array:
        shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
        axes = zip(*map(typed_axes, arrays), strict=True)
        dims = [next(filter(None, of_one), ()) for of_one in axes]  # a batch of 1 has none

        def stack(*arrays: Any) -> jax.Array:
            return jnp.stack([jnp.broadcast_to(x, shape) for x in arrays])

        return over_auto_axes(stack, vary_together(*arrays), [(), *dims])

    return MaskStack(jax.tree.map(stacked, *alike), len(masks))


def _difference(one: AttentionMask, other: AttentionMask) -> str:
    for name in _ALIKE:
        x, y = (getattr(mask, name, None) for mask in (one, other))
        if x != y:
            return f"must have the same {name}, but have {x!r} and {y!r}"
    return "must have the same parts, but only one of them has a plan or a block mask"


def _with_same_arrays(masks: Sequence[Mask]) -> list[Mask]:
    """Adds to all masks the ids and positions of rows and keys that any of them has. A mask without
    ids gets one document, and one without positions gets limits that allow every position."""
    mode = max(mask.mask_mode for mask in masks)
    if any(mask.mask_mode != mode for mask in masks):
        mode = max(mode, MaskMode.IDS)
        masks = [_with_mode(mask, mode) for mask in masks]
    counts = [mask.row_keys for mask in masks]
    row_keys = 0 if 0 in counts else max(counts)
    any_kv_ids = any(mask.kv_ids is not None for mask in masks)
    any_kv_pos = any(mask.kv_pos is not None for mask in masks)
    changed: list[Any] = []
    for mask in masks:
        changes: dict[str, Any] = {"row_keys": row_keys}
        if any_kv_ids and mask.kv_ids is None:
            changes["kv_ids"] = mask.q_ids
        if any_kv_pos and mask.kv_pos is None:
            changes["kv_pos"] = mask.q_pos
        changed.append(dataclasses.replace(mask, **changes))
    parts = [x.parts for x in changed if isinstance(x, ContextMask)]
    if len(parts) < len(changed) or not all(parts) or len(set(map(len, parts))) > 1:
        return changed
    alike = zip(*map(_with_same_arrays, zip(*parts, strict=True)), strict=True)
    return [
        dataclasses.replace(mask, private_part=private, shared_parts=tuple(shared))
        for mask, (private, *shared) in zip(changed, alike, strict=True)
    ]


def _with_same_halos(masks: list[ContextMask]) -> list[ContextMask]:
    """Gives all masks parts for halos of one size: the size that saves the most fetched keys in
    total. A mask without halos, or with another size, gets parts that are never read."""
    sizes = [mask.halo and (mask.halo, _part(mask).mask_mode) for mask in masks]
    of_plan = any(mask.halo is None and mask.private_part is not None for mask in masks)
    known = {mask.halos_suffice is None for mask in masks}
    if of_plan or (len(set(sizes)) == 1 and len(known) == 1):
        return masks
    saved = {size: 0 for size in sizes if size is not None}
    for size in saved:
        saved[size] = sum(Halo(*size[0]).saved for other in sizes if other == size)
    kept = max(saved, key=lambda size: saved[size])
    like = masks[sizes.index(kept)]
    every = like.kv_len // like.shards * (like.shards - 1)
    no_rows = jax.tree.map(jnp.zeros_like, (like.private_part, like.shared_parts))

    def changed(mask: ContextMask, size: Any) -> ContextMask:
        private, shared = no_rows
        suffice = jnp.zeros(1, jnp.int32)
        if size == kept:
            private, shared = mask.private_part, mask.shared_parts
            suffice = suffice + 1 if mask.halos_suffice is None else mask.halos_suffice
        return dataclasses.replace(
            mask,
            private_part=private,
            shared_parts=shared,
            halo=like.halo,
            halos_suffice=suffice,
            fetched=every,
        )

    return [changed(mask, size) for mask, size in zip(masks, sizes, strict=True)]


def _part(mask: ContextMask) -> ContextMask:
    assert mask.private_part is not None
    return mask.private_part


def _with_mode(mask: Mask, mode: MaskMode) -> Mask:
    """The same mask in `mode`, which compares at least as much as the mask's mode."""
    own = mask.mask_mode
    if own == mode:
        return mask
    q_ids, kv_ids, q_pos, kv_pos = mask.q_ids, mask.kv_ids, mask.q_pos, mask.kv_pos
    if own == MaskMode.NO_CHECK:
        q_ids = jnp.zeros_like(mask.kv_start)
        kv_ids = jnp.zeros((*mask.kv_start.shape[:-1], mask.kv_len), jnp.int32)
    if mode >= MaskMode.UPPER_LIMIT > own:
        assert q_ids is not None
        q_pos = jnp.full_like(q_ids, _INT32.max)
        kv_pos = jnp.zeros_like(q_ids if kv_ids is None else kv_ids)
    if mode == MaskMode.BOTH_LIMITS:
        assert q_pos is not None
        kv_pos = q_pos if kv_pos is None else kv_pos  # before q_pos becomes two limits
        q_pos = jnp.stack([q_pos, jnp.full_like(q_pos, _INT32.min)], axis=1)
    return dataclasses.replace(
        mask, mask_mode=mode, q_ids=q_ids, kv_ids=kv_ids, q_pos=q_pos, kv_pos=kv_pos
    )
