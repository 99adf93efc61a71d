"""Access to jax internals that are not exported, or whose names differ between releases."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

try:  # the original function: `jax.nn.dot_product_attention` may have been replaced
    from jax._src.nn.functions import dot_product_attention as jax_nn_attention
except ImportError:
    jax_nn_attention = jax.nn.dot_product_attention


def run_compiled(function: Any, *operands: Any, **params: Any) -> Any:
    """Runs the jitted function that implements a primitive outside of jit.

    The function stays jitted under jax.disable_jit, because without jit it would call itself.
    jax.debug_nans and jax.debug_infs check the results, but accept -inf, the log-sum-exp of a row
    that attends to nothing.
    """
    config: Any = jax.config  # older versions do not declare these attributes
    if not (config.jax_debug_nans or config.jax_debug_infs):
        with jax.disable_jit(False):
            return function(*operands, **params)
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = function(*operands, **params)
    for x in results:
        if jnp.issubdtype(x.dtype, jnp.floating):
            jnp.where(x == -jnp.inf, jnp.zeros_like(x), x)  # jax checks the result of `where`
    return results


@functools.cache
def _warn_of_missing(what: str) -> None:
    """Warns once per process of what does not work without a name in jax._src."""
    warnings.warn(
        f"packax does not know this version of jax, {jax.__version__}, well enough for {what}: "
        "update packax, or use an older jax",
        stacklevel=3,
    )


def checks_vma() -> bool:
    """The `check_vma` of the surrounding shard_map, which a nested one must share. If it is set,
    types say over which mesh axes values vary."""
    try:
        from jax._src.config import _check_vma

        return bool(_check_vma.value)
    except (ImportError, AttributeError):
        _warn_of_missing("whether a shard_map in another one checks varying axes")
        return True


def check_for_nans(primitive: Any) -> None:
    """Makes checkify check the primitive's results for NaNs, as for jax's own primitives."""
    try:
        from jax._src import checkify

        checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)
    except (ImportError, AttributeError):
        _warn_of_missing("checkify's check for NaNs of attention")


def lower_with_devices(primitive: Any) -> None:
    """Makes jax pass the devices to the lowering of every program that contains the primitive."""
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering
    except ImportError:
        _warn_of_missing("how plain jit partitions attention over a mesh")
        return
    prim_requires_devices_during_lowering.add(primitive)
