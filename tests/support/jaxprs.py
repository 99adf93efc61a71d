"""Inspects the jaxpr of a traced program, without running it."""

from __future__ import annotations

import math

import jax


def count(name, function, *args):
    """How often a primitive occurs in the jaxpr of a call, at any depth."""
    return sum(x.primitive.name == name for x in equations(jax.make_jaxpr(function)(*args)))


def largest(function, *args):
    """The element count of the largest array in the jaxpr of a call, at any depth."""
    traced = equations(jax.make_jaxpr(function)(*args))
    return max(math.prod(x.aval.shape) for equation in traced for x in equation.outvars)


def equations(jaxpr):
    """All equations of a jaxpr, at any depth."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
        for x in inner:
            if _is_jaxpr(x):
                yield from equations(x)


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")
