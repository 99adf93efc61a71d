"""Forward-mode derivatives of forward_p and backward_p. autodiff.py builds jvps and second
derivatives from these primitives.

forward_tangent_p: leaves of `Operands` with out and lse, then the tangents of the operands
    `tangents` -> the tangents of out and lse
backward_tangent_p: leaves of `Operands`, then tangents -> the tangents of backward_p's results
The first runs on kernels where it can; otherwise both run in blockwise XLA. They are separate
primitives, so that inside shard_map their loops are traced without mesh axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from packax._src.core.sharding import vary_together
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import ffi, lowering, partition_rules, xla_attention
from packax._src.ops.batching_rules import batch_attention, register_batching
from packax._src.ops.primitives import (
    Inputs,
    backward_p,
    forward_p,
    forward_results,
    new_primitive,
    operands_of,
)
from packax._src.ops.score_mods import add_sinks

NO_MORE_DERIVATIVES = (
    "flash_attention can be differentiated twice, but not in this order: a forward-mode derivative "
    "(jax.jvp, jax.jacfwd, jax.linearize) cannot be differentiated in forward mode again, and a "
    "second derivative cannot be differentiated at all. Supported are jax.grad of a function of "
    "jax.jvp or jax.grad, jax.jvp(jax.grad(f), ...) and jax.hessian(f). For other derivatives, "
    "write attention in jax.numpy"
)


def _no_kernels(what: str) -> NotImplementedError:
    return NotImplementedError(
        f'implementation="cuda" has no kernels for {what}: with implementation=None only these run '
        "as blockwise XLA"
    )


def _tangent_primitive(name: str) -> Primitive:
    """Its parameters are spec, names and tangents (names of the operands that have one)."""
    primitive = new_primitive(name, ("spec", "names", "tangents"))
    register_batching(primitive, batch_attention)

    def refuse(primals, input_tangents, **params):
        raise NotImplementedError(NO_MORE_DERIVATIVES)

    ad.primitive_jvps[primitive] = refuse
    return primitive


def _with_tangent(names: tuple[str, ...], tangents: Any) -> tuple[tuple[str, ...], list[Any]]:
    """The operands that have a tangent, and these tangents."""
    some = [(n, x) for n, x in zip(names, tangents, strict=True) if type(x) is not ad.Zero]
    floating = [(n, x) for n, x in some if x.dtype != jax.dtypes.float0]
    return tuple(n for n, _ in floating), [x for _, x in floating]


def _with_names(
    values: Any, names: tuple[str, ...], tangents: tuple[str, ...]
) -> tuple[Operands, dict[str, jax.Array]]:
    """The operands, and their tangents by name."""
    count = len(names)
    along = dict(zip(tangents, values[count:], strict=True))
    return Operands.of(names, values[:count]), along


# --- The tangent of the forward

forward_tangent_p = _tangent_primitive("packax_forward_tangent")


@forward_tangent_p.def_abstract_eval
def _forward_tangent_shapes(query, *avals, spec, names, tangents):
    of = Operands.of(names, (query, *avals[: len(names) - 1]))
    return forward_results(spec, of, query.shape[2])


def _run_forward_tangent(*operands, spec, names, tangents, on_gpu):
    """The derivative of the blockwise loops."""
    x, along = _with_names(operands, names, tangents)

    def of_some(some):
        return tuple(xla_attention.forward(spec, x._replace(**some), on_gpu, False))

    return jax.jvp(of_some, ({n: getattr(x, n) for n in along},), (along,))[1]


def _run_backward_tangent(*operands, spec, names, tangents, on_gpu):
    x, along = _with_names(operands, names, tangents)
    return xla_attention.backward(spec, x, on_gpu, along)


def _in_xla(run: Callable[..., Any], on_gpu: bool) -> Any:
    run = functools.partial(run, on_gpu=on_gpu)
    return lowering.lower_xla(run, ("spec", "names", "tangents"))


_forward_tangent_xla_gpu = _in_xla(_run_forward_tangent, True)


def _forward_tangent_cuda(ctx, *operands, spec, names, tangents):
    params = {"spec": spec, "names": names, "tangents": tangents}
    if spec.implementation != "xla":
        of = Operands.of(names, ctx.avals_in[: len(names)])
        if ffi.has_tangent_kernel(of, spec, tangents):
            return ffi.run_once(ctx, ffi.forward_tangent(ctx, operands, **params))
        if spec.implementation == "cuda":
            raise _no_kernels(
                f"the forward-mode derivative of this call ({of.query.dtype}, head dims "
                f"{of.query.shape[3]}/{of.value.shape[3]}, tangents of {', '.join(tangents)})"
            )
    return _forward_tangent_xla_gpu(ctx, *operands, **params)


lowering.register(
    forward_tangent_p,
    partition_rules.forward_tangent,
    _in_xla(_run_forward_tangent, False),
    _forward_tangent_cuda,
)


def _forward_tangent(
    spec: AttentionSpec, operands: Operands, tangents: tuple[str, ...], along: list[jax.Array]
) -> list[jax.Array]:
    """`operands`: the operands of forward_p, followed by its results out and lse."""
    operands = operands._replace(q_order_192=None)
    spec = dataclasses.replace(spec, max_logits=False, needs_grad=())
    return forward_tangent_p.bind(
        *operands.leaves, *along, spec=spec, names=operands.names, tangents=tangents
    )


def tangent_pass(spec: AttentionSpec, x: Inputs, along: dict[str, jax.Array]) -> list[jax.Array]:
    """The tangents of out and lse, the results of forward_pass without sinks. `along`: tangents of
    query, key and value, by name."""
    x, along = vary_together(x, along)
    operands = operands_of("forward", spec, x)
    return _forward_tangent(spec.of_primitive(x.mask), operands, tuple(along), [*along.values()])


def _forward_jvp(primals, tangents, *, spec, names):
    if "sinks" in names:
        return _jvp_with_sinks(primals, tangents, spec, names)
    out, lse, *top = forward_p.bind(*primals, spec=spec, names=names)
    operands = Operands.of(names, primals)._replace(out=out, lse=lse)
    moved = _forward_tangent(spec, operands, *_with_tangent(names, tangents))
    return [out, lse, *top], [*moved, *map(jnp.zeros_like, top)]


def _jvp_with_sinks(primals, tangents, spec, names):
    """The jvp of a forward without sinks, and of adding them to its results."""
    some, along = _with_tangent(names, tangents)
    given = dict(zip(names, primals, strict=True))

    def of_some(*values):
        x = given | dict(zip(some, values, strict=True))
        sinks = x.pop("sinks")
        out, lse, *top = forward_p.bind(*x.values(), spec=spec, names=tuple(x))
        return [*add_sinks(out, lse, sinks), *top]

    return jax.jvp(of_some, [given[name] for name in some], along)


ad.primitive_jvps[forward_p] = _forward_jvp


# --- The tangent of the backward

backward_tangent_p = _tangent_primitive("packax_backward_tangent")


@backward_tangent_p.def_abstract_eval
def _backward_tangent_shapes(*avals, spec, names, tangents):
    return backward_p.abstract_eval(*avals[: len(names)], spec=spec, names=names)[0]


mlir.register_lowering(backward_tangent_p, _in_xla(_run_backward_tangent, False))
mlir.register_lowering(backward_tangent_p, _in_xla(_run_backward_tangent, True), platform="cuda")


def _backward_jvp(primals, tangents, *, spec, names):
    if spec.implementation == "cuda":
        raise _no_kernels("second derivatives")
    params = {"spec": spec, "names": names}
    of_names, along = _with_tangent(names, tangents)
    results = backward_p.bind(*primals, **params)
    return results, backward_tangent_p.bind(*primals, *along, **params, tangents=of_names)


ad.primitive_jvps[backward_p] = _backward_jvp
