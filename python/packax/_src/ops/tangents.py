"""Forward-mode derivatives of forward_p and backward_p, as blockwise XLA on every platform.

Each is a primitive of its own, so that inside shard_map the loops are traced without mesh axes.
No kernel exists for them: they are what autodiff.py makes jvps and second derivatives of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from packax._src.core.jax_compat import run_compiled
from packax._src.ops import lowering
from packax._src.ops.batching_rules import batch_attention, register_batching
from packax._src.ops.operands import MOVING, TENSORS
from packax._src.ops.primitives import backward_p, forward_p
from packax._src.ops.rules import lower_xla

NO_MORE_DERIVATIVES = (
    "flash_attention can be differentiated twice, but not in this order: there is no forward-mode "
    "derivative (jax.jvp, jax.jacfwd, jax.linearize) of a forward-mode derivative, nor any "
    "derivative of a second derivative. There is jax.grad of a function of jax.jvp or jax.grad, "
    "jax.jvp(jax.grad(f), ...) and jax.hessian(f). For more, write the attention out in jax.numpy"
)


def _add_tangent(of: Primitive, name: str, tensors: int, function: Callable[..., Any]) -> Primitive:
    """The primitive whose operands are those of `of`, then tangents of the first `tensors` ones and
    of those extras that may move; its results are the tangents of the results of `of`.

    `function`: the meaning of `of` in XLA.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def moving(operands, extras):
        """Which operands of `of` may move."""
        first = len(operands) - len(extras)
        return [*range(tensors), *(first + n for n, x in enumerate(extras) if x in MOVING)]

    def split(operands, extras):
        """Operands of `of`, and the tangents."""
        end = len(operands) - tensors - len(set(extras).intersection(MOVING))
        return operands[:end], operands[end:]

    @primitive.def_abstract_eval
    def shapes(*operands, **params):
        return of.abstract_eval(*split(operands, params["extras"])[0], **params)[0]

    def call(*operands, params):
        return primitive.bind(*operands, **dict(params))

    jitted = jax.jit(call, static_argnames="params")

    @primitive.def_impl
    def outside_jit(*operands, **params):
        return run_compiled(jitted, *operands, params=tuple(params.items()))

    def run(*operands, params):
        static = dict(params)
        operands, tangents = split(operands, static["extras"])
        places = moving(operands, static["extras"])

        def of_moving(*some):
            merged = list(operands)
            for place, x in zip(places, some, strict=True):
                merged[place] = x
            return tuple(function(*merged, **static))

        return jax.jvp(of_moving, tuple(operands[i] for i in places), tuple(tangents))[1]

    lower = lower_xla(run, ("params",))

    @functools.partial(mlir.register_lowering, primitive)
    def _(ctx, *operands, implementation, **params):
        return lower(ctx, *operands, params=tuple(params.items()))

    def batch(p, sharded, operands, dims, **params):
        # Tensors with the tensors, scales with the scales: what goes together has one batch.
        (old, new), (old_dims, new_dims) = (split(x, params["extras"]) for x in (operands, dims))
        return batch_attention(p, tensors, sharded, old, old_dims, new, new_dims, **params)

    register_batching(primitive, batch)

    def refuse(primals, tangents, **params):
        raise NotImplementedError(NO_MORE_DERIVATIVES)

    def jvp(primals, tangents, *, implementation, **params):
        if implementation == "cuda":
            raise NotImplementedError(
                'implementation="cuda" has kernels for attention and its gradient, but none for '
                "forward-mode derivatives (jax.jvp, jax.jacfwd) and second derivatives: with "
                "implementation=None these run as blockwise XLA beside the kernels"
            )
        params["implementation"] = implementation
        moved = [ad.instantiate_zeros(tangents[i]) for i in moving(primals, params["extras"])]
        return of.bind(*primals, **params), primitive.bind(*primals, *moved, **params)

    ad.primitive_jvps[of] = jvp
    ad.primitive_jvps[primitive] = refuse
    return primitive


forward_tangent_p = _add_tangent(
    forward_p, "packax_forward_tangent", len(TENSORS["forward"]), lowering.xla_forward
)
backward_tangent_p = _add_tangent(
    backward_p, "packax_backward_tangent", len(TENSORS["backward"]), lowering.xla_backward
)
