"""Exported programs as another process loads them."""

import importlib.util

import jax.export


def restored(exported):
    """The program after serialization, or unchanged without flatbuffers, which jax needs for it."""
    if importlib.util.find_spec("flatbuffers") is None:
        return exported
    return jax.export.deserialize(exported.serialize())
