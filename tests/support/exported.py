"""Exported programs as another process has them."""

import importlib.util

import jax.export


def restored(exported):
    """As another process would have it, if flatbuffers is there, without which jax has no files."""
    if importlib.util.find_spec("flatbuffers") is None:
        return exported
    return jax.export.deserialize(exported.serialize())
