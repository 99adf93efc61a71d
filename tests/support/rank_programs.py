"""A rank's part of a program under shard_map, and what in it waits for what."""

from __future__ import annotations

import jax


def of_ranks(jaxpr):
    """The jaxprs of all shard_maps within, in order."""
    for eqn in jaxpr.eqns:
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                yield from [inner] if eqn.primitive.name == "shard_map" else of_ranks(inner)


class Program:
    """A rank's equations by primitive, and all equations that each of them needs."""

    def __init__(self, jaxpr):
        made_by, self.direct, self.needs, self.named = {}, [], [], {}
        for n, eqn in enumerate(jaxpr.eqns):
            operands = [v for v in eqn.invars if not hasattr(v, "val")]
            self.direct.append({made_by[v] for v in operands if v in made_by})
            self.needs.append(self.direct[n].union(*(self.needs[m] for m in self.direct[n])))
            made_by |= dict.fromkeys(eqn.outvars, n)
            self.named.setdefault(eqn.primitive.name, []).append(n)

    def waits(self, name, n, before, m):
        return self.named[before][m] in self.needs[self.named[name][n]]

    def waits_for_operands(self, name, n, before, m):
        """And not for what they are for."""
        operands = self.direct[self.named[before][m]]
        assert operands and not self.waits(name, n, before, m)
        return operands <= self.needs[self.named[name][n]]
