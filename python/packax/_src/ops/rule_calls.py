"""Primitives whose rule defines what they compute, and how jax maps and differentiates it.

call_p is any function of flat operands, linear_p the derivative of one. A rule has `apply`. That of
call_p also has `named`, and `tangents`, the rule of its derivative. That of linear_p also has
`transpose` and, if it has a derivative in its residuals, `of_residuals`. autodiff.py has the rules
of attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from packax._src.core.jax_compat import check_for_nans, run_compiled
from packax._src.ops.tangents import NO_MORE_DERIVATIVES

Arrays = Sequence[Any]


# A function with a rule: its operands are flat, and its jaxpr is that of rule.apply.
call_p = Primitive("packax_call")
call_p.multiple_results = True


def bind(rule: Any, operands: Arrays) -> list[Any]:
    if not any(isinstance(x, jax.core.Tracer) for x in operands):
        # nothing to differentiate, map or trace
        return run_compiled(_jitted_call, *operands, rule=rule)
    # Traced once for all layers of a model: one jaxpr is also lowered once.
    jaxpr = _jitted_call.trace(*operands, rule=rule).jaxpr
    return call_p.bind(*operands, rule=rule, jaxpr=jaxpr)


@functools.partial(jax.jit, static_argnames="rule")
def _jitted_call(*operands, rule):
    return list(rule.apply(operands))


call_p.def_impl(lambda *operands, rule, jaxpr: run_compiled(_jitted_call, *operands, rule=rule))
check_for_nans(call_p)
mlir.register_lowering(
    call_p,
    mlir.lower_fun(
        lambda *operands, rule, jaxpr: jaxpr_as_fun(jaxpr)(*operands), multiple_results=True
    ),
)
call_p.def_effectful_abstract_eval(lambda *_, rule, jaxpr: (list(jaxpr.out_avals), jaxpr.effects))


def _call_jvp(primals, tangents, *, rule, jaxpr):
    results = rule.named(call_p.bind(*primals, rule=rule, jaxpr=jaxpr))
    has_tangent = tuple(type(x) is not ad.Zero for x in tangents)
    linear = rule.tangents(has_tangent, len(results))
    operands = [*results, *chosen(has_tangent, tangents), *primals, *results]
    return results, linear_p.bind(
        *operands, rule=linear, results=len(results), tangents=sum(has_tangent)
    )


def _call_batch(axis_data, operands, dims, *, rule, jaxpr):
    if all(d is None for d in dims):
        results = call_p.bind(*operands, rule=rule, jaxpr=jaxpr)
        return results, [None] * len(results)
    axis = _Axis(axis_data.size, axis_data.spmd_name)
    results = bind(_Mapped(rule, tuple(dims), axis), operands)
    return results, [0] * len(results)


ad.primitive_jvps[call_p] = _call_jvp
batching.fancy_primitive_batchers[call_p] = _call_batch


# A linear function of `tangents` operands with a known transpose. Its operands are `results` values
# like the results, then the tangents, then the residuals.
linear_p = Primitive("packax_linear")
linear_p.multiple_results = True


def _run_linear(*operands, rule, results, tangents):
    linear, residuals = split(operands[results:], tangents)
    return list(rule.apply(linear, residuals))


linear_p.def_impl(
    functools.partial(
        run_compiled, jax.jit(_run_linear, static_argnames=("rule", "results", "tangents"))
    )
)
check_for_nans(linear_p)
mlir.register_lowering(linear_p, mlir.lower_fun(_run_linear, multiple_results=True))
linear_p.def_abstract_eval(lambda *operands, rule, results, tangents: list(operands[:results]))


def _linear_transpose(cotangents, *operands, rule, results, tangents):
    found: list[Any] = [None] * len(operands)
    given = [None if type(x) is ad.Zero else x for x in cotangents]
    if any(x is not None for x in given):
        linear, residuals = split(operands[results:], tangents)
        for n, x in enumerate(rule.transpose(given, residuals)):
            found[results + n] = x if ad.is_undefined_primal(linear[n]) else None
    return found


def _linear_jvp(primals, moved, *, rule, results, tangents):
    params = {"rule": rule, "results": results, "tangents": tangents}
    like, rest = split(primals, results)
    at, held = split(rest, tangents)
    linear, residuals = split(moved[results:], tangents)
    values = linear_p.bind(*primals, **params)
    terms = []
    if any(type(x) is not ad.Zero for x in linear):
        along = map(ad.instantiate_zeros, linear)
        terms.append(linear_p.bind(*like, *along, *held, **params))
    has_tangent = tuple(type(x) is not ad.Zero for x in residuals)
    if any(has_tangent):
        of_residuals, read = _of_residuals(rule, has_tangent)
        some = chosen(read, residuals)
        terms.append(
            linear_p.bind(
                *like, *some, *held, *at, rule=of_residuals, results=results, tangents=len(some)
            )
        )
    return values, [functools.reduce(jnp.add, x) for x in zip(*terms, strict=True)]


def _of_residuals(rule: Any, has_tangent: tuple[bool, ...]) -> Any:
    """The rule of a linear function's derivative in its residuals, and which residuals it reads.

    Residuals of the new rule: those of this one, then the tangents that this one is applied to.
    """
    if not hasattr(rule, "of_residuals"):
        raise NotImplementedError(NO_MORE_DERIVATIVES)
    return rule.of_residuals(has_tangent)


def _linear_batch(axis_data, operands, dims, *, rule, results, tangents):
    params = {"results": results, "tangents": tangents}
    if all(d is None for d in dims):
        return linear_p.bind(*operands, rule=rule, **params), [None] * results
    front = [
        batching.bdim_at_front(x, d, axis_data.size)
        for x, d in zip(operands[:results], dims[:results], strict=True)
    ]
    axis = _Axis(axis_data.size, axis_data.spmd_name)
    linear, residuals = split(tuple(dims[results:]), tangents)
    mapped = _MappedTangents(rule, linear, residuals, axis)
    return linear_p.bind(*front, *operands[results:], rule=mapped, **params), [0] * results


ad.primitive_transposes[linear_p] = _linear_transpose
ad.primitive_jvps[linear_p] = _linear_jvp
batching.fancy_primitive_batchers[linear_p] = _linear_batch


# --- vmap


class _Mapped(NamedTuple):
    """A rule under vmap, its operands mapped along the axes `dims`, its results along axis 0."""

    rule: Any
    dims: tuple[int | None, ...]
    axis: _Axis

    def apply(self, operands: Arrays) -> Arrays:
        return self.axis.vmap(self.rule.apply, self.dims)(operands)

    def named(self, results: Arrays) -> Arrays:
        return self.rule.named(results)

    def tangents(self, has_tangent: tuple[bool, ...], results: int) -> _MappedTangents:
        rule = self.rule.tangents(has_tangent, results)
        tangents = tuple(chosen(has_tangent, self.dims))
        return _MappedTangents(rule, tangents, self.dims + (0,) * results, self.axis)


class _MappedTangents(NamedTuple):
    """A linear rule under vmap; the cotangents of results are mapped along axis 0, too."""

    rule: Any
    tangents: tuple[int | None, ...]
    residuals: tuple[int | None, ...]
    axis: _Axis

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        mapped = self.axis.vmap(self.rule.apply, self.tangents, self.residuals)
        return mapped(tangents, residuals)

    def of_residuals(
        self, has_tangent: tuple[bool, ...]
    ) -> tuple[_MappedTangents, tuple[bool, ...]]:
        rule, read = _of_residuals(self.rule, has_tangent)
        tangents = tuple(chosen(read, self.residuals))
        return _MappedTangents(rule, tangents, self.residuals + self.tangents, self.axis), read

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        mapped = self.axis.vmap(self.rule.transpose, (0,) * len(cotangents), self.residuals)
        found = mapped(cotangents, residuals)
        # An operand that is not mapped gets the sum over the mapped axis.
        return [
            x if x is None else x.sum(0) if dim is None else jnp.moveaxis(x, 0, dim)
            for x, dim in zip(found, self.tangents, strict=True)
        ]


class _Axis(NamedTuple):
    size: int
    spmd_name: Any

    def vmap(self, function: Callable[..., Arrays], *dims: tuple[int | None, ...]) -> Any:
        mapped = jax.vmap(
            lambda *x: list(function(*x)),
            in_axes=tuple(map(list, dims)),
            axis_size=self.size,
            spmd_axis_name=self.spmd_name,
        )
        return lambda *x: mapped(*map(list, x))


def split(values: Any, count: int) -> tuple[Any, Any]:
    return values[:count], values[count:]


def chosen(which: Sequence[bool], values: Arrays) -> list[Any]:
    return [x for chosen, x in zip(which, values, strict=True) if chosen]
