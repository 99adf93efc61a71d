"""The sharding of query, key and value: one setting for the whole process, as in kvax."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from packax.kvax.utils.typing import Specs


class Axes(IntEnum):
    """Indices into a spec; the key/value names are aliases."""

    batch = 0
    query_sequence = 1
    kv_sequence = 1
    heads = 2
    kv_heads = 2
    head_dim = 3


@dataclasses.dataclass
class AttentionSpecs:
    """Specs of (batch, sequence, heads, head dim), each None, a mesh axis or a tuple of axes."""

    query_specs: Specs = None
    kv_specs: Specs = None


_current = AttentionSpecs()
_lock = threading.Lock()  # so that no thread sees the specs of two calls


def set_attention_specs(query_specs: Specs, kv_specs: Specs) -> None:
    """Sets the specs for all threads, until they are set again.

    Args:
        query_specs: (batch, sequence, heads, head dim) of query and output. A sequence axis enables
            context parallelism.
        kv_specs: (batch, sequence, heads, head dim) of key and value.

    Raises:
        ValueError: specs that do not have four entries, or differ in batch or head dim, or shard
            the keys' sequence or the head dim.

    Examples:
        >>> set_attention_specs(("data", "context", None, None), ("data", None, None, None))
    """
    _check(query_specs, kv_specs)
    _set(query_specs, kv_specs)


def get_attention_specs() -> AttentionSpecs:
    """The current specs.

    Raises:
        ValueError: none are set.

    Examples:
        >>> query_specs = get_attention_specs().query_specs
    """
    with _lock:
        current = dataclasses.replace(_current)
    if current.query_specs is None or current.kv_specs is None:
        raise ValueError(
            "no attention specs are set: call this inside `with attention_specs(query_specs, "
            "kv_specs):`, or after set_attention_specs"
        )
    return current


@contextmanager
def attention_specs(query_specs: Specs, kv_specs: Specs) -> Iterator[None]:
    """`set_attention_specs` for a `with` block; afterwards the previous specs are restored.

    Examples:
        >>> with attention_specs(("data", "context", None, None), ("data", None, None, None)):
        ...     mask = create_attention_mask(
        ...         positions, ids, kv_positions, kv_ids, calc_bwd_mask=True
        ...     )
    """
    with _lock:
        before = dataclasses.replace(_current)
    set_attention_specs(query_specs, kv_specs)
    try:
        yield
    finally:
        _set(before.query_specs, before.kv_specs)


def _set(query_specs: Specs, kv_specs: Specs) -> None:
    with _lock:
        _current.query_specs, _current.kv_specs = query_specs, kv_specs


def _check(query_specs: Specs, kv_specs: Specs) -> None:
    for name, specs in (("query_specs", query_specs), ("kv_specs", kv_specs)):
        entries = len(specs) if hasattr(specs, "__len__") else 0
        if entries != 4:
            raise ValueError(
                f"{name} must have 4 entries, (batch, sequence, heads, head dim), but has "
                f"{entries}: {specs}"
            )
    for axis in (Axes.batch, Axes.head_dim):
        if query_specs[axis] != kv_specs[axis]:
            raise ValueError(
                f"query_specs and kv_specs must have the same {axis.name} sharding, but have "
                f"{query_specs[axis]!r} and {kv_specs[axis]!r}"
            )
    if kv_specs[Axes.kv_sequence] is not None:
        raise ValueError(
            f"kv_specs must have None for the sequence, but has {kv_specs[Axes.kv_sequence]!r}: "
            "every rank attends to all keys. packax.AttentionSharding takes sharded keys"
        )
    if kv_specs[Axes.head_dim] is not None:
        raise ValueError(
            f"the head dim cannot be sharded, but the specs say {kv_specs[Axes.head_dim]!r}"
        )
