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
        self.eqns, self.made_by, self.direct, self.needs, self.named = jaxpr.eqns, {}, [], [], {}
        for n, eqn in enumerate(jaxpr.eqns):
            self.direct.append(self._makers(eqn.invars))
            self.needs.append(self.direct[n].union(*(self.needs[m] for m in self.direct[n])))
            self.made_by |= dict.fromkeys(eqn.outvars, n)
            self.named.setdefault(eqn.primitive.name, []).append(n)

    def _makers(self, operands):
        named = [v for v in operands if not hasattr(v, "val")]
        return {self.made_by[v] for v in named if v in self.made_by}

    def updates_wait(self, names):
        """Of every update of a slice, whether where it begins needs a result of such primitives."""
        made = {n for name in names for n in self.named.get(name, ())}
        places = [self.eqns[n].invars[2:] for n in self.named.get("dynamic_update_slice", ())]
        return [
            any(made & (self.needs[m] | {m}) for m in self._makers(operands)) for operands in places
        ]

    def waits(self, name, n, before, m):
        return self.named[before][m] in self.needs[self.named[name][n]]

    def waits_for_operands(self, name, n, before, m):
        """And not for what they are for."""
        operands = self.direct[self.named[before][m]]
        assert operands and not self.waits(name, n, before, m)
        return operands <= self.needs[self.named[name][n]]
