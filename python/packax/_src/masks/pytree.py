"""Mask expressions as pytrees, as static arguments, and in exported programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, dataclass_transform

import jax
import jax.export
import numpy as np


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(*arrays: str, static: tuple[str, ...] = ()) -> Callable[[type], Any]:
    """A frozen dataclass that is a pytree of these fields, also in exported programs."""

    def decorate(cls: type) -> type:
        cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        jax.tree_util.register_dataclass(cls, data_fields=[*arrays], meta_fields=[*static])
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"packax.{cls.__name__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=_static_fields,
        )
        return cls

    return decorate


def _static_fields(written: bytes) -> Any:
    return tuple(tuple(x) if isinstance(x, list) else x for x in json.loads(written))


def static_value(expression: Any) -> Any:
    """What expressions without arrays are compared by; None for others."""
    leaves, structure = jax.tree.flatten(expression)
    if any(not isinstance(x, (np.ndarray, np.generic)) or x.ndim for x in leaves):
        return None
    return tuple(int(x) for x in leaves), structure


def offset_value(offset: Any) -> Any:
    """Equal for offsets that surely are. Values of jax arrays may be unknown: equal to itself
    alone.
    """
    return id(offset) if isinstance(offset, jax.Array) else np.asarray(offset).tobytes()
