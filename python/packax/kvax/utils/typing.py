"""Types of arrays, specs, and the mask that `create_attention_mask` returns."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax

import packax

DeviceArray: TypeAlias = jax.Array
PRNGKey: TypeAlias = jax.Array
Specs: TypeAlias = Any  # (batch, sequence, heads, head dim): None, mesh axes or tuples of them

FlattenedAttentionMask = tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]


class RowMasks(NamedTuple):
    """packax's masks, one for each way in which `flash_attention` may compare.

    XLA removes those that a program does not use.
    """

    by_position: packax.AttentionMask
    by_index: packax.AttentionMask  # for assume_sequential_positions
    by_permuted_index: packax.AttentionMask | None  # the same, if rows are permuted


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class AttentionMask:
    """Bounds of blocks, half-open, in blocks of the inner side for every block of the outer side.

    Blocks in [lower, upper) are attended, and in [lower_full, upper_full) every pair is; lower <=
    lower_full <= upper_full <= upper. All int32. Outer is the query side, (B, 1, query blocks), for
    the forward and dQ masks; for the dK/dV mask it is the key side, (B, context shards, key
    blocks), and the bounds count the query blocks of each shard. It is a pytree: it can be passed
    through jit, scan and remat.

    Attributes:
        row_masks: the masks that packax uses; only in the forward mask. None in a mask built from
            four arrays: `flash_attention` then builds them from its ids and positions, in every
            layer.
        block_sizes: (query block, key block) of the bounds; None if unknown.
    """

    lower_bounds: DeviceArray
    upper_bounds: DeviceArray
    lower_full_bounds: DeviceArray
    upper_full_bounds: DeviceArray
    row_masks: RowMasks | None = None
    block_sizes: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})

    def flatten(self) -> FlattenedAttentionMask:
        """The four bounds, in the order of the fields."""
        return (
            self.lower_bounds,
            self.upper_bounds,
            self.lower_full_bounds,
            self.upper_full_bounds,
        )

    @classmethod
    def unflatten(cls, flatten_mask: FlattenedAttentionMask) -> AttentionMask:
        """The mask with these four bounds."""
        lower, upper, lower_full, upper_full = flatten_mask
        return cls(lower, upper, lower_full, upper_full)
