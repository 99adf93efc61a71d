"""create_attention_mask for rows that a plan permutes or a mesh divides: each rank makes the mask
of its own rows.

The expression is about whole sequences in order. Limits of places are made there, then rows are
moved and cut, and each rank derives ranges, bounds of blocks and lists from its own
(docs/guide/context_parallelism.md, "Masks").
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from packax._src.context.load_balance import take_sharded
from packax._src.core.jax_compat import vary_together
from packax._src.core.mask import FIELDS, AttentionMask
from packax._src.core.sharding import Axes
from packax._src.masks.assemble import Document, Rows, assemble, element_test_of, limits_of
from packax._src.ops.block_lists import entries, packed
from packax._src.ops.primitives import BLOCK_ARRAYS


@functools.partial(
    jax.jit,
    static_argnames=(
        *("batch", "q_len", "kv_len", "block_size", "implementation"),
        *("sharding", "layout", "permuted_keys"),
    ),
    inline=True,
)
def build_rows(
    document, interval, ranges, block_map, plan, *,
    batch, q_len, kv_len, block_size, implementation, sharding, layout, permuted_keys,
) -> AttentionMask:  # fmt: skip
    """The mask of permuted query rows, on each rank of those that it holds; arguments as build.py
    has them.
    """
    mask_batch: Axes = ()
    context: Axes = ()
    if layout is not None:
        mask_batch, context = layout.batch if batch > 1 else (), layout.context

    def place(x, *dims):
        return x if layout is None else layout.place(x, *dims)

    def pinned(x, *dims):
        """Where the mesh is not in the types: XLA may split an array that every attention then
        gathers.
        """
        if layout is None or not layout.mapped:
            return x
        spec = layout.spec(*dims)
        return jax.shard_map(
            lambda x: x,
            mesh=layout.mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names=set(layout.mapped),
        )(x)

    def keys(x):
        return place(jnp.broadcast_to(x, (batch, x.shape[1])), mask_batch)

    def rows(x):
        """From whole sequences to the rows in the plan's order: this rank's, where manual."""
        x = keys(x)
        if plan is not None:
            x = plan.permute(x)
        if layout is not None and layout.outside(context) > 1:
            own = q_len // layout.outside(context)
            x, first = vary_together(x, jax.lax.axis_index(context) * own)
            x = jax.lax.dynamic_slice_in_dim(x, first, own, axis=1)
        return place(x, mask_batch, context)

    if plan is not None:
        plan_batch = mask_batch if plan.order.shape[0] > 1 else ()
        order, inverse = (place(jnp.asarray(x), plan_batch) for x in (plan.order, plan.inverse))
        plan = dataclasses.replace(plan, order=order, inverse=inverse)

    pieces = 1 if layout is None else layout.size(context)
    static = {
        "batch": batch if layout is None else batch // layout.inside(mask_batch),
        "q_len": q_len // pieces,
        "kv_len": kv_len,
        "implementation": implementation,
    }
    mapped = layout is not None and bool(layout.mapped)

    # Intervals are about the sequence, its indices and its spans: only then rows are moved or cut.
    def limits(document, interval):
        ends = limits_of(document, interval, q_len)
        shape = static["batch"], q_len
        return [None if x is None else jnp.broadcast_to(x, shape) for x in ends]

    document = Document(*(None if x is None else keys(x) for x in document))
    if layout is not None:

        def of_leaf(x):
            return (_batch_axes(batch, mask_batch, x),) if jnp.ndim(x) else ()

        interval = jax.tree.map(lambda x: place(jnp.asarray(x), *of_leaf(x)), interval)
        if mapped:
            key_spec = layout.spec(mask_batch)
            limits = jax.shard_map(
                limits,
                mesh=layout.mesh,
                in_specs=(key_spec, jax.tree.map(lambda x: layout.spec(*of_leaf(x)), interval)),
                out_specs=key_spec,
                axis_names=set(layout.mapped),
            )
    low, high = (None if x is None else rows(x) for x in limits(document, interval))
    # Keys stay whole and in order, so they are no longer "as the query's".
    kv_ids, kv_pos = document.keys()
    level = element_test_of(document, low, high)
    held = Rows(
        None if document.q_ids is None else rows(document.q_ids),
        low,
        high,
        tuple((rows(lo), rows(hi)) for lo, hi in ranges),
    )

    whole: Any = functools.partial(assemble, level=level, **static)
    if mapped:
        row_spec = layout.spec(mask_batch, context)
        computed_here = ("q_lo", "q_hi", *BLOCK_ARRAYS, *(("q_pos",) if level >= 2 else ()))
        out_specs = {
            name: layout.spec(*FIELDS[name].dims(level, mask_batch, context))
            for name in computed_here
        }
        whole = jax.shard_map(
            whole,
            mesh=layout.mesh,
            in_specs=(row_spec, key_spec, key_spec),
            out_specs=out_specs,
            axis_names=set(layout.mapped),
        )
    computed: dict[str, Any] = {"q_pos": None, **whole(held, kv_ids, kv_pos)}
    if block_map is not None:
        if plan is not None and plan.order.shape[0] > 1:
            block_map = jnp.broadcast_to(block_map, (batch, *block_map.shape[1:]))
        heads = layout.heads if layout is not None and block_map.shape[1] > 1 else ()
        map_axes = _batch_axes(batch, mask_batch, block_map), heads
        together = q_len // (pieces if plan is None else plan.order.shape[1])
        block_map, block_size = _rows_kept_together(block_map, block_size, q_len, together)
        block_map = place(block_map, *map_axes)
        if plan is not None:
            block_map = take_sharded(plan.order, 2, block_map)
        if layout is not None and layout.outside(context) > 1:
            own = block_map.shape[2] // layout.outside(context)
            block_map, first = vary_together(block_map, jax.lax.axis_index(context) * own)
            block_map = jax.lax.dynamic_slice_in_dim(block_map, first, own, axis=2)
        lists: Any = functools.partial(
            map_arrays, block_size=block_size, q_len=static["q_len"], kv_len=kv_len
        )
        if mapped:
            map_spec = layout.spec(*map_axes, context)
            block_spec = layout.spec(*FIELDS["q_blocks"].dims(level, mask_batch, context))
            lists = jax.shard_map(
                lists,
                mesh=layout.mesh,
                in_specs=(map_spec, block_spec),
                out_specs={
                    "map_bits": map_spec,
                    **{
                        name: layout.spec(*FIELDS[name].dims(level, mask_batch, context, heads))
                        for name in ("q_entries", "kv_entries")
                    },
                },
                axis_names=set(layout.mapped),
            )
        computed |= lists(place(block_map, *map_axes, context), computed["q_blocks"])
    kv_plan = None
    if plan is not None and permuted_keys:
        kv_plan = pinned(jnp.stack([plan.order, plan.inverse], axis=1), plan_batch)
    return AttentionMask(
        **computed,
        q_ids=held.ids,
        kv_ids=None if kv_ids is None else pinned(kv_ids, mask_batch),
        kv_pos=None if kv_pos is None or level < 2 else pinned(kv_pos, mask_batch),
        q_len=q_len,
        kv_len=kv_len,
        element_test=level,
        kv_plan=kv_plan,
        sharding=sharding,
        shards=pieces,
        permuted=plan is not None,
        block_size=block_size,
    )


def _batch_axes(batch: int, mask_batch: Axes, x: Any) -> Axes:
    """The mesh axes over which the first axis of an interval's array lies."""
    return mask_batch if jnp.shape(x)[0] == batch > 1 else ()


def _rows_kept_together(
    block_map: jax.Array, block_size: tuple[int, int], q_len: int, together: int
) -> tuple[jax.Array, tuple[int, int]]:
    """A block mask, of rows that no rank and no chunk of a plan begins inside of, and its block
    size.
    """
    rows = block_size[0]
    if together == q_len or together % rows == 0:
        return block_map, block_size
    fewer = math.gcd(rows, together)
    block_map = jnp.repeat(block_map, rows // fewer, axis=2)[:, :, : q_len // fewer]
    return block_map, (fewer, block_size[1])


def map_arrays(block_map, q_blocks, *, block_size, q_len, kv_len) -> dict[str, jax.Array]:
    map_bits = packed(block_map)  # one for all rows of the batch may stay that
    block_map, q_blocks = vary_together(block_map, q_blocks)
    q_entries, kv_entries = entries(block_map, block_size, q_blocks, q_len, kv_len)
    return {"map_bits": map_bits, "q_entries": q_entries, "kv_entries": kv_entries}
