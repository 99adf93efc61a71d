"""Forward-mode derivatives of forward_p and backward_p, as blockwise XLA on every platform.

Each is a primitive of its own, so that inside shard_map the loops are traced without mesh axes.
No kernel exists for them: they are what derivatives.py makes jvps and second derivatives of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from packax import lowering, primitives
from packax.primitives import backward_p, forward_p

NO_MORE_DERIVATIVES = (
    "flash_attention can be differentiated twice, but not in this order: there is no derivative of "
    "a forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize) nor of a second derivative. "
    "Take the gradient first, then one derivative of it: jax.jvp(jax.grad(f), ...), "
    "jax.hessian(f), or jax.grad of a function of jax.grad(f). For more, write the attention out "
    "in jax.numpy"
)


def _add_tangent(of: Primitive, name: str, tensors: int, function: Callable[..., Any]) -> Primitive:
    """The primitive whose operands are tangents of the first `tensors` operands of `of`, then all
    of them, and whose results are the tangents of its results; `function`: its meaning in XLA."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def shapes(*operands, **params):
        return of.abstract_eval(*operands[tensors:], **params)[0]

    def call(*operands, params):
        return primitive.bind(*operands, **dict(params))

    jitted = jax.jit(call, static_argnames="params")

    @primitive.def_impl
    def outside_jit(*operands, **params):
        return jitted(*operands, params=tuple(params.items()))

    def run(*operands, params):
        tangents, moving, rest = (
            operands[:tensors],
            operands[tensors : 2 * tensors],
            operands[2 * tensors :],
        )
        return jax.jvp(lambda *x: tuple(function(*x, *rest, **dict(params))), moving, tangents)[1]

    lower = lowering._lower_xla(run, ("params",))

    @functools.partial(mlir.register_lowering, primitive)
    def _(ctx, *operands, implementation, **params):
        return lower(ctx, *operands, params=tuple(params.items()))

    primitives._register_batching(
        primitive,
        lambda p, operands, dims, **params: primitives._batch_attention(
            p, 2 * tensors, operands, dims, **params
        ),
    )

    def refuse(primals, tangents, **params):
        raise NotImplementedError(NO_MORE_DERIVATIVES)

    def jvp(primals, tangents, *, implementation, **params):
        if implementation == "cubin":
            raise NotImplementedError(
                'implementation="cubin" has kernels for attention and its gradient, but none for '
                "forward-mode derivatives (jax.jvp, jax.jacfwd) and second derivatives: with "
                "implementation=None these run as blockwise XLA beside the kernels"
            )
        params["implementation"] = implementation
        moved = [ad.instantiate_zeros(x) for x in tangents[:tensors]]
        return of.bind(*primals, **params), primitive.bind(*moved, *primals, **params)

    ad.primitive_jvps[of] = jvp
    ad.primitive_jvps[primitive] = refuse
    return primitive


forward_tangent_p = _add_tangent(forward_p, "packax_forward_tangent", 3, lowering._xla_forward)
backward_tangent_p = _add_tangent(backward_p, "packax_backward_tangent", 7, lowering._xla_backward)
