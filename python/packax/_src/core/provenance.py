"""Which arrays a context plan has permuted, so that nothing permutes them a second time.

Arrays and tracers are remembered by identity while they exist. An array that is computed from a
permuted one, or that passes into a jitted function, is not known as permuted: there, the checksums
of context/plan_check.py compare values.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax

_permuted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def mark_permuted(tree: Any) -> Any:
    """The tree, after remembering that its arrays are in a plan's order."""
    for x in jax.tree.leaves(tree):
        _permuted[id(x)] = x
    return tree


def is_permuted(x: Any) -> bool:
    return _permuted.get(id(x)) is x
