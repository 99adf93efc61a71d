"""tree(...) and shared_prefix(...): tokens attend to their ancestors in a packed tree.

Also the depth of each token, and the token before it on its path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.arguments import Array, ArrayLike, as_int32, numpy_of, shown
from packax._src.core.sharding import over_auto_axes, typed_axes, vary_together
from packax._src.core.spec import PADDING_SEGMENT_ID, common_batch, is_symbolic
from packax._src.masks.expressions import (
    And,
    Limits,
    MaskExpression,
    Positions,
    batch_of,
    check_lengths,
    documents_of,
    pytree,
)

PROMPT = -1
_TREE, _SHARED_PREFIX = "tree", "shared_prefix"
_ARGUMENTS = {_TREE: ("segment_ids", "parents"), _SHARED_PREFIX: ("group_ids", "answer_ids")}


@pytree("ids", "others", static=("form",))
class Tree(MaskExpression):
    """See `tree` and `shared_prefix`."""

    ids: Array  # (B, S) or (S,): segment ids of a tree, group ids of shared_prefix
    others: Array  # parents of a tree, (B, N) or (N,); answer ids of shared_prefix, like ids
    form: str  # the name of the function

    of_rows = False
    once = "pass all trees of a row in one call, with one root after another"

    @property
    def name(self) -> str:
        return self.form

    def arguments(self) -> list[str]:
        return [shown(self.ids), shown(self.others)]

    def arrays(self) -> list[tuple[str, Array, str]]:
        first, second = (f"{x} of {self.name}(...)" for x in _ARGUMENTS[self.name])
        held = [(first, self.ids, "q"), (first, self.ids, "kv")]
        if self.name == _SHARED_PREFIX:
            return [*held, (second, self.others, "q")]
        return held + ([(second, self.others, "batch")] if self.others.ndim == 2 else [])

    def check_others(self, both: And) -> None:
        document = documents_of(both)
        if document is not None and document.q_pos is not None:
            raise ValueError(
                f"documents(..., positions=...) is joined with {self.name}(...): leave positions "
                "out, because those of a tree are the depths of its tokens (tree_positions)"
            )
        for part in both.walk():
            if getattr(part, "offset", None) is not None:
                raise ValueError(
                    f"{part.name} has an offset and is joined with {self.name}(...): leave the "
                    "offset out, because a tree is for self-attention, and its positions are depths"
                )

    def places(self, q_len: int, kv_len: int) -> Positions:
        attended = self._as_array(Positions(np.arange(q_len), np.arange(kv_len), (), False))
        earlier = np.arange(kv_len)[None, :] < np.arange(q_len)[:, None]
        xp = numpy_of(attended)
        depth = xp.sum(attended & earlier, axis=-1, dtype=np.int32)
        return Positions(depth, depth, self.segments()[:1], True)

    def _as_array(self, at: Positions) -> Array:
        ids, parents = self.segments()
        xp = numpy_of(ids, parents)
        number = parents.shape[-1]
        if number == 0:  # groups without tokens
            return np.zeros((*ids.shape[:-1], 0, 0), bool)
        name = np.arange(number, dtype=np.int32)
        # above[n, m]: segment m is n or an ancestor of n. By pointer doubling, for any numbering:
        # `up` leads 1, 2, 4, ... segments up, and segment `number` is above every root.
        inside = (parents >= 0) & (parents < number)
        root = np.full((*parents.shape[:-1], 1), number, np.int32)
        up = xp.concatenate([xp.where(inside, parents, number).astype(np.int32), root], -1)
        above = xp.broadcast_to(
            np.eye(number + 1, number, dtype=bool), (*parents.shape[:-1], number + 1, number)
        )
        for _ in range(1 if self.name == _SHARED_PREFIX else levels_of(number)):
            above = above | _rows(above, up)
            up = xp.take_along_axis(up, up, axis=-1)
        above = above[..., :-1, :]
        real = ids != PADDING_SEGMENT_ID
        at_segment = xp.clip(ids, 0, number - 1)
        lead = np.broadcast_shapes(above.shape[:-2], ids.shape[:-1])
        above = xp.broadcast_to(above, (*lead, number, number))
        at_segment = xp.broadcast_to(at_segment, (*lead, ids.shape[-1]))
        of_keys = _rows(above, at_segment).swapaxes(-1, -2)
        attended = _rows(of_keys, at_segment).swapaxes(-1, -2)
        # Depth-first order: a segment comes before its descendants, which are contiguous.
        last = number - 1 - xp.argmax(above[..., ::-1, :], axis=-2)
        orders = (
            (last - name + 1 == above.sum(-2, dtype=np.int32)) & (parents < name) & (parents >= -1)
        )
        greatest = np.maximum.accumulate if xp is np else jax.lax.cummax
        falls = real & (ids < greatest(xp.where(real, ids, 0), axis=ids.ndim - 1))
        known = (ids >= PADDING_SEGMENT_ID) & (ids < number)
        valid = (orders.all(-1) & known.all(-1)) & ~falls.any(-1)
        both = real[..., :, None] & real[..., None, :]
        return attended & both & valid[..., None, None]

    def segments(self) -> tuple[Array, Array]:
        """The segment ids of tokens and the parents of segments, as the arguments of `tree`."""
        if self.name == _TREE:
            return self.ids, self.others
        return _segments_of_groups(self.ids, self.others)

    def groups(self) -> Array:
        """The id that determines a token's color in a plot: its segment or group."""
        if self.name == _TREE:
            return self.ids
        # An id that reappears is another group, so use the index of the first token of the path,
        # which is in the prompt.
        first = self.nodes().first
        return first[0] if self.ids.ndim == self.others.ndim == 1 else first

    def nodes(self) -> Nodes:
        ids, parents = (_two(x) for x in self.segments())
        shallow = self.name == _SHARED_PREFIX
        return nodes_of(ids, parents, 1 if shallow else levels_of(parents.shape[1]))


def tree(segment_ids: ArrayLike, parents: ArrayLike) -> MaskExpression:
    """Each token attends to its segment and to the ancestors of that segment in a tree.

    It is for a prompt with many answers, a conversation with branches, or a search tree: tokens
    shared by branches are stored once. A segment is the text between two branch points. Segments
    are numbered in depth-first order: a segment, then all of its descendants. A packed row may
    contain several trees, one after another. Attention is exact, and blocks of siblings are skipped
    in both passes.

    Expressions joined with a tree compare depths instead of indices, except documents(...),
    ranges(...) and block_sparse(...). A token's depth is the number of tokens before it on its
    path, as RoPE needs (`tree_positions`). For language models, use `tree(...) & causal()`.
    `sliding_window` and `chunked` count along the path. With `prefix(lengths)`, every token also
    attends to the first tokens of its path.

    Args:
        segment_ids: the segment of each token, from 0 and never decreasing: (B, S) or (S,). -1 is
            padding, and may be anywhere.
        parents: the parent of each segment, which comes before it, or -1 for the root of a tree:
            (B, N) or (N,). Segments may have no tokens, for example to pad a batch.

    Raises:
        ValueError: wrong rank, dtype, value or length; numpy arrays that are not
            trees in depth-first order; documents(...) with positions, or an offset, joined with it.

    If jax arrays are not trees in depth-first order, that row of the batch attends to nothing.

    Examples:
        >>> # a prompt and two answers
        >>> packax.masks.tree([0, 0, 1, 2, 2], [-1, 0, 0]).as_array(5, 5).astype(int)
        array([[1, 1, 0, 0, 0],
               [1, 1, 0, 0, 0],
               [1, 1, 1, 0, 0],
               [1, 1, 0, 1, 1],
               [1, 1, 0, 1, 1]])
    """
    ids = as_int32("segment_ids", segment_ids)
    above = as_int32("parents", parents, shapes="(batch, segments) or (segments,)")
    if above.shape[-1] == 0:
        raise ValueError("parents must have the parent of each segment, but is empty: pass [-1]")
    return _checked(Tree(ids, above, _TREE))


def shared_prefix(group_ids: ArrayLike, answer_ids: ArrayLike) -> MaskExpression:
    """A token attends to its group's prompt and to its answer: a `tree` with a prompt per group.

    It is for packed reinforcement learning (GRPO): each group is a prompt, followed by its answers.
    The prompt is stored once. The rules of `tree` apply.

    Args:
        group_ids: the group of each token, (B, S) or (S,). -1 is padding, and may be anywhere.
        answer_ids: the answer of each token, shaped like group_ids. -1 marks the tokens of the
            prompt, which come before the answers of their group; a group may have no prompt. All
            tokens of an answer have one id, which differs from those of the answers before and
            after it in the group.

    A group, and an answer within it, is a run of equal ids, ignoring padding: an id that reappears
    later is another group or answer.

    Raises:
        ValueError: wrong rank, dtype or length; numpy arrays in which a prompt
            comes after an answer of its group.

    If jax arrays have a prompt after an answer, that row of the batch attends to nothing.

    Examples:
        >>> expression = packax.masks.shared_prefix([5, 5, 5, 5, -1], [-1, 0, 0, 1, 1])
        >>> expression.as_array(5, 5).astype(int)
        array([[1, 0, 0, 0, 0],
               [1, 1, 1, 0, 0],
               [1, 1, 1, 0, 0],
               [1, 0, 0, 1, 0],
               [0, 0, 0, 0, 0]])
    """
    ids, answers = as_int32("group_ids", group_ids), as_int32("answer_ids", answer_ids)
    return _checked(Tree(ids, answers, _SHARED_PREFIX))


def tree_positions(expression: MaskExpression) -> Array:
    """The number of tokens before each token on its path, for RoPE.

    Args:
        expression: a `tree` or `shared_prefix`, or one joined with others by `&`.

    Returns:
        int32, shaped like the ids of the tree: (B, S) or (S,); 0 for padding. numpy for numpy.

    Raises:
        ValueError: an expression without a tree.

    Examples:
        >>> packax.masks.tree_positions(packax.masks.tree([0, 0, 1, 2, 2], [-1, 0, 0]))
        array([0, 1, 2, 2, 3], dtype=int32)
    """
    return _of_tokens(expression, _positions)


def path_predecessors(expression: MaskExpression) -> Array:
    """For each token, the index of the token before it on its path: the one that predicts it.

    In a packed tree the first token of every branch follows the last token of the segment above,
    wherever that is in the row. Take the logits, or log-probabilities, of a token from that index.

    Args:
        expression: a `tree` or `shared_prefix`, or one joined with others by `&`.

    Returns:
        int32, shaped like the ids of the tree: (B, S) or (S,); -1 for the first token of a root,
        which nothing predicts, and for padding. numpy for numpy.

    Raises:
        ValueError: an expression without a tree.

    Examples:
        >>> two_answers = packax.masks.tree([0, 0, 1, 2, 2], [-1, 0, 0])
        >>> packax.masks.path_predecessors(two_answers)
        array([-1,  0,  1,  1,  3], dtype=int32)
    """
    return _of_tokens(expression, _all_predecessors)


def _of_tokens(expression: Any, function: Callable[[Nodes], Any]) -> Any:
    """function(nodes of the expression's tree), (B, S), or (S,) if the tree has no batch."""
    found = tree_of(expression) if isinstance(expression, MaskExpression) else None
    if found is None:
        raise ValueError(
            f"expression must contain tree(...) or shared_prefix(...), but is {expression!r}"
        )
    flat = found.ids.ndim == found.others.ndim == 1

    def of_arrays(ids: Any, others: Any) -> Any:
        made = function(Tree(ids, others, found.form).nodes())
        return made[0] if flat else made

    arrays = found.ids, found.others
    ids, others = (typed_axes(x) if isinstance(x, jax.Array) else ((),) * x.ndim for x in arrays)
    batch = [axes[0] for axes in (ids, others) if len(axes) == 2]
    dims = ([] if flat else [next(filter(None, batch), ())]) + [ids[-1]]
    return over_auto_axes(of_arrays, arrays, dims)


def tree_of(expression: MaskExpression) -> Tree | None:
    """The tree of the expression, if any."""
    return next((x for x in expression.parts() if isinstance(x, Tree)), None)


def position_limits(nodes: Nodes, ids: Any, interval: And) -> Limits:
    """The lowest and the highest depth on its path that each row attends to; None: unbounded.

    ids: the segment ids of documents(...), or None.
    """
    of_rows = (nodes.node,) if ids is None else (nodes.node, ids)
    at = Positions(nodes.position, nodes.position, of_rows, True)
    return interval.limits(at) if interval.members else (None, None)


def tree_rows(operands: tuple[Tree, Array | None], interval: And) -> tuple[Array, Array, Array]:
    """(lo, hi, end) for each token of whole sequences, (B, S) each; numpy for numpy.

    Row i attends to key j if lo[i] <= j < hi[i] and i < end[j], where end[j] is the index after the
    subtree of the key's segment. In depth-first order the tokens of a subtree are contiguous, so
    i < end[j] means that row i is in the key's segment or below it. The keys of a path are ordered
    by depth, so limits on depths are limits on indices.

    operands: the tree, and the segment ids of documents(...) or None.
    """
    tree, ids = operands
    nodes = tree.nodes()
    low, high = position_limits(nodes, ids, interval)
    xp = numpy_of(nodes.position, low, high)
    causal = high is nodes.position
    batch = common_batch(x.shape[0] for x in (nodes.position, low, high) if x is not None)
    nodes, low, high = jax.tree.map(
        lambda x: xp.broadcast_to(x, (batch, *x.shape[1:])), (nodes, low, high)
    )
    empty = nodes.end == 0
    lo, hi = nodes.first, nodes.own_end
    if low is not None:
        empty = empty | (low > nodes.last)
        lo = index_at(nodes, xp.clip(low, 0, nodes.last))
    if causal:
        index = xp.arange(hi.shape[1], dtype=np.int32) + np.int32(1)
        hi = xp.broadcast_to(index[None], hi.shape)
    elif high is not None:
        empty = empty | (high < 0)
        hi = index_at(nodes, xp.clip(high, 0, nodes.last)) + 1
    if xp is jnp:
        lo, hi, empty = vary_together(lo, hi, empty)
    return xp.where(empty, 0, lo), xp.where(empty, 0, hi), nodes.end


def tree_keys(tree: Tree, interval: And) -> Any:
    """(B or 1, S): how many keys each row attends to: one per depth of its path."""
    nodes = tree.nodes()
    xp = numpy_of(nodes.position)
    low, high = position_limits(nodes, None, interval)
    first = 0 if low is None else xp.maximum(low, 0)
    last = nodes.last if high is None else xp.minimum(high, nodes.last)
    keys = xp.where(nodes.end > 0, xp.maximum(last - first + 1, 0), 0)
    return keys.astype(np.int32)


def _segments_of_groups(groups: Any, answers: Any) -> tuple[Any, Any]:
    """Makes each prompt and each answer a segment: (segment id of each token, parents).

    If a prompt comes after an answer of its group, all segment ids of the row are invalid.
    """
    flat = groups.ndim == answers.ndim == 1
    groups, answers = _two(groups), _two(answers)
    if groups.shape[1] == 0:
        return (groups[0], groups[0]) if flat else (groups, groups)
    ids, parents = _by_row(_segments_of_row, groups, answers)
    return (ids[0], parents[0]) if flat else (ids, parents)


def _segments_of_row(groups: Any, answers: Any, xp: ModuleType) -> tuple[Any, Any]:
    length = groups.shape[0]
    index = xp.arange(length, dtype=np.int32)
    if xp is jnp:
        groups, answers, index = vary_together(groups, answers, index)
    real = groups != PADDING_SEGMENT_ID
    seen = greatest_yet(xp.where(real, index, -1), xp)
    before = xp.concatenate([xp.full_like(index[:1], -1), seen[:-1]])  # the previous real token
    at = xp.maximum(before, 0)
    new_group = real & ((before < 0) | (groups[at] != groups))
    begins = new_group | (real & (answers[at] != answers))
    segment = xp.cumsum(begins, dtype=np.int32) - 1
    group = greatest_yet(xp.where(new_group, index, 0), xp)  # the first token of the group
    below = ~new_group & (answers[group] == PROMPT)
    parent = xp.where(below, segment[group], -1)
    parents = scattered(
        xp.full_like(index, -1), xp.where(begins, segment, length), parent, "max", xp
    )
    ids = xp.where(real, segment, PADDING_SEGMENT_ID)
    wrong = begins & ~new_group & (answers == PROMPT)
    return xp.where(wrong.any(), length, ids).astype(np.int32), parents


def _rows(x: Any, index: Any) -> Any:
    """x (B, N, M) or (N, M) at the rows `index`, (B, K) or (K,)."""
    return x[index] if x.ndim == 2 else x[np.arange(x.shape[0])[:, None], index]


def _two(x: Any) -> Any:
    return x[None] if x.ndim == 1 else x


def _checked(expression: Tree) -> Tree:
    """Returns the tree after checking sizes and, for numpy arrays, values."""
    check_lengths(expression)
    batch_of(expression)
    if isinstance(expression.ids, jax.Array) or isinstance(expression.others, jax.Array):
        return expression  # values are unknown, or reading them would wait for the device
    ids, parents = (_two(x) for x in expression.segments())
    if expression.name == _SHARED_PREFIX:
        wrong = (ids == ids.shape[1]).any(1)
        if wrong.any():
            raise ValueError(
                f"answer_ids has a prompt ({PROMPT}) after an answer of the same group, in row "
                f"{int(wrong.argmax())}: the prompt must come first, and a new group must have "
                "another group_id"
            )
        return expression
    number = parents.shape[1]
    wrong = (parents < -1) | (parents >= np.arange(number))
    if wrong.any():
        b, n = np.argwhere(wrong)[0]
        raise ValueError(
            "parents must hold, for each segment, the index of an earlier segment, or -1 for a "
            f"root, but that of segment {n} is {parents[b, n]}"
        )
    wrong = (ids < PADDING_SEGMENT_ID) | (ids >= number)
    if wrong.any():
        raise ValueError(
            f"segment_ids must be from 0 to {number - 1} (parents has {number} segments), or -1 "
            f"for padding, but holds {ids[wrong][0]}"
        )
    wrong = (ids != np.maximum.accumulate(ids, axis=1)) & (ids != PADDING_SEGMENT_ID)
    if wrong.any():
        b, i = np.argwhere(wrong)[0]
        raise ValueError(
            "segment_ids must not decrease (segments are numbered in depth-first order), but token "
            f"{i} of row {b} is in segment {ids[b, i]}, after one in segment "
            f"{ids[b, :i].max()}"
        )
    for row in parents:
        path: list[int] = []
        for n, parent in enumerate(row.tolist()):
            while path and path[-1] != parent:
                path.pop()
            if parent != -1 and not path:
                raise ValueError(
                    f"parents must be in depth-first order, but segment {n} is below segment "
                    f"{parent}, and segment {n - 1} is neither that nor below it: number the "
                    "segments of a subtree consecutively"
                )
            path.append(n)
    return expression


# --- The path of each token from the root, computed from segments.
#
# Segments are numbered in depth-first order, so the tokens of a subtree are contiguous, and the
# keys of a path are ordered by depth. Ancestors are found by binary lifting: step k goes 2^k
# segments up. Nothing loops over tokens.


class Nodes(NamedTuple):
    """The tokens and segments of packed trees. After them, one more segment stands for padding.

    If `valid` is False, the row does not consist of trees in depth-first order, and attends to
    nothing.
    """

    valid: Any  # (B,)
    node: Any  # (B, S): the segment of a token
    position: Any  # (B, S): the number of tokens before it on its path
    last: Any  # (B, S): the position of the last token of its segment
    first: Any  # (B, S): the index of the first token of its path
    own_end: Any  # (B, S): the index after the last token of its segment
    end: Any  # (B, S): the index after the last token of its segment's subtree; 0: padding
    ups: Any  # (B, levels, N + 1): the ancestor 2^k levels above a segment
    start: Any  # (B, N + 1): the position of a segment's first token
    rank: Any  # (B, N + 1): the number of non-padding tokens before a segment's first token
    token: Any  # (B, S): the index of the n-th non-padding token of the row


def levels_of(number: Any) -> int:
    """The levels of binary lifting that reach the root from any of `number` segments."""
    return 31 if is_symbolic(number) else max(1, (number - 1).bit_length())


def nodes_of(ids: Any, parents: Any, levels: int) -> Nodes:
    """The nodes for segment ids (B or 1, S) and parents (B or 1, N), -1 for a root."""
    return _by_row(functools.partial(_nodes_of_row, levels), ids, parents)


def index_at(nodes: Nodes, position: Any) -> Any:
    """(B, S): the index of the token at a position, from 0 to `last`, on each token's path."""
    if numpy_of(nodes.position, position) is np:
        return _by_row(lambda *x: _index_at(Nodes(*x[:-2]), x[-2], np), *nodes, position)
    return jax.vmap(_index_at)(nodes, position)


def _nodes_of_row(levels: int, ids: Any, parents: Any, xp: ModuleType) -> Nodes:
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
    # Depth-first order: the segments of every subtree are contiguous.
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


def _by_row(function: Callable[..., Any], *arrays: Any) -> Any:
    """Maps function(*arrays of one row, np or jnp) over the batch; arrays: (B or 1, ...)."""
    xp = numpy_of(*arrays)
    batch = common_batch(x.shape[0] for x in arrays)
    arrays = tuple(xp.broadcast_to(x, (batch, *x.shape[1:])) for x in arrays)
    if xp is jnp:
        return jax.vmap(lambda *row: function(*row, jnp))(*vary_together(*arrays))
    if batch == 0:  # one row, for the shapes of the results
        arrays = tuple(np.zeros((1, *x.shape[1:]), x.dtype) for x in arrays)
    rows = [function(*row, np) for row in zip(*arrays, strict=True)]
    return jax.tree.map(lambda *x: np.stack(x)[:batch], *rows)


def _index_at(nodes: Nodes, position: Any, xp: ModuleType = jnp) -> Any:
    """Binary lifting to the highest ancestor that begins after `position`, then its parent; no
    step if the token's own segment contains the position."""
    if nodes.token.shape[0] == 0:
        return position
    padding = nodes.start.shape[0] - 1

    def climb(at: Any, up: Any) -> tuple[Any, None]:
        above = up[at]
        return xp.where((above != padding) & (nodes.start[above] > position), above, at), None

    at = nodes.node
    if xp is jnp:
        at, _ = jax.lax.scan(climb, at, nodes.ups, reverse=True)
    for up in nodes.ups[::-1] if xp is np else ():
        at, _ = climb(at, up)
    at = xp.where(nodes.start[at] > position, nodes.ups[0][at], at)
    rank = nodes.rank[at] + position - nodes.start[at]
    return nodes.token[xp.clip(rank, 0, nodes.token.shape[0] - 1)]


def _positions(nodes: Nodes) -> Any:
    return numpy_of(nodes.position).where(nodes.valid[:, None], nodes.position, 0)


def _all_predecessors(nodes: Nodes) -> Any:
    return _by_row(lambda *x: _predecessors(Nodes(*x[:-1]), x[-1]), *nodes)


def _predecessors(nodes: Nodes, xp: ModuleType) -> Any:
    """The index of the token one position before each token on its path, or -1."""
    position = nodes.position - 1
    has_predecessor = nodes.valid & (nodes.end > 0) & (position >= 0)
    return xp.where(has_predecessor, _index_at(nodes, position, xp), -1).astype(np.int32)


def greatest_yet(x: Any, xp: ModuleType) -> Any:
    return np.maximum.accumulate(x) if xp is np else jax.lax.cummax(x)


def scattered(onto: Any, at: Any, x: Any, how: str, xp: ModuleType) -> Any:
    """A copy of `onto`, combined with x at the indices `at` by "add", "min" or "max". Indices past
    the end are ignored.
    """
    if xp is jnp:
        return getattr(onto.at[at], how)(x, mode="drop")
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[how]
    result, in_bounds = onto.copy(), at < onto.shape[0]
    function.at(result, at[in_bounds], x[in_bounds])
    return result


def _repeat(step: Callable[[Any], tuple[Any, Any]], carry: Any, times: int, xp: ModuleType) -> Any:
    if xp is jnp:
        return jax.lax.scan(lambda carry, _: step(carry), carry, None, length=times)
    seen = []
    for _ in range(times):
        carry, one = step(carry)
        seen.append(one)
    return carry, np.stack(seen)
