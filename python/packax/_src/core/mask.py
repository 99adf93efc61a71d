"""`AttentionMask`, a mask for all layers and both passes, and `FIELDS`, the table of its arrays.

A mask with a sharding or a context plan is a `ContextMask` (core/context_mask.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.sharding import PartitionSpec as P

from packax._src.core.arguments import NotAnArray, PublicNames, page
from packax._src.core.schema import OPERANDS
from packax._src.core.sharding import AttentionSharding
from packax._src.core.spec import ONE_BLOCK, MaskMode

_MOST_PAIRS = 1 << 24
_BUILT_FROM = (  # indexed by mask_mode
    "ranges of keys, without documents",
    "documents",
    "documents with positions that have an upper limit, as of causal",
    "documents with positions that have two limits, as of a window",
)


Axes = tuple[str, ...]
Pass = Literal["forward", "backward"]


class Field(NamedTuple):
    """An array of a mask. `axes` and `passes` are as in schema.py."""

    name: str
    axes: str
    passes: str = ""

    @property
    def block_sparse(self) -> bool:
        """Whether only masks with block lists (block_sparse(...) and trees) have it."""
        return "H" in self.axes

    def axes_at(self, mask_mode: MaskMode) -> str:
        """The letters of the axes. With both position limits, q_pos has an axis for them."""
        two_limits = self.name == "q_pos" and mask_mode == MaskMode.BOTH_LIMITS
        return "B.r" if two_limits else self.axes

    def dims(
        self, mask_mode: MaskMode, batch: Axes, context: Axes, heads: Axes = ()
    ) -> tuple[Axes, ...]:
        """The mesh axes of each array axis, without trailing axes that are never sharded."""
        over = {"B": batch, "H": heads, "r": context, ".": ()}
        return tuple(over[axis] for axis in self.axes_at(mask_mode).rstrip("."))


FIELDS = {x.name: Field(x.name, x.axes, x.passes) for x in OPERANDS if x.fold == "mask"}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AttentionMask(NotAnArray, metaclass=PublicNames):
    """What `create_attention_mask` returns: a pytree of int32 arrays, linear in the length.

    (Block masks and trees also store lists of blocks.) It can be passed through jit, scan, remat
    and shard_map. Every layer uses it, in both passes. The first axis of every leaf is the batch,
    or 1 if all rows of the batch share the array. For `vmap` over the batch of a model, pass
    `in_axes=mask.vmap_axes()`, or 0 if all leaves have the batch. For shard_map, pass the spec of
    the batch if the mask has a batch, or `mask.sharding.mask_specs(mask)` if the mask was built
    with a sharding. The page "The mask format" of the documentation describes the leaves; do not
    modify them.
    """

    public = ("as_array", "vmap_axes")
    arrays: ClassVar[dict[str, Field]] = FIELDS

    # Arrays, in the order of `Operands`.
    kv_start: jax.Array  # (Bm, Sq)
    kv_end: jax.Array
    q_ids: jax.Array | None
    kv_ids: jax.Array | None
    q_pos: jax.Array | None
    kv_pos: jax.Array | None
    q_blocks: jax.Array  # (Bm, 5, blocks of 64)
    q_order: jax.Array  # (Bm, tiles of 128 rows)
    q_order_192: jax.Array
    kv_blocks: jax.Array
    kv_order: jax.Array
    # For block_sparse(...): the block mask as bits, (Bp, H, NQ, words), and each tile's block list.
    block_mask: jax.Array | None = None
    q_block_lists: jax.Array | None = None
    kv_block_lists: jax.Array | None = None

    q_len: int
    kv_len: int
    mask_mode: MaskMode
    block_size: tuple[int, int] | None = None
    # A bound on the keys that a row attends to: a power of two from LEAST_ROW_KEYS to
    # MOST_ROW_KEYS, or 0 if unknown or larger. It only chooses kernels. Rounded, so that masks of
    # windows of similar sizes share a compiled program.
    row_keys: int = 0
    # The expression as text, for `repr`. It is not part of the pytree: masks of windows of several
    # sizes share a compiled program.
    expression: str | None = dataclasses.field(default=None, init=False)

    def __repr__(self) -> str:
        """Two lines: the sizes, then the expression, or what the arrays show of it if a
        transformation such as jit made the mask."""
        if not all(hasattr(x, "shape") for x in (self.kv_start, *jax.tree.leaves(self))):
            fields = ((x.name, getattr(self, x.name)) for x in dataclasses.fields(self))
            return f"AttentionMask({', '.join(f'{name}={x!r}' for name, x in fields)})"
        leaves = jax.tree.leaves(self)
        shape = self.kv_start.shape
        batch = "no batch axis" if len(shape) < 2 else f"batch {shape[0]}"
        size = 4 * sum(math.prod(x.shape) for x in leaves)
        held = f"{size:,} bytes" if isinstance(size, int) else "symbolic lengths"
        return (
            f"<AttentionMask: {batch}, {self.q_len} queries, {self.kv_len} keys, {held}\n"
            f" built from {'; '.join(self._described())}>"
        )

    def _described(self) -> list[str]:
        """The expression, or what the arrays show of it, and how the rows are split."""
        if self.expression is not None:
            return [self.expression]
        if self.block_size == ONE_BLOCK:
            return ["a tree"]
        blocks = [] if self.block_mask is None else [f"block_sparse of blocks {self.block_size}"]
        return [_BUILT_FROM[self.mask_mode], *blocks]

    @property
    def sharding(self) -> AttentionSharding | None:
        """The sharding with which the mask was built."""
        return None

    @property
    def fetched(self) -> int:
        """The number of keys that a rank fetches from other ranks in one pass, for logs."""
        return 0

    def __hash__(self) -> int:
        raise TypeError(
            "an AttentionMask has no hash, because it holds arrays: it cannot be a static argument "
            "of jit, or a key of a dict. Pass it as an ordinary argument (it is a pytree), or "
            "build it inside the function from arrays that are arguments"
        )

    def as_array(self) -> jax.Array:
        """The mask as a dense boolean array, which is quadratic in the length: for small lengths.

        Returns:
            bool, (B, Sq, Skv), or with a block mask per head (B, H, Sq, Skv): whether query i
            attends to key j. If a plan permutes the queries, they are in permuted order.

        Raises:
            ValueError: more than 2**24 query-key pairs (4096 x 4096).

        Examples:
            >>> packax.create_attention_mask(packax.causal(), q_len=2, kv_len=2).as_array()
            Array([[[ True, False],
                    [ True,  True]]], dtype=bool)
        """
        mask = self.with_batch()
        rows, keys = mask.kv_start.shape[-1], self.kv_len
        if not is_symbolic_dim(rows * keys) and rows * keys > _MOST_PAIRS:
            raise ValueError(
                f"as_array would make {rows} x {keys} booleans, but makes at most {_MOST_PAIRS}, "
                "which is 4096 x 4096: use a mask of smaller lengths"
            )
        index = jnp.arange(keys, dtype=jnp.int32)[None, None]
        allowed = (mask.kv_start[..., None] <= index) & (index < mask.kv_end[..., None])
        if mask.mask_mode >= MaskMode.IDS:
            assert mask.q_ids is not None
            ids = mask.q_ids if mask.kv_ids is None else mask.kv_ids
            allowed &= mask.q_ids[..., None] == ids[:, None]
        if mask.mask_mode >= MaskMode.UPPER_LIMIT:
            assert mask.q_pos is not None
            positions = mask.q_pos if mask.kv_pos is None else mask.kv_pos
            highest = mask.q_pos if mask.mask_mode == MaskMode.UPPER_LIMIT else mask.q_pos[:, 0]
            allowed &= positions[:, None] <= highest[..., None]
            if mask.mask_mode == MaskMode.BOTH_LIMITS:
                allowed &= mask.q_pos[:, 1, :, None] <= positions[:, None]
        if mask.block_mask is None:
            return allowed
        assert mask.block_size is not None
        row, column = (
            jnp.arange(n, dtype=jnp.int32) // size
            for n, size in zip((rows, keys), mask.block_size, strict=True)
        )
        words = jnp.take(jnp.take(mask.block_mask, row, axis=2), column // 32, axis=3)
        of_heads = (words >> (column % 32).reshape(1, 1, 1, -1)) & 1 != 0
        return allowed[:, None] & of_heads if of_heads.shape[1] > 1 else allowed & of_heads[:, 0]

    def vmap_axes(self) -> AttentionMask:
        """`in_axes` for a vmap over the batch: 0 for arrays with a batch, None for shared ones.

        They are for models that are written for one row of a batch, as in Equinox. Inside the vmap
        the mask has no batch axis, and query, key and value need a batch of one, as in
        `query[None]`.

        Examples:
            >>> out = jax.vmap(attend, in_axes=(0, 0, 0, mask.vmap_axes()))(query, key, value, mask)
        """
        batch = self.kv_start.shape[0]
        return jax.tree.map(lambda x: 0 if x.shape[0] == batch > 1 else None, self)

    def with_batch(self) -> AttentionMask:
        """The mask with a batch axis of size 1 wherever vmap removed the batch axis."""
        restored: dict[str, Any] = {
            name: array[None]
            for name, array in self._arrays()
            if array.ndim == len(self.arrays[name].axes_at(self.mask_mode)) - 1
        }
        return dataclasses.replace(self, **restored) if restored else self

    def operands(self, direction: Pass) -> dict[str, jax.Array]:
        """The arrays that this pass reads, by name, in the order of `FIELDS`."""
        arrays = {
            name: getattr(self, name)
            for name, field in FIELDS.items()
            if direction[0] in field.passes
        }
        # In self-attention, None stands for the ids and positions of the rows.
        for name, row_name in (("kv_ids", "q_ids"), ("kv_pos", "q_pos")):
            arrays[name] = arrays[row_name] if arrays[name] is None else arrays[name]
        return {name: x for name, x in arrays.items() if x is not None}

    def specs(
        self, spec: Callable[..., Any], batch: Axes, context: Axes, heads: Axes
    ) -> AttentionMask:
        """The mask with a spec in place of every array: `spec`, called with the axes' mesh axes.

        Batch and head axes of size 1 are not sharded.
        """

        def of(name: str, x: Any) -> Any:
            own_heads = heads if self.arrays[name].block_sparse and x.shape[1] > 1 else ()
            return spec(*self._dims(name, batch if x.shape[0] != 1 else (), context, own_heads))

        return dataclasses.replace(self, **{name: of(name, x) for name, x in self._arrays()})

    def _dims(self, name: str, batch: Axes, context: Axes, heads: Axes) -> tuple[Axes, ...]:
        return self.arrays[name].dims(self.mask_mode, batch, context, heads)

    def _arrays(self) -> list[tuple[str, Any]]:
        """(name, array) for the arrays that are present."""
        arrays = ((name, getattr(self, name)) for name in self.arrays)
        return [(name, x) for name, x in arrays if hasattr(x, "ndim")]


def _serialized(static: Any) -> bytes:
    """The static fields of a mask or an expression as bytes, for jax.export."""
    if any(is_symbolic_dim(x) for x in static):
        raise NotImplementedError(
            "a mask of symbolic lengths cannot be an argument of an exported program, because its "
            "lengths are not those of the caller's mask: build the mask in the program, or pass "
            f"its leaves: see {page('Transformations')}"
        )
    return json.dumps(static, default=_plain).encode()


def _plain(sharding: Any) -> Any:
    """An AttentionSharding as a dict that json can store."""
    if sharding.mesh is not None:
        raise NotImplementedError(
            "a mask whose sharding holds a mesh cannot be an argument of an exported program: "
            "leave mesh= out of AttentionSharding, and set the mesh with jax.set_mesh(mesh)"
        )
    return {"query": tuple(sharding.query), "key_value": tuple(sharding.key_value)}


def _deserialized(static: bytes) -> Any:
    def whole(x: Any) -> Any:
        return tuple(map(whole, x)) if isinstance(x, list) else x

    def field(x: Any) -> Any:
        if not isinstance(x, dict):
            return whole(x)
        return AttentionSharding(**{name: P(*whole(spec)) for name, spec in x.items()})

    return tuple(map(field, json.loads(static)))


def register(mask_type: type[AttentionMask], parts: tuple[str, ...] = ()) -> None:
    """Makes the class a pytree of its arrays and its parts."""
    data = [*mask_type.arrays, *parts]
    fields = (x.name for x in dataclasses.fields(mask_type) if x.init)
    register_pytree(mask_type, data, [name for name in fields if name not in data])


def register_pytree(cls: type, data: list[str], static: list[str]) -> None:
    """Makes a dataclass a pytree with these fields, also for jax.export."""
    jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=static)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"packax.{cls.__name__}",
        serialize_auxdata=_serialized,
        deserialize_auxdata=_deserialized,
    )


register(AttentionMask)
