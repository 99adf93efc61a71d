"""The per-rank part of a shard_map program, and the dependencies between its equations."""

from __future__ import annotations

import jax


def of_ranks(jaxpr):
    """The jaxprs of all shard_maps in a jaxpr, in order."""
    for eqn in jaxpr.eqns:
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                yield from [inner] if eqn.primitive.name == "shard_map" else of_ranks(inner)


class Program:
    """A rank's equations by primitive, and for each the equations it depends on."""

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
        """For each dynamic_update_slice, whether its start indices need one of these primitives."""
        made = {n for name in names for n in self.named.get(name, ())}
        places = [self.eqns[n].invars[2:] for n in self.named.get("dynamic_update_slice", ())]
        return [
            any(made & (self.needs[m] | {m}) for m in self._makers(operands)) for operands in places
        ]

    def waits(self, name, n, before, m):
        return self.named[before][m] in self.needs[self.named[name][n]]

    def waits_for_operands(self, name, n, before, m):
        """Needs the operands of that equation, but not its result."""
        operands = self.direct[self.named[before][m]]
        assert operands and not self.waits(name, n, before, m)
        return operands <= self.needs[self.named[name][n]]
