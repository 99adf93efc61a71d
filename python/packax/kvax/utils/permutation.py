"""The order of rows in context parallelism: rank 0 gets the first and the last chunk, and so on.

With n ranks and 2n chunks, rank r gets the chunks r and 2n-1-r, so that all ranks have the same
work for one causal document (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from packax.context import ContextPlan
from packax.extend import described, zigzag
from packax.kvax.utils.sharding import get_query_context_mesh_axis_size
from packax.kvax.utils.typing import DeviceArray


def generate_shard_indices(num_shards: int, reverse: bool = False) -> jax.Array:
    """(num_shards,) int32: the permutation of chunks 0, n-1, 1, n-2, ..., or its inverse."""
    plan = zigzag(num_shards // 2, num_shards)
    return jnp.asarray(plan.inverse[0] if reverse else plan.order[0])


def head_tail_plan(num_shards: int, length: int) -> ContextPlan:
    """packax's plan for `num_shards` chunks, which must divide the length.

    Raises:
        ValueError: the chunks do not divide the length.
    """
    if length % num_shards:
        raise ValueError(
            f"the length of the sequence must be a multiple of {num_shards}, twice the size of the "
            f"context axis, but is {length}"
        )
    return zigzag(num_shards // 2, length)


def apply_permutation(
    inputs: tuple[DeviceArray, ...], num_shards: int, reverse_permutation: bool
) -> list[DeviceArray]:
    """Permutes the `num_shards` chunks of axis 1 of every array (B, S, ...), or restores them."""
    plan = head_tail_plan(num_shards, inputs[0].shape[1])
    move = plan.unpermute if reverse_permutation else plan.permute
    return [move(x) for x in inputs]


def permute_tokens_context_parallelism(
    inputs: Any, mesh: Any = None, plan: ContextPlan | None = None
) -> Any:
    """Arrays (B, S, ...) with their tokens (axis 1) in the order that balances a causal document.

    Args:
        inputs: an array, or a tuple of arrays that agree in B and S.
        mesh: the device mesh; None: the one set by `with mesh:` or jax.set_mesh.
        plan: the plan whose order to use, from `packax.context_plan` (not in kvax), for the ranks
            of the context axis; pass it to `create_attention_mask`, too. None: kvax's order.

    Returns:
        The array, or a list of the arrays.

    Raises:
        ValueError: no mesh, no context axis in the attention specs, shapes that do not agree, S
            that is not a multiple of twice the context axis, or a plan for other lengths or ranks.

    Examples:
        >>> tokens, positions, ids = permute_tokens_context_parallelism((tokens, positions, ids))
    """
    return _move(inputs, mesh, plan, reverse=False)


def unpermute_tokens_context_parallelism(
    inputs: Any, mesh: Any = None, plan: ContextPlan | None = None
) -> Any:
    """The inverse of `permute_tokens_context_parallelism`.

    Args:
        inputs, mesh, plan: as in `permute_tokens_context_parallelism`.

    Returns:
        The array, or a list of the arrays, with axis 1 in the original order.

    Raises:
        ValueError: an error of `permute_tokens_context_parallelism`.

    Examples:
        >>> tokens = unpermute_tokens_context_parallelism(tokens)
    """
    return _move(inputs, mesh, plan, reverse=True)


def _move(inputs: Any, mesh: Any, plan: ContextPlan | None, *, reverse: bool) -> Any:
    shards = get_query_context_mesh_axis_size(mesh)
    several = isinstance(inputs, (tuple, list))
    arrays = tuple(jnp.asarray(x) for x in (inputs if several else (inputs,)))
    shapes = [x.shape for x in arrays]
    if not shapes or any(len(shape) < 2 or shape[:2] != shapes[0][:2] for shape in shapes):
        raise ValueError(
            "inputs must be an array (batch, length, ...) or a tuple of arrays with one batch size "
            f"and one length, but the shapes are {shapes}"
        )
    if plan is not None:
        if not isinstance(plan, ContextPlan):
            raise ValueError(f"plan must come from packax.context_plan, but is {described(plan)}")
        if plan.ranks != shards:
            raise ValueError(
                f"plan was made for {plan.ranks} ranks, but the context axis has size {shards}"
            )
        moved = list((plan.unpermute if reverse else plan.permute)(arrays))
    else:
        moved = list(arrays) if shards == 1 else apply_permutation(arrays, 2 * shards, reverse)
    return moved if several else moved[0]
