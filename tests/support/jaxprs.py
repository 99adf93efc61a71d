"""What a traced program does, without running it."""

from __future__ import annotations

import jax


def count(name, function, *args):
    """How often a primitive occurs in the jaxpr of a call, at any depth."""

    def walk(jaxpr):
        found = 0
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            found += equation.primitive.name == name
            inner = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
            found += sum(walk(x) for x in inner if _is_jaxpr(x))
        return found

    return walk(jax.make_jaxpr(function)(*args))


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")
