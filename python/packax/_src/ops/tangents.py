"""Forward-mode derivatives of forward_p and backward_p, computed by blockwise XLA on all platforms.

Each derivative is a separate primitive, so that inside shard_map its loops are traced without mesh
axes. It has no kernels. autodiff.py builds jvps and second derivatives from these primitives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from packax._src.core.jax_compat import run_compiled
from packax._src.core.spec import differentiable
from packax._src.ops import lowering
from packax._src.ops.batching_rules import batch_attention, register_batching
from packax._src.ops.primitives import backward_p, forward_p

NO_MORE_DERIVATIVES = (
    "flash_attention can be differentiated twice, but not in this order: a forward-mode derivative "
    "(jax.jvp, jax.jacfwd, jax.linearize) cannot be differentiated in forward mode again, and a "
    "second derivative cannot be differentiated at all. Supported are jax.grad of a function of "
    "jax.jvp or jax.grad, jax.jvp(jax.grad(f), ...) and jax.hessian(f). For other derivatives, "
    "write attention in jax.numpy"
)


def _add_tangent(of: Primitive, name: str, function: Callable[..., Any]) -> Primitive:
    """Defines the tangent primitive of the primitive `of`, and the jvp of `of`.

    Its operands are the operands of `of`, followed by the tangents of the differentiable ones. Its
    results are the tangents of the results of `of`. `function` is the XLA implementation of `of`.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def shapes(*operands, spec, names):
        return of.abstract_eval(*operands[: len(names)], spec=spec, names=names)[0]

    def call(*operands, spec, names):
        return primitive.bind(*operands, spec=spec, names=names)

    jitted = jax.jit(call, static_argnames=("spec", "names"))
    primitive.def_impl(functools.partial(run_compiled, jitted))

    def run(*operands, spec, names):
        primals, tangents = operands[: len(names)], operands[len(names) :]
        differentiable_names = differentiable(names)

        def of_differentiable(*values):
            by_name = dict(zip(names, primals, strict=True)) | dict(
                zip(differentiable_names, values, strict=True)
            )
            return tuple(function(*by_name.values(), spec=spec, names=names))

        point = tuple(
            x for x, name in zip(primals, names, strict=True) if name in differentiable_names
        )
        return jax.jvp(of_differentiable, point, tuple(tangents))[1]

    mlir.register_lowering(primitive, lowering.lower_xla(run, ("spec", "names")))
    register_batching(primitive, batch_attention)

    def refuse(primals, tangents, **params):
        raise NotImplementedError(NO_MORE_DERIVATIVES)

    def jvp(primals, tangents, *, spec, names):
        if spec.implementation == "cuda":
            raise NotImplementedError(
                'implementation="cuda" has kernels for attention and its gradient, but not for '
                "forward-mode derivatives (jax.jvp, jax.jacfwd) and second derivatives: with "
                "implementation=None only these run as blockwise XLA"
            )
        differentiable_names = differentiable(names)
        input_tangents = [
            ad.instantiate_zeros(x)
            for x, n in zip(tangents, names, strict=True)
            if n in differentiable_names
        ]
        params = {"spec": spec, "names": names}
        return of.bind(*primals, **params), primitive.bind(*primals, *input_tangents, **params)

    ad.primitive_jvps[of] = jvp
    ad.primitive_jvps[primitive] = refuse
    return primitive


forward_tangent_p = _add_tangent(forward_p, "packax_forward_tangent", lowering.xla_forward)
backward_tangent_p = _add_tangent(backward_p, "packax_backward_tangent", lowering.xla_backward)
