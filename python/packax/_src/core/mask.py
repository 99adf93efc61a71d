"""`AttentionMask`: the arrays of docs/internals/mask_format.md as a pytree, and its export."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.export import is_symbolic_dim

_MOST_PAIRS = 1 << 24
_BUILT_FROM = (  # by element_test
    "ranges of keys, without documents",
    "documents",
    "documents with positions that have an upper limit, as of causal",
    "documents with positions that have two limits, as of a window",
)


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
    first axis of every leaf is the batch, or 1 (one mask for all rows of the batch, one map of
    blocks, one plan). `vmap` over the batch of a model takes `in_axes=mask.vmap_axes()`, or 0 where
    all leaves have the batch. Under shard_map a mask with a batch takes the batch's spec, a mask for
    a context-parallel sharding `sharding.mask_specs(mask)`. The leaves are those of
    docs/internals/mask_format.md; they are not meant to be written.
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

    def __repr__(self) -> str:
        """Sizes, and what it was built from as far as its arrays say it: two lines."""
        if not all(hasattr(x, "shape") for x in (self.q_lo, *jax.tree.leaves(self))):
            fields = ((x.name, getattr(self, x.name)) for x in dataclasses.fields(self))
            return f"AttentionMask({', '.join(f'{name}={x!r}' for name, x in fields)})"
        leaves = jax.tree.leaves(self)
        shape = self.q_lo.shape
        batch = "no batch axis" if len(shape) < 2 else f"batch {shape[0]}"
        size = 4 * sum(math.prod(x.shape) for x in leaves)
        held = f"{size:,} bytes" if isinstance(size, int) else "symbolic lengths"
        parts = [_BUILT_FROM[self.element_test]]
        if self.map_bits is not None:
            parts.append(f"block_sparse of blocks {self.block_size}")
        if self.context:
            parts.append(f"rows in {self.shards} pieces over {self.context}")
        if self.kv_plan is not None:
            parts.append("rows and keys permuted by a plan")
        return (
            f"<AttentionMask: {batch}, {self.q_len} query rows, {self.kv_len} keys, {held}\n"
            f" built from {'; '.join(parts)}>"
        )

    def as_array(self) -> jax.Array:
        """Whether query row i attends key j, as the arrays of this mask say it: for small lengths.

        Returns:
            bool, (B, Sq, Skv), with a map of blocks of heads (B, H, Sq, Skv). Rows are in the order
            of the query that the mask is for: permuted, if a plan permutes it.

        Raises:
            ValueError: more than 2**24 pairs of a row and a key (4096 x 4096): it is quadratic.
        """
        mask = self.with_batch()
        rows, keys = mask.q_lo.shape[-1], self.kv_len
        if rows * keys > _MOST_PAIRS:
            raise ValueError(
                f"as_array makes {rows} x {keys} booleans, and is for at most {_MOST_PAIRS} of them, "
                "4096 x 4096: look at a mask of smaller lengths"
            )
        index = jnp.arange(keys, dtype=jnp.int32)[None, None]
        allowed = (mask.q_lo[..., None] <= index) & (index < mask.q_hi[..., None])
        if mask.element_test >= 1:
            assert mask.q_ids is not None
            ids = mask.q_ids if mask.kv_ids is None else mask.kv_ids
            allowed &= mask.q_ids[..., None] == ids[:, None]
        if mask.element_test >= 2:
            assert mask.q_pos is not None
            places = mask.q_pos if mask.kv_pos is None else mask.kv_pos
            highest = mask.q_pos if mask.element_test == 2 else mask.q_pos[:, 0]
            allowed &= places[:, None] <= highest[..., None]
            if mask.element_test == 3:
                allowed &= mask.q_pos[:, 1, :, None] <= places[:, None]
        if mask.map_bits is None:
            return allowed
        assert mask.block_size is not None
        row, column = (
            jnp.arange(n) // size for n, size in zip((rows, keys), mask.block_size, strict=True)
        )
        words = jnp.take(jnp.take(mask.map_bits, row, axis=2), column // 32, axis=3)
        of_heads = (words >> (column % 32).reshape(1, 1, 1, -1)) & 1 != 0
        return allowed[:, None] & of_heads if of_heads.shape[1] > 1 else allowed & of_heads[:, 0]

    def vmap_axes(self) -> AttentionMask:
        """`in_axes` for a vmap over the batch: 0 for what has it, None for what all rows share.

        For models that are written for one row of a batch, as Equinox's are. Inside of the vmap the
        mask has no batch axis, and query, key and value a batch of one, as in `query[None]`:

        >>> jax.vmap(attend, in_axes=(0, 0, 0, mask.vmap_axes()))(query, key, value, mask)
        """
        batch = self.q_lo.shape[0]
        return jax.tree.map(lambda x: 0 if x.shape[0] == batch > 1 else None, self)

    def with_batch(self) -> AttentionMask:
        """With a batch of one where vmap took the batch axis."""
        ranks = dict.fromkeys(("q_blocks", "kv_blocks", "kv_plan"), 3)
        ranks |= dict.fromkeys(("map_bits", "q_entries", "kv_entries"), 4)
        if self.element_test >= 3:
            ranks["q_pos"] = 3
        lost = {
            x.name: array[None]
            for x in dataclasses.fields(self)
            if hasattr(array := getattr(self, x.name), "ndim")
            and array.ndim == ranks.get(x.name, 2) - 1
        }
        return dataclasses.replace(self, **lost) if lost else self

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
            "or pass its leaves (docs/guide/transformations.md)"
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
