"""Differentiation of attention: gradients run in the kernels, other derivatives in blockwise XLA.

Two functions have derivatives: `attention`, and its transpose `gradients`. Their tangents are
linear functions, which jax may run forward (jvp) or transpose (grad). Both directions are known:

    attention:  forward  J u                          transposed  J^T c, which is `gradients`
    gradients:  forward  J^T dc + d/dx(J^T c) u       transposed  (J w, d/dx(J^T c) w)

The last transpose holds because d/dx(J^T c) is the Hessian of c . attention(x), which is symmetric.
So second derivatives never transpose a loop, and need only jvps of loops (ops/tangents.py). For the
same reason, the derivative of J u for a fixed u has the transpose d/dx(J^T c) u, so a loss may
contain a jvp of attention (`_OfTangents`). A jvp of a jvp is not implemented.

jax's custom_vjp has no forward mode, and custom_jvp transposes only what it traces. So there are
two primitives, each with a `rule` that defines its computation on flat operands: call_p is any
function, linear_p is the derivative of a function. All rules have `apply`. Rules of call_p also
have `named`, which names the results for jax.checkpoint, and `tangents`, which returns the rule of
the derivative. Rules of linear_p also have `transpose` and, if they can be differentiated with
respect to their residuals, `of_residuals`. The rules of attention come first, then the vmap and
differentiation of any rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from packax._src.context import shard
from packax._src.core.context_mask import ContextMask
from packax._src.core.jax_compat import check_for_nans, run_compiled
from packax._src.core.mask import AttentionMask
from packax._src.core.spec import DIFFERENTIABLE, AttentionSpec
from packax._src.ops import primitives, row_sums
from packax._src.ops.primitives import Inputs
from packax._src.ops.tangents import NO_MORE_DERIVATIVES, tangent_pass

Arrays = Sequence[Any]

CHECKPOINT_NAMES = ("packax_out", "packax_lse")
"""The names of the results for `jax.checkpoint_policies.save_only_these_names`."""


def attention(spec: AttentionSpec, inputs: Inputs) -> list[Any]:
    """out (B, Sq, H, Dv), lse (ops/row_sums.py), and with max_logits each row's largest logit,
    (B, H, Sq).

    The largest logits have no gradient: callers use them under `jax.lax.stop_gradient`.
    """
    leaves, tree = jax.tree.flatten(inputs)
    score_names = (name for name, x in inputs.scores._asdict().items() if x is not None)
    names = (*DIFFERENTIABLE[:3], *score_names)
    return bind(_Attention(spec, names, tree), leaves)


def _passes_for(spec: AttentionSpec, mask: AttentionMask) -> Any:
    """The module with the passes: `shard` with ranks or permuted keys, otherwise `primitives`."""
    permuted = isinstance(mask, ContextMask) and mask.kv_plan is not None
    return shard if permuted or spec.layout.on_mesh else primitives


class _Attention(NamedTuple):
    spec: AttentionSpec
    inputs: tuple[str, ...]  # names from DIFFERENTIABLE of the first operands
    tree: Any  # the tree structure of `Inputs`

    def apply(self, operands: Arrays) -> Arrays:
        x: Inputs = jax.tree.unflatten(self.tree, operands)
        return _passes_for(self.spec, x.mask).forward_pass(self.spec, x)

    def gradients(self, has_tangent: tuple[bool, ...], has_dlse: bool) -> _Gradients:
        needs_grad = tuple(chosen(has_tangent, self.inputs))
        spec = dataclasses.replace(self.spec, needs_grad=needs_grad, max_logits=False)
        return _Gradients(self._replace(spec=spec), has_dlse)

    def named(self, results: Arrays) -> Arrays:
        # The backward pass reads the named values, so a policy that saves them avoids a kernel run.
        read, others = results[:2], results[2:]
        read = [checkpoint_name(x, n) for x, n in zip(read, CHECKPOINT_NAMES, strict=True)]
        name = self.spec.checkpoint_name
        if name is not None:
            read = [checkpoint_name(x, name) for x in read]  # a policy may use either name
        return [*read, *others]

    def tangents(self, has_tangent: tuple[bool, ...], results: int) -> _OfAttention:
        return _OfAttention(self, has_tangent[: len(self.inputs)])


class _Gradients(NamedTuple):
    """The gradients of the inputs named in spec.needs_grad.

    Operands: the operands of attention, then out, lse, dout and, if present, dlse.
    """

    attention: _Attention
    has_dlse: bool

    def apply(self, operands: Arrays) -> Arrays:
        spec, inputs, tree = self.attention
        primals, (out, lse, dout, *rest) = split(operands, tree.num_leaves)
        (dlse,) = rest or (None,)
        x: Inputs = jax.tree.unflatten(tree, primals)
        x = x._replace(out=out, lse=lse, dout=dout, dlse=dlse)
        found = _passes_for(spec, x.mask).backward_pass(spec, x)
        return chosen([x in spec.needs_grad for x in inputs], jax.tree.leaves(found))

    def named(self, results: Arrays) -> Arrays:
        return results

    def tangents(self, has_tangent: tuple[bool, ...], results: int) -> _OfGradients:
        return _OfGradients(self, has_tangent)


class _OfAttention(NamedTuple):
    """Maps tangents of inputs to tangents of the results. Residuals: operands, results."""

    attention: _Attention
    has_tangent: tuple[bool, ...]  # which inputs

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        spec, inputs, tree = self.attention
        operands, (out, lse, *top) = split(residuals, tree.num_leaves)
        x: Inputs = jax.tree.unflatten(tree, operands)
        along = dict(zip(chosen(self.has_tangent, inputs), tangents, strict=True))
        of_scores = x.scores.sinks is not None or not set(along).issubset(DIFFERENTIABLE[:3])
        if of_scores or _passes_for(spec, x.mask) is not primitives:
            return _derivative(self.attention.apply, operands, self.has_tangent, tangents)
        moved = tangent_pass(spec, x._replace(out=out, lse=lse), along)
        return [*moved, *map(jnp.zeros_like, top)]

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        dout, dlse = cotangents[:2]  # the largest logits have none
        dlse = None if dlse is None else row_sums.of_log(dlse)
        residuals = residuals[: self.attention.tree.num_leaves + 2]
        dout = jnp.zeros_like(residuals[-2]) if dout is None else dout
        rule = self.attention.gradients(self.has_tangent, dlse is not None)
        return bind(rule, [*residuals, dout, *([] if dlse is None else [dlse])])

    def of_residuals(self, has_tangent: tuple[bool, ...]) -> tuple[_OfTangents, tuple[bool, ...]]:
        # `apply` does not read the results, which are functions of the inputs.
        inputs = has_tangent[: len(self.attention.inputs)]
        read = (*inputs, *[False] * (len(has_tangent) - len(inputs)))
        return _OfTangents(self, inputs), read


class _OfTangents(NamedTuple):
    """Maps tangents of inputs to tangents of J u, for a fixed u.

    Residuals: operands and results of attention, then u.
    """

    inner: _OfAttention
    has_tangent: tuple[bool, ...]  # which inputs

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        raise NotImplementedError(NO_MORE_DERIVATIVES)

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        attention = self.inner.attention
        operands, along = split(residuals, len(residuals) - sum(self.inner.has_tangent))
        out, *rest = operands[attention.tree.num_leaves :]
        dout, dlse = cotangents[:2]
        dout = jnp.zeros_like(out) if dout is None else dout
        dlse = None if dlse is None else row_sums.of_log(dlse)
        operands = [*operands[: attention.tree.num_leaves], out, rest[0], dout]
        operands += [] if dlse is None else [dlse]
        gradients = attention.gradients(self.has_tangent, dlse is not None)
        return _OfGradients(gradients, self.inner.has_tangent).apply(along, operands)


class _OfGradients(NamedTuple):
    """Maps tangents of operands to tangents of the gradients. Residuals: operands, results.

    The tangents of out and lse are ignored, because they are functions of the inputs.
    """

    gradients: _Gradients
    has_tangent: tuple[bool, ...]  # which operands

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        attention = self.gradients.attention
        operands = residuals[: attention.tree.num_leaves + 3 + self.gradients.has_dlse]

        def whole(operands):
            primals, (_, _, *cotangents) = split(operands, attention.tree.num_leaves)
            results = attention.apply(primals)
            return self.gradients.apply([*primals, *results, *cotangents])

        return _derivative(whole, operands, self.has_tangent, tangents)

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        attention = self.gradients.attention
        operands = residuals[: len(self.has_tangent)]
        count = attention.tree.num_leaves
        # A direction in the inputs: None for inputs without a gradient, or without a cotangent.
        given = iter(cotangents)
        needs_grad = attention.spec.needs_grad
        by_input = [next(given) if x in needs_grad else None for x in attention.inputs]
        along = tuple(x is not None for x in by_input)
        direction = [x for x in by_input if x is not None]
        found: list[Any] = [None] * len(self.has_tangent)
        inputs, seeds = self.has_tangent[: len(attention.inputs)], self.has_tangent[count + 2 :]
        if any(inputs):
            gradients = attention.gradients(inputs, self.gradients.has_dlse)
            hessian = _OfGradients(gradients, along)
            rows = iter(hessian.apply(direction, operands))
            found[: len(inputs)] = [next(rows) if has else None for has in inputs]
        if any(seeds):
            out, lse = _OfAttention(attention, along).apply(direction, operands[: count + 2])
            found[count + 2 :] = [out, row_sums.of_log(lse)][: len(seeds)]
        return chosen(self.has_tangent, found)


def _derivative(
    function: Callable[[Arrays], Arrays], at: Arrays, has_tangent: Sequence[bool], tangents: Arrays
) -> Arrays:
    """The jvp of a function of flat operands; `tangents` are those of operands with has_tangent."""
    has_tangent = (*has_tangent, *[False] * (len(at) - len(has_tangent)))

    def of(*some):
        rest = iter(some)
        merged = [next(rest) if m else x for m, x in zip(has_tangent, at, strict=True)]
        return list(function(merged))

    return jax.jvp(of, chosen(has_tangent, at), list(tangents))[1]


# --- call_p: a function that a rule defines, on flat operands; its jaxpr is that of rule.apply

call_p = Primitive("packax_call")
call_p.multiple_results = True


def bind(rule: Any, operands: Arrays) -> list[Any]:
    if not any(isinstance(x, jax.core.Tracer) for x in operands):
        # Nothing to differentiate, map or trace.
        return run_compiled(_jitted_call, *operands, rule=rule)
    # Traced once for all layers of a model; a shared jaxpr is also lowered once.
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


# --- linear_p: a linear function with a known transpose. Its operands are `results` values with the
# types of the results, then `tangents` tangents, then the residuals.

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


def _linear_jvp(primals, input_tangents, *, rule, results, tangents):
    params = {"rule": rule, "results": results, "tangents": tangents}
    result_like, rest = split(primals, results)
    point, residual_values = split(rest, tangents)
    linear, residuals = split(input_tangents[results:], tangents)
    values = linear_p.bind(*primals, **params)
    terms = []
    if any(type(x) is not ad.Zero for x in linear):
        along = map(ad.instantiate_zeros, linear)
        terms.append(linear_p.bind(*result_like, *along, *residual_values, **params))
    has_tangent = tuple(type(x) is not ad.Zero for x in residuals)
    if any(has_tangent):
        of_residuals, read = _of_residuals(rule, has_tangent)
        some = chosen(read, residuals)
        params = {"rule": of_residuals, "results": results, "tangents": len(some)}
        terms.append(linear_p.bind(*result_like, *some, *residual_values, *point, **params))
    return values, [functools.reduce(jnp.add, x) for x in zip(*terms, strict=True)]


def _of_residuals(rule: Any, has_tangent: tuple[bool, ...]) -> Any:
    """The rule of the derivative with respect to residuals, and which of these it reads.

    The residuals of the new rule are those of the given rule, followed by its tangents.
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
    """A rule under vmap. Operands are mapped along the axes `dims`, results along axis 0."""

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
    """A linear rule under vmap. Results and their cotangents are mapped along axis 0."""

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
        # The cotangent of an unmapped operand is the sum over the mapped axis.
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
