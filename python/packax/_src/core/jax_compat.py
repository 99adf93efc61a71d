"""What differs between jax releases: varying axes, the mesh of a `with` block."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp


def _attention_of_jax_nn() -> Any:
    """The function itself: its name in jax.nn may have been reassigned."""
    try:
        from jax._src.nn.functions import dot_product_attention
    except ImportError:
        return jax.nn.dot_product_attention
    return dot_product_attention


jax_nn_attention = _attention_of_jax_nn()


def varying_axes(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value varies inside shard_map (jax renamed where they are kept)."""
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def vary_together(*trees: Any) -> tuple[Any, ...]:
    """The arrays, each marked as varying over every axis that any of them varies over.

    The transpose of the marking is the psum that the gradient of a replicated operand needs.
    """
    union = frozenset[str]().union(*(varying_axes(jax.typeof(x)) for x in jax.tree.leaves(trees)))
    if not union:  # as outside of shard_map
        return trees

    def mark(x):
        missing = tuple(sorted(union - varying_axes(jax.typeof(x))))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # jax 0.7

    return jax.tree.map(mark, trees)


def run_compiled(function: Any, *operands: Any, **params: Any) -> Any:
    """The results of a jitted function that implements a primitive outside of jit.

    It stays jitted under disable_jit, where it would call itself. jax.debug_nans and jax.debug_infs
    check its results, except for -inf, the log-sum-exp of a row that attends nothing.
    """
    if not (jax.config.jax_debug_nans or jax.config.jax_debug_infs):  # type: ignore[attr-defined]
        with jax.disable_jit(False):
            return function(*operands, **params)
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = function(*operands, **params)
    for x in results:
        if jnp.issubdtype(x.dtype, jnp.floating):
            jnp.where(x == -jnp.inf, jnp.zeros_like(x), x)  # jax checks the results of this
    return results


def check_for_nans(primitive: Any) -> None:
    """Makes checkify check the primitive's results for NaNs, as it does for jax's primitives."""
    try:
        from jax._src import checkify

        checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)
    except (ImportError, AttributeError):
        return


def entered_mesh() -> Any:
    """The mesh of a `with mesh:` block, the way of jax before set_mesh."""
    try:
        from jax._src.mesh import thread_resources

        return thread_resources.env.physical_mesh
    except (ImportError, AttributeError):
        return None


def lower_with_devices(primitive: Any) -> None:
    """Makes the devices known when lowering a program with the primitive; jax hides them else."""
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering
    except ImportError:
        return
    prim_requires_devices_during_lowering.add(primitive)


def with_64_bits(avals: Any) -> Any:
    """A context in which values of 64 bits keep them.

    XLA may trace a part of a program in another thread, which does not see the caller's
    `jax.enable_x64`.
    """
    known = jax.dtypes.canonicalize_dtype("float64") == "float64"
    if known or not any(x.dtype.itemsize == 8 for x in avals):
        return contextlib.nullcontext()
    place: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    return place.enable_x64(True)
