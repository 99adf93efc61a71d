"""The passes of a rank that needs only some keys of other ranks: with a local plan, or with halos.

With a local plan, each document is on a single rank, or in a part that all ranks or the ranks of a
host share. So a rank computes several attentions, each with its mask: one of all its rows over its
private keys, and one of its first rows over each set of shared keys. With halos (halo.py), the
second attention is over the first rows of each chunk and the keys with halos. A row is empty in all
masks except one, and adds 0 in the others.

The private attention runs while the other keys are fetched. In the backward pass it then runs for
half of the heads, and for the other half while the gradients of the fetched keys are sent back. If
few keys are fetched, slicing heads would take longer than sending their gradients, so it runs for
all heads at once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from packax._src.context.all_gather_kv import (
    KVGatherPipeline,
    as_gathered,
    dependency_token,
    piece,
    update_at,
)
from packax._src.context.fetch_halos import fetch, index, numbers, return_gradients
from packax._src.context.halo import Halo
from packax._src.context.load_balance import take_chunks, take_each
from packax._src.context.rank_passes import backward_groups, forward_groups, whole
from packax._src.core.context_mask import ContextMask
from packax._src.core.schema import ROWS
from packax._src.core.spec import AttentionSpec
from packax._src.ops.primitives import Inputs


def forward(spec: AttentionSpec, x: Inputs) -> list[jax.Array]:
    """out, lse and, if requested, the largest logits."""
    mask: Any = x.mask
    private, *shared = _parts(spec, x)
    private.groups.keys_ready = _keys_ready(shared)
    out, lse, *top = forward_groups(private.groups)
    for part in shared:
        part.groups.attention_done = dependency_token(lse)
        more, more_lse, *more_top = forward_groups(part.groups)
        top = [part.place.put(jnp.maximum, *both, 2) for both in zip(top, more_top, strict=True)]
        out = part.place.put(jnp.add, out, more, 1)
        lse = part.place.put(jnp.maximum, lse, more_lse, 2)
    if mask.plan_mismatch is not None:
        # NaN in one element of each row and head is enough to propagate. A NaN in lse makes the
        # gradients NaN.
        nan = jnp.where(mask.plan_mismatch != 0, jnp.nan, 0.0)
        lse = lse + nan.reshape(-1, *[1] * (lse.ndim - 1)).astype(lse.dtype)
        of_heads = jnp.broadcast_to(nan[:, None, None, None], (*out.shape[:3], 1))
        out = update_at(jnp.add, out, of_heads.astype(out.dtype), 0, 3)
    return [out, lse, *top]


def backward(spec: AttentionSpec, x: Inputs) -> tuple[Any, ...]:
    """The gradients of query, key and value, this rank's part of the gradients of scale and slopes,
    row_delta, and None for the bias."""
    mask: Any = x.mask
    fetched = mask.fetched if mask.halo is None else Halo(*mask.halo).fetched
    many = fetched > _HALVES * x.key.shape[1]
    private, *shared = _parts(spec, x, halves=many)
    own: list[tuple[Any, ...]] = []
    others: list[list[tuple[Any, ...]]] = []
    halves = iter(range(private.groups.number))
    if shared and (private.groups.number > 1 or not many):
        private.groups.keys_ready = _keys_ready(shared)
        backward_groups(private.groups, [next(halves)], own)
        # Not dq: the other half of the heads writes into it, and would wait for this read.
        key_gradients = zip(own[0][1:3], ("key", "value"), strict=True)
        done = dependency_token(*[y for y, name in key_gradients if name in spec.needs_grad][:1])
        for part in shared:
            part.groups.attention_done = done
    for part in shared:
        others.append([])
        backward_groups(part.groups, range(part.groups.number), others[-1])
    private.groups.keys_ready = None
    if shared:
        to_send = [y for part in shared for y in part.groups.to_send_back]
        private.groups.gradients_ready = dependency_token(*to_send)
    backward_groups(private.groups, halves, own)
    dq, dk, dv, of_scores, row_delta, _ = whole(own)
    if private.return_gradients is not None:
        dk, dv = private.return_gradients([dk, dv], None)
    for part, more in zip(shared, others, strict=True):
        more_dq, *of_keys, more_scores, more_delta, _ = whole(more)
        dq = part.place.put(jnp.add, dq, more_dq, 1)
        dk, dv = part.add_keys([dk, dv], of_keys)
        of_scores = None if of_scores is None else of_scores + more_scores
        if row_delta is not None:  # 0 in the parts in which a row is empty
            row_delta = part.place.put(jnp.add, row_delta, more_delta, 2)
    groups = private.groups
    return dq, groups.summed(dk, x.key), groups.summed(dv, x.value), of_scores, row_delta, None


# Halves of heads are faster if the keys that a rank fetches are more than this fraction of the keys
# that it has. Slicing keys and values, and joining gradients, moves four times their bytes in
# memory, which is about 15 times as fast as transfers between GPUs.
_HALVES = 1 / 4


class First(NamedTuple):
    """The first `rows` rows of each of `pieces` equal pieces of a rank's rows."""

    pieces: int
    rows: int

    def take(self, x: jax.Array, axis: int = 1) -> jax.Array:
        if x.shape[axis] == self.pieces * self.rows:
            return x
        first = jax.lax.slice_in_dim(self._split(x, axis), 0, self.rows, axis=axis + 1)
        return first.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def put(self, join: Any, x: jax.Array, first: jax.Array, axis: int) -> jax.Array:
        """x with these rows replaced by join(rows of x, first)."""
        apart = update_at(join, self._split(x, axis), self._split(first, axis), 0, axis + 1)
        return apart.reshape(x.shape)

    def _split(self, x: jax.Array, axis: int) -> jax.Array:
        return x.reshape(*x.shape[:axis], self.pieces, -1, *x.shape[axis + 1 :])


class _Part(NamedTuple):
    """A part of the mask: its keys, and the rows that attend to them (`groups.inputs`)."""

    groups: KVGatherPipeline
    place: First  # of the rows in the rank, and, if `return_gradients` is None, of the keys
    return_gradients: Any  # returns the gradients of halos; None: no halos

    def add_keys(self, onto: list[jax.Array], gradients: list[jax.Array]) -> list[jax.Array]:
        """Adds the part's gradients of keys and values to the rank's."""
        if self.return_gradients is not None:
            return self.return_gradients(gradients, onto)
        both = zip(onto, gradients, strict=True)
        return [self.place.put(jnp.add, *x, 1) for x in both]


def _parts(spec: AttentionSpec, x: Inputs, halves: bool = False) -> list[_Part]:
    """The parts in the order of their attention: private, then shared by the fewest ranks first.

    halves: whether the private attention runs for half of the heads at a time.
    """
    mask: Any = x.mask
    masks = [mask.private_part, *reversed(mask.shared_parts)]
    # Without halos, a shared part has the first rows of this rank and the first keys of each rank.
    halo = None if mask.halo is None else Halo(*mask.halo)
    of_halo: list[Any] = [(None, None)] * len(masks) if halo is None else halo.parts
    places = [
        First(1, of.kv_start.shape[1]) if halo is None else First(halo.chunks, stretch.rows)
        for of, (_, stretch) in zip(masks, of_halo, strict=True)
    ]
    private = x.query.shape[1] - max((place.rows for place in places[1:]), default=0)
    parts: list[_Part] = []
    for of, place, (edges, stretch) in zip(masks, places, of_halo, strict=True):
        with_halos = {"layout": spec.layout, "kv_plan": mask.kv_plan}
        own_key, own_value = (y if edges else place.take(y) for y in (x.key, x.value))
        fixed = {name: y for name, y in x.fixed._asdict().items() if y is not None}
        of_rows = {name: place.take(y) for name, y in fixed.items() if "r" in ROWS[name].axes}
        keys = x.fixed.kv_bias_pos
        if keys is not None and halo is not None:
            keys = take_each(keys, index(halo, stretch, numbers(halo, **with_halos)))
        elif keys is not None:
            keys = _select_keys(spec, mask, of, keys, place.rows)
        own_fixed = x.fixed._replace(**of_rows, kv_bias_pos=keys)
        results = (
            None if y is None else place.take(y, 1 if y.ndim == 4 else 2)
            for y in (x.out, x.lse, x.dout, x.dlse)
        )
        tensors = (place.take(x.query), own_key, own_value)
        own = Inputs(*tensors, x.scores, of, own_fixed, *results)
        groups = KVGatherPipeline(
            spec,
            own,
            private_rows=private,
            halves=halves,
            fetch=functools.partial(fetch, edges, **with_halos) if edges else None,
        )
        back = functools.partial(return_gradients, edges, **with_halos) if edges else None
        parts.append(_Part(groups, place, back))
    return parts


def _keys_ready(shared: list[_Part]) -> jax.Array | None:
    """A dependency token of all shared keys that are to be sent."""
    pieces = [x for part in shared for x in part.groups.to_send]
    return dependency_token(*pieces) if pieces else None


def _select_keys(
    spec: AttentionSpec, mask: ContextMask, of: ContextMask, x: jax.Array, number: int
) -> Any:
    """The entries of x for the keys of a part; x has an entry for each key, in sequence order."""
    layout = spec.layout
    assert of.gathers is not None and mask.kv_plan is not None
    batch = max(len(x), len(mask.kv_plan))
    x = take_chunks(mask.kv_plan[:, 0], 1, jnp.broadcast_to(x, (batch, x.shape[1])))
    x = x.reshape(batch, layout.size(layout.context), -1)[:, :, :number]  # by ranks
    outside = layout.context[: of.gathers[0]] if of.gathers else layout.context
    x = piece(x, outside, layout)
    if not of.gathers:
        return x[:, 0]
    assert of.kv_plan is not None
    return take_chunks(of.kv_plan[:, 1], 1, as_gathered(x, layout, of.gathers))
