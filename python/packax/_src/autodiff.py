"""How attention is differentiated: gradients by the kernels, everything else by blockwise XLA.

Two functions have derivatives: `attention`, and its transpose `gradients`. Their tangents are
linear functions that jax may run forward (jvp) or transpose (grad). Both directions are known:

    attention:  forward  J u                          transposed  J^T c, which is `gradients`
    gradients:  forward  J^T dc + d/dx(J^T c) u       transposed  (J w, d/dx(J^T c) w)

The last one holds because d/dx(J^T c) is the Hessian of c . attention(x), which is symmetric. So
second derivatives never transpose a loop: they need only jvps of loops (ops/tangents.py). For the
same reason the derivative of J u, for a fixed u, has a transpose, d/dx(J^T c) u, so a loss may
contain a jvp of attention (`_OfTangents`). A jvp of a jvp is not implemented.

jax's custom_vjp has no forward mode, and custom_jvp can only transpose what it traces. So these are
primitives, each with a `rule` that defines what it computes on flat operands (ops/rule_calls.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from packax._src.context import shard
from packax._src.core.mask import AttentionMask
from packax._src.core.spec import DIFFERENTIABLE, AttentionSpec
from packax._src.ops import passes, row_sums
from packax._src.ops.rule_calls import Arrays, bind, chosen, split
from packax._src.ops.score_mods import NonDiffOperands
from packax._src.ops.tangents import NO_MORE_DERIVATIVES

CHECKPOINT_NAMES = ("packax_out", "packax_lse")
"""The results' names for `jax.checkpoint_policies.save_only_these_names`."""


def attention(
    spec: AttentionSpec, inputs: Any, mask: AttentionMask, fixed: NonDiffOperands
) -> list[Any]:
    """out (B, Sq, H, Dv), lse (ops/row_sums.py), and with max_logits the rows' largest logits (B,
    H, Sq).

    inputs: query, key, value and ScoreParams, the differentiable ones. The largest logits have no
    gradient: they are used under `jax.lax.stop_gradient`.
    """
    leaves, tree = jax.tree.flatten((inputs, mask, fixed))
    score_names = zip(inputs[3]._fields, inputs[3], strict=True)
    names = (*DIFFERENTIABLE[:3], *(name for name, x in score_names if x is not None))
    return bind(_Attention(spec, names, tree), leaves)


def _passes_for(spec: AttentionSpec, mask: AttentionMask) -> Any:
    """The module of the passes: for one device, unless there are ranks or a plan permuted keys."""
    return passes if spec.layout is None and mask.kv_plan is None else shard


class _Attention(NamedTuple):
    spec: AttentionSpec
    inputs: tuple[str, ...]  # names from DIFFERENTIABLE: the first operands
    tree: Any  # the tree structure of (inputs, mask, fixed)

    def apply(self, operands: Arrays) -> Arrays:
        (query, key, value, scores), mask, fixed = jax.tree.unflatten(self.tree, operands)
        return _passes_for(self.spec, mask).forward(
            self.spec, query, key, value, scores, mask, fixed
        )

    def gradients(self, has_tangent: tuple[bool, ...], has_dlse: bool) -> _Gradients:
        needs_grad = tuple(chosen(has_tangent, self.inputs))
        spec = dataclasses.replace(self.spec, needs_grad=needs_grad, max_logits=False)
        return _Gradients(self._replace(spec=spec), has_dlse)

    def named(self, results: Arrays) -> Arrays:
        # The backward pass reads the named values: a policy that keeps them saves a kernel run.
        read, others = results[:2], results[2:]
        read = [checkpoint_name(x, n) for x, n in zip(read, CHECKPOINT_NAMES, strict=True)]
        name = self.spec.checkpoint_name
        if name is not None:
            read = [checkpoint_name(x, name) for x in read]  # a policy may name either
        return [*read, *others]

    def tangents(self, has_tangent: tuple[bool, ...], results: int) -> _OfAttention:
        return _OfAttention(self, has_tangent[: len(self.inputs)])


class _Gradients(NamedTuple):
    """The gradients of the inputs named in spec.needs_grad.

    Operands: those of attention, then out, lse, dout and, if present, dlse.
    """

    attention: _Attention
    has_dlse: bool

    def apply(self, operands: Arrays) -> Arrays:
        spec, inputs, tree = self.attention
        primals, (out, lse, dout, *rest) = split(operands, tree.num_leaves)
        (query, key, value, scores), mask, fixed = jax.tree.unflatten(tree, primals)
        (dlse,) = rest or (None,)
        found = _passes_for(spec, mask).backward(
            spec, query, key, value, scores, out, lse, dout, dlse, mask, fixed
        )
        return chosen([x in spec.needs_grad for x in inputs], jax.tree.leaves(found))

    def named(self, results: Arrays) -> Arrays:
        return results

    def tangents(self, has_tangent: tuple[bool, ...], results: int) -> _OfGradients:
        return _OfGradients(self, has_tangent)


class _OfAttention(NamedTuple):
    """From tangents of inputs to those of the results; residuals: operands, results."""

    attention: _Attention
    has_tangent: tuple[bool, ...]  # which inputs

    def apply(self, tangents: Arrays, residuals: Arrays) -> Arrays:
        operands = residuals[: self.attention.tree.num_leaves]
        return _derivative(self.attention.apply, operands, self.has_tangent, tangents)

    def transpose(self, cotangents: Arrays, residuals: Arrays) -> Arrays:
        dout, dlse = cotangents[:2]  # the largest logits have none
        dlse = None if dlse is None else row_sums.of_log(dlse)
        residuals = residuals[: self.attention.tree.num_leaves + 2]
        dout = jnp.zeros_like(residuals[-2]) if dout is None else dout
        rule = self.attention.gradients(self.has_tangent, dlse is not None)
        return bind(rule, [*residuals, dout, *([] if dlse is None else [dlse])])

    def of_residuals(self, has_tangent: tuple[bool, ...]) -> tuple[_OfTangents, tuple[bool, ...]]:
        # The results among the residuals are functions of the inputs and are not read.
        inputs = has_tangent[: len(self.attention.inputs)]
        read = (*inputs, *[False] * (len(has_tangent) - len(inputs)))
        return _OfTangents(self, inputs), read


class _OfTangents(NamedTuple):
    """From tangents of inputs to those of J u, for a fixed u.

    Residuals: operands and results of the attention, then u.
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
    """From tangents of operands to those of the gradients; residuals: operands, results.

    out and lse are functions of the inputs, so their tangents add no information.
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
        # A direction in the inputs: zero where no gradient was needed or it has no cotangent.
        given = iter(cotangents)
        needs_grad = attention.spec.needs_grad
        placed = [next(given) if x in needs_grad else None for x in attention.inputs]
        along = tuple(x is not None for x in placed)
        direction = [x for x in placed if x is not None]
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
    """The derivative of a function of flat operands along tangents of those that have one."""
    has_tangent = (*has_tangent, *[False] * (len(at) - len(has_tangent)))

    def of(*some):
        rest = iter(some)
        merged = [next(rest) if m else x for m, x in zip(has_tangent, at, strict=True)]
        return list(function(merged))

    return jax.jvp(of, chosen(has_tangent, at), list(tangents))[1]
