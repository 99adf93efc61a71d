"""How attention is differentiated: gradients by the kernels, everything else by blockwise XLA.

Two functions have derivatives, `attention`, and its transpose `gradients`. Their tangents are
linear functions that jax may run forward (jvp) or transpose (grad), and both ways are known:

    attention:  forward  J u                          transposed  J^T c, which is `gradients`
    gradients:  forward  J^T dc + d/dx(J^T c) u       transposed  (J w, d/dx(J^T c) w)

The last one holds because d/dx(J^T c) is the Hessian of c . attention(x), which is symmetric: so
second derivatives need no transpose of a loop, only jvps of the loops (ops/tangents.py). For the
same reason the derivative of J u, for a fixed u, has a transpose, d/dx(J^T c) u: so a loss may hold
a jvp of attention (`_OfTangents`). Run forward it would be a jvp of a jvp, which there is not.

jax's own custom_vjp has no forward mode, and custom_jvp no transpose that is not traced; so these
are primitives, each with a `rule` that says what it computes on flat operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from packax._src.context import shard
from packax._src.context.rank_passes import Call
from packax._src.core.jax_compat import check_for_nans, run_compiled
from packax._src.core.mask import AttentionMask
from packax._src.ops.score_mods import Beside
from packax._src.ops.tangents import NO_MORE_DERIVATIVES

CHECKPOINT_NAMES = ("packax_out", "packax_lse")
"""The results' names for `jax.checkpoint_policies.save_only_these_names`."""

Arrays = Sequence[Any]


def attention(call: Call, inputs: Any, mask: AttentionMask, beside: Beside) -> list[Any]:
    """out (B, Sq, H, Dv), lse (B, H, Sq), and on request the rows' largest logits, like lse.

    inputs: query, key, value, scores: what has a gradient. beside: arrays that have none. The
    largest logits have no gradient: for `jax.lax.stop_gradient`.
    """
    leaves, tree = jax.tree.flatten((inputs, mask, beside))
    return _bind(_Attention(call, len(jax.tree.leaves(inputs)), tree), leaves)


class _Attention(NamedTuple):
    call: Call
    inputs: int  # their leaves, which are the first operands
    tree: Any  # of (inputs, mask, beside)

    def apply(self, operands: Arrays) -> Arrays:
        (query, key, value, scores), mask, beside = jax.tree.unflatten(self.tree, operands)
        results = shard.forward(self.call, query, key, value, scores, mask, beside)
        return [x for x in results if x is not None]

    def named(self, results: Arrays) -> Arrays:
        # The backward pass reads the named values, so a policy that keeps them spares the kernel.
        read, others = results[:2], results[2:]
        read = [checkpoint_name(x, n) for x, n in zip(read, CHECKPOINT_NAMES, strict=True)]
        name = self.call.checkpoint_name
        if name is not None:
            read = [checkpoint_name(x, name) for x in read]  # beside: a policy keeps any of them
        return [*read, *others]

    def tangents(self, moving: tuple[bool, ...], results: int) -> _OfAttention:
        return _OfAttention(self, moving[: self.inputs])


class _Gradients(NamedTuple):
    """The gradients of the inputs that call.needs_grad says.

    Operands: those of attention, then out, lse, dout and, if call.return_lse, dlse.
    """

    attention: _Attention

    def apply(self, operands: Arrays) -> Arrays:
        call, tree = self.attention.call, self.attention.tree
        primals, (out, lse, dout, *rest) = _split(operands, tree.num_leaves)
        (query, key, value, scores), mask, beside = jax.tree.unflatten(tree, primals)
        (dlse,) = rest or (lse,)
        found = shard.backward(call, query, key, value, scores, out, lse, dout, dlse, mask, beside)
        return _chosen(call.needs_grad, jax.tree.leaves(found))

    def named(self, results: Arrays) -> Arrays:
        return results

    def tangents(self, moving: tuple[bool, ...], results: int) -> _OfGradients:
        return _OfGradients(self, moving)


class _OfAttention(NamedTuple):
    """From tangents of the moving inputs to those of the results; residuals: operands, results."""

    attention: _Attention
    moving: tuple[bool, ...]  # which inputs

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        operands = residuals[: self.attention.tree.num_leaves]
        return _derivative(self.attention.apply, operands, self.moving, tangents)

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        dout, dlse = cotangents[:2]  # the largest logits have none
        residuals = residuals[: self.attention.tree.num_leaves + 2]
        dout = jnp.zeros_like(residuals[-2]) if dout is None else dout
        call = self.attention.call._replace(
            needs_grad=self.moving, return_lse=dlse is not None, return_max_logits=False
        )
        rule = _Gradients(self.attention._replace(call=call))
        return _bind(rule, [*residuals, dout, *([] if dlse is None else [dlse])])

    def of_residuals(self, moving: tuple[bool, ...]) -> tuple[_OfTangents, tuple[bool, ...]]:
        # The results among the residuals are functions of the inputs, and are not read.
        inputs = moving[: self.attention.inputs]
        read = (*inputs, *[False] * (len(moving) - len(inputs)))
        return _OfTangents(self, inputs), read


class _OfTangents(NamedTuple):
    """From tangents of the moving inputs to those of J u, for a fixed u.

    Residuals: operands and results of the attention, then u.
    """

    inner: _OfAttention
    moving: tuple[bool, ...]  # which inputs

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        raise NotImplementedError(NO_MORE_DERIVATIVES)

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        attention = self.inner.attention
        operands, along = _split(residuals, len(residuals) - sum(self.inner.moving))
        out, *rest = operands[attention.tree.num_leaves :]
        dout, dlse = cotangents[:2]
        dout = jnp.zeros_like(out) if dout is None else dout
        call = attention.call._replace(
            needs_grad=self.moving, return_lse=dlse is not None, return_max_logits=False
        )
        operands = [*operands[: attention.tree.num_leaves], out, rest[0], dout]
        operands += [] if dlse is None else [dlse]
        gradients = _Gradients(attention._replace(call=call))
        return _OfGradients(gradients, self.inner.moving).apply(along, operands)


class _OfGradients(NamedTuple):
    """From tangents of operands to those of the gradients; residuals: operands, results.

    out and lse are functions of the inputs, so that their own tangents say nothing more.
    """

    gradients: _Gradients
    moving: tuple[bool, ...]  # which operands

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        attention = self.gradients.attention
        operands = residuals[: attention.tree.num_leaves + 3 + attention.call.return_lse]

        def whole(operands):
            primals, (_, _, *cotangents) = _split(operands, attention.tree.num_leaves)
            results = attention.apply(primals)
            return self.gradients.apply([*primals, *results, *cotangents])

        return _derivative(whole, operands, self.moving, tangents)

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        attention = self.gradients.attention
        operands = residuals[: len(self.moving)]
        count = attention.tree.num_leaves
        # A direction in the inputs: zero where a gradient was not needs_grad, or has no cotangent.
        given = iter(cotangents)
        placed = [next(given) if needs_grad else None for needs_grad in attention.call.needs_grad]
        along = tuple(x is not None for x in placed)
        direction = [x for x in placed if x is not None]
        found: list[Any] = [None] * len(self.moving)
        inputs, seeds = self.moving[: attention.inputs], self.moving[count + 2 :]
        if any(inputs):
            call = attention.call._replace(needs_grad=inputs)
            hessian = _OfGradients(_Gradients(attention._replace(call=call)), along)
            rows = iter(hessian.apply(direction, operands))
            found[: len(inputs)] = [next(rows) if moving else None for moving in inputs]
        if any(seeds):
            found[count + 2 :] = _OfAttention(attention, along).apply(
                direction, operands[: count + 2]
            )[: len(seeds)]
        return _chosen(self.moving, found)


class _Mapped(NamedTuple):
    """A rule under vmap, its operands mapped along the axes `dims`, its results along axis 0."""

    rule: Any
    dims: tuple[int | None, ...]
    axis: _Axis

    def apply(self, operands: Arrays) -> Arrays:
        return self.axis.vmap(self.rule.apply, self.dims)(operands)

    def named(self, results: Arrays) -> Arrays:
        return self.rule.named(results)

    def tangents(self, moving: tuple[bool, ...], results: int) -> _MappedTangents:
        rule = self.rule.tangents(moving, results)
        tangents = tuple(_chosen(moving, self.dims))
        return _MappedTangents(rule, tangents, self.dims + (0,) * results, self.axis)


class _MappedTangents(NamedTuple):
    """Likewise; the cotangents of results are mapped along axis 0, too."""

    rule: Any
    tangents: tuple[int | None, ...]
    residuals: tuple[int | None, ...]
    axis: _Axis

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        mapped = self.axis.vmap(self.rule.apply, self.tangents, self.residuals)
        return mapped(tangents, residuals)

    def of_residuals(self, moving: tuple[bool, ...]) -> tuple[_MappedTangents, tuple[bool, ...]]:
        rule, read = _of_residuals(self.rule, moving)
        tangents = tuple(_chosen(read, self.residuals))
        return _MappedTangents(rule, tangents, self.residuals + self.tangents, self.axis), read

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        mapped = self.axis.vmap(self.rule.transpose, (0,) * len(cotangents), self.residuals)
        found = mapped(cotangents, residuals)
        # What is one for all gets the sum of all.
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


def _split(values: Any, count: int) -> tuple[Any, Any]:
    return values[:count], values[count:]


def _chosen(which: Sequence[bool], values: Arrays) -> list[Any]:
    return [x for chosen, x in zip(which, values, strict=True) if chosen]


def _derivative(
    function: Callable[[Arrays], Arrays], at: Arrays, moving: Sequence[bool], tangents: Arrays
) -> Arrays:
    """The derivative of a function of flat operands along tangents of the moving ones."""
    moving = (*moving, *[False] * (len(at) - len(moving)))

    def of(*some):
        rest = iter(some)
        merged = [next(rest) if m else x for m, x in zip(moving, at, strict=True)]
        return list(function(merged))

    return jax.jvp(of, _chosen(moving, at), list(tangents))[1]


# A function with a rule: its operands are flat, its jaxpr is rule.apply of them.
call_p = Primitive("packax_call")
call_p.multiple_results = True


def _bind(rule: Any, operands: Arrays) -> list[Any]:
    if not any(isinstance(x, jax.core.Tracer) for x in operands):
        # nothing to derive, map or trace
        return run_compiled(_jitted_call, *operands, rule=rule)
    # Traced once for all layers of a model: what is one jaxpr is lowered once, too.
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
    moving = tuple(type(x) is not ad.Zero for x in tangents)
    linear = rule.tangents(moving, len(results))
    operands = [*results, *_chosen(moving, tangents), *primals, *results]
    return results, linear_p.bind(
        *operands, rule=linear, results=len(results), tangents=sum(moving)
    )


def _call_batch(axis_data, operands, dims, *, rule, jaxpr):
    if all(d is None for d in dims):
        results = call_p.bind(*operands, rule=rule, jaxpr=jaxpr)
        return results, [None] * len(results)
    axis = _Axis(axis_data.size, axis_data.spmd_name)
    results = _bind(_Mapped(rule, tuple(dims), axis), operands)
    return results, [0] * len(results)


ad.primitive_jvps[call_p] = _call_jvp
batching.fancy_primitive_batchers[call_p] = _call_batch


# A linear function of `tangents` operands with a known transpose. Before them come `results`
# values like the results, after them the residuals.
linear_p = Primitive("packax_linear")
linear_p.multiple_results = True


def _run_linear(*operands, rule, results, tangents):
    moving, residuals = _split(operands[results:], tangents)
    return list(rule.apply(moving, residuals))


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
        linear, residuals = _split(operands[results:], tangents)
        for n, x in enumerate(rule.transpose(given, residuals)):
            found[results + n] = x if ad.is_undefined_primal(linear[n]) else None
    return found


def _linear_jvp(primals, moved, *, rule, results, tangents):
    params = {"rule": rule, "results": results, "tangents": tangents}
    like, rest = _split(primals, results)
    at, held = _split(rest, tangents)
    linear, residuals = _split(moved[results:], tangents)
    values = linear_p.bind(*primals, **params)
    terms = []
    if any(type(x) is not ad.Zero for x in linear):
        along = map(ad.instantiate_zeros, linear)
        terms.append(linear_p.bind(*like, *along, *held, **params))
    moving = tuple(type(x) is not ad.Zero for x in residuals)
    if any(moving):
        of_residuals, read = _of_residuals(rule, moving)
        some = _chosen(read, residuals)
        terms.append(
            linear_p.bind(
                *like, *some, *held, *at, rule=of_residuals, results=results, tangents=len(some)
            )
        )
    return values, [functools.reduce(jnp.add, x) for x in zip(*terms, strict=True)]


def _of_residuals(rule: Any, moving: tuple[bool, ...]) -> Any:
    """The rule of what a linear function is of its residuals, if those move, and which it reads.

    Residuals of that rule: those of this one, then the tangents that this one is applied to.
    """
    if not hasattr(rule, "of_residuals"):
        raise NotImplementedError(NO_MORE_DERIVATIVES)
    return rule.of_residuals(moving)


def _linear_batch(axis_data, operands, dims, *, rule, results, tangents):
    params = {"results": results, "tangents": tangents}
    if all(d is None for d in dims):
        return linear_p.bind(*operands, rule=rule, **params), [None] * results
    front = [
        batching.bdim_at_front(x, d, axis_data.size)
        for x, d in zip(operands[:results], dims[:results], strict=True)
    ]
    axis = _Axis(axis_data.size, axis_data.spmd_name)
    moving, residuals = _split(tuple(dims[results:]), tangents)
    mapped = _MappedTangents(rule, moving, residuals, axis)
    return linear_p.bind(*front, *operands[results:], rule=mapped, **params), [0] * results


ad.primitive_transposes[linear_p] = _linear_transpose
ad.primitive_jvps[linear_p] = _linear_jvp
batching.fancy_primitive_batchers[linear_p] = _linear_batch
