"""`AttentionMask`: the arrays of docs/design.md as a pytree, and how jax.export writes it."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.export
from jax.export import is_symbolic_dim


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "q_lo",
        "q_hi",
        "q_ids",
        "q_pos",
        "kv_ids",
        "kv_pos",
        "q_blocks",
        "kv_blocks",
        "q_order",
        "q_order_192",
        "kv_order",
        "kv_plan",
        "map_bits",
        "q_entries",
        "kv_entries",
    ],
    meta_fields=["q_len", "kv_len", "element_test", "context", "shards", "block_size"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask:
    """What `create_attention_mask` returns: a pytree of int32 arrays, O(S) in memory, or O(blocks).

    It crosses jit, scan, remat and shard_map, and serves every layer, forward and backward. The
    first axis of every leaf is the batch, or 1 (one mask for all rows of the batch, or one map of
    blocks), so under
    shard_map a mask with a batch takes the batch's spec; a mask for a context-parallel sharding
    takes `sharding.mask_specs(mask)`. The leaves are those of docs/design.md, section "The mask
    that create_attention_mask returns"; they are not meant to be written.
    """

    q_lo: jax.Array
    q_hi: jax.Array
    q_ids: jax.Array | None
    q_pos: jax.Array | None
    kv_ids: jax.Array | None
    kv_pos: jax.Array | None
    q_blocks: jax.Array
    kv_blocks: jax.Array
    q_order: jax.Array
    q_order_192: jax.Array
    kv_order: jax.Array
    q_len: int
    kv_len: int
    element_test: int
    kv_plan: jax.Array | None = None
    context: tuple[str, ...] = ()
    shards: int = 1
    map_bits: jax.Array | None = None
    q_entries: jax.Array | None = None
    kv_entries: jax.Array | None = None
    block_size: tuple[int, int] | None = None

    def operands(self) -> tuple[jax.Array, ...]:
        """The mask operands, eleven, and those of a map of blocks behind them (partition.py)."""

        # Operands that are not there are never read: q_lo stands in, so that nothing is made.
        def first(*arrays: jax.Array | None) -> jax.Array:
            return next(x for x in arrays if x is not None)

        return (
            self.q_lo,
            self.q_hi,
            first(self.q_ids, self.q_lo),
            first(self.kv_ids, self.q_ids, self.q_lo),
            first(self.q_pos, self.q_lo),
            first(self.kv_pos, self.q_pos, self.q_lo),
            self.q_blocks,
            self.q_order,
            self.q_order_192,
            self.kv_blocks,
            self.kv_order,
            *(x for x in (self.map_bits, self.q_entries, self.kv_entries) if x is not None),
        )


def _serialized(static: Any) -> bytes:
    """An AttentionMask's static fields, for jax.export."""
    if any(is_symbolic_dim(x) for x in static):
        raise NotImplementedError(
            "a mask of symbolic lengths can not be an argument of an exported program, because its "
            "lengths are not those of the mask that a caller has: build the mask in the program, "
            "or pass its leaves (docs/transformations.md)"
        )
    return json.dumps(static).encode()


def _deserialized(static: bytes) -> Any:
    return tuple(tuple(x) if isinstance(x, list) else x for x in json.loads(static))


jax.export.register_pytree_node_serialization(
    AttentionMask,
    serialized_name="packax.AttentionMask",
    serialize_auxdata=_serialized,
    deserialize_auxdata=_deserialized,
)
