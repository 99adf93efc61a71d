"""Of a packed tree, what each token attends: its path from the root, by arithmetic on segments.

Segments are numbered in depth-first order, so the tokens of a subtree lie together, and the keys of
a path stand in the order of their depths. Everything about ancestors is found by doubling (binary
lifting): step k looks 2^k segments up. Nothing loops over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.integers import numpy_of
from packax._src.core.jax_compat import vary_together
from packax._src.core.shapes import PADDING_SEGMENT_ID, is_symbolic


class Nodes(NamedTuple):
    """One tree or several, (B, ...) each. The last segment, behind those given, is that of padding.

    Where `valid` is False the arrays are no trees in depth-first order, and all tokens are padding.
    """

    valid: Any  # (B,)
    node: Any  # (B, S): the segment of a token
    position: Any  # (B, S): how many tokens come before it on its path
    last: Any  # (B, S): the position of the last token of its segment
    first: Any  # (B, S): the index of the first token of its path
    own_end: Any  # (B, S): one after the last token of its segment
    end: Any  # (B, S): one after the last token of its segment's subtree; 0: padding
    ups: Any  # (B, levels, N + 1): the segment 2^k above
    start: Any  # (B, N + 1): the position of a segment's first token
    rank: Any  # (B, N + 1): how many tokens come before that in the row
    token: Any  # (B, S): the index of the n-th token of the row


def levels_of(number: Any) -> int:
    """Doublings that reach from any of so many segments to its root."""
    return 31 if is_symbolic(number) else max(1, (number - 1).bit_length())


def nodes_of(ids: Any, parents: Any, levels: int) -> Nodes:
    """ids (B or 1, S), the segments of tokens, and parents (B or 1, N), -1: a root."""
    xp = numpy_of(ids, parents)
    batch = max(ids.shape[0], parents.shape[0])
    ids, parents = (xp.broadcast_to(x, (batch, x.shape[1])) for x in (ids, parents))
    if xp is np:
        rows = [_of_row(*row, levels, np) for row in zip(ids, parents, strict=True)]
        return Nodes(*(np.stack(x) for x in zip(*rows, strict=True)))
    return jax.vmap(lambda ids, parents: _of_row(ids, parents, levels, jnp))(
        *vary_together(ids, parents)
    )


def index_at(nodes: Nodes, position: Any) -> Any:
    """(B, S): the index of the token at this position of each token's path, from 0 to `last`."""
    return jax.vmap(_index_at)(nodes, position)


def _of_row(ids: Any, parents: Any, levels: int, xp: ModuleType) -> Nodes:
    length, number = ids.shape[0], parents.shape[0]
    index = xp.arange(length, dtype=np.int32)
    name = xp.arange(number + 1, dtype=np.int32)
    none = xp.zeros_like(name)
    if xp is jnp:
        ids, parents, index, name, none = vary_together(ids, parents, index, name, none)
    real = ids != PADDING_SEGMENT_ID
    given = name < number

    in_order = (ids == greatest_yet(ids, xp)) | ~real
    known = (ids >= PADDING_SEGMENT_ID) & (ids < number)
    above = (parents >= -1) & (parents < name[:-1])
    valid = in_order.all() & known.all() & above.all()

    node = xp.where(real, xp.clip(ids, 0, number - 1), number).astype(np.int32)
    roots = xp.where(above & (parents >= 0), parents, number)
    up = xp.concatenate([roots, xp.full_like(name[:1], number)]).astype(np.int32)
    size = xp.where(given, scattered(none, node, xp.ones_like(index), "add", xp), 0)
    first = scattered(none + length, node, xp.where(real, index, length), "min", xp)
    own_end = scattered(none, node, xp.where(real, index + 1, 0), "max", xp)

    def double(carry: Any) -> tuple[Any, Any]:
        up, end, last, count, total, lead = carry
        end = xp.maximum(end, scattered(none, up, end, "max", xp))
        last = xp.maximum(last, scattered(none, up, last, "max", xp))
        count = count + scattered(none, up, count, "add", xp)
        return (up[up], end, last, count, total + total[up], xp.minimum(lead, lead[up])), up

    of_subtree = own_end, name, none + 1
    carry, ups = _repeat(double, (up, *of_subtree, size, first), levels, xp)
    _, end, last, count, total, lead = carry
    # Depth-first: the segments of every subtree stand side by side.
    valid = valid & ((count == last - name + 1) | ~given).all()
    end = xp.where(given & valid, end, 0)
    start = total - size

    before = xp.cumsum(real, dtype=np.int32) - real.astype(np.int32)
    rank = xp.concatenate([before, none[:1]])[xp.minimum(first, length)]
    position = xp.where(real, start[node] + before - rank[node], 0)
    last_position = xp.where(real, (start + size - 1)[node], 0)
    token = scattered(xp.zeros_like(index), xp.where(real, before, length), index, "max", xp)
    zero = xp.zeros_like(index)
    return Nodes(
        valid=valid,
        node=node,
        position=position.astype(np.int32),
        last=last_position.astype(np.int32),
        first=xp.where(real & valid, lead[node], zero),
        own_end=xp.where(real & valid, own_end[node], zero),
        end=end[node],
        ups=ups,
        start=start,
        rank=rank,
        token=token,
    )


def _index_at(nodes: Nodes, position: Any) -> Any:
    """Climb as long as the segment above begins behind the position, then once more if need be."""
    if nodes.token.shape[0] == 0:
        return position
    padding = nodes.start.shape[0] - 1

    def climb(at: Any, up: Any) -> tuple[Any, None]:
        above = up[at]
        return jnp.where((above != padding) & (nodes.start[above] > position), above, at), None

    at, _ = jax.lax.scan(climb, nodes.node, nodes.ups, reverse=True)
    at = jnp.where(nodes.start[at] > position, nodes.ups[0][at], at)
    rank = nodes.rank[at] + position - nodes.start[at]
    return nodes.token[jnp.clip(rank, 0, nodes.token.shape[0] - 1)]


def greatest_yet(x: Any, xp: ModuleType) -> Any:
    return np.maximum.accumulate(x) if xp is np else jax.lax.cummax(x)


def scattered(onto: Any, at: Any, x: Any, how: str, xp: ModuleType) -> Any:
    """`onto` with x added, or put by minimum or maximum, at these places; none beyond its end."""
    if xp is jnp:
        return getattr(onto.at[at], how)(x, mode="drop")
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[how]
    made, there = onto.copy(), at < onto.shape[0]
    function.at(made, at[there], x[there])
    return made


def _repeat(step: Callable[[Any], tuple[Any, Any]], carry: Any, times: int, xp: ModuleType) -> Any:
    if xp is jnp:
        return jax.lax.scan(lambda carry, _: step(carry), carry, None, length=times)
    seen = []
    for _ in range(times):
        carry, one = step(carry)
        seen.append(one)
    return carry, np.stack(seen)
