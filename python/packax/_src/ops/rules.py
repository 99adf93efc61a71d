"""How lowering rules are made: of a function in jax.numpy, or of an FFI call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from packax._src.ops.partitioning import partitioned, plain


def lower_xla(function: Any, static: tuple[str, ...]) -> Any:
    # jit, so that the layers of a model trace it once.
    rule = mlir.lower_fun(jax.jit(function, static_argnames=static), multiple_results=True)

    def lower(ctx, *operands, **params):
        ctx = ctx.replace(
            avals_in=[plain(x) for x in ctx.avals_in], avals_out=[plain(x) for x in ctx.avals_out]
        )
        return rule(ctx, *operands, **params)

    return lower


def without_kernels(rule: Any) -> Any:
    """The rule of a platform that has no kernels."""

    def lower(ctx, *operands, implementation, **params):
        if implementation == "cuda":
            platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
            raise NotImplementedError(
                f'implementation="cuda" needs a CUDA device, but this is lowered for {platforms}: '
                'use implementation=None (kernels on CUDA, XLA elsewhere) or "xla"'
            )
        return rule(ctx, *operands, **params)

    return lower


def ffi_call(
    ctx, target: str, operands, workspace: tuple[Any, ...] = (),
    same_memory: dict[int, int] | None = None, **attributes: Any,
):  # fmt: skip
    """The FFI call; workspaces are extra results, which stay valid under CUDA graphs.

    `same_memory`: operands by number, and the results that take their places.
    """
    results = len(ctx.avals_out)
    ctx = ctx.replace(
        avals_in=[plain(x) for x in ctx.avals_in],
        avals_out=[*(plain(x) for x in ctx.avals_out), *workspace],
    )
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=same_memory)
    return rule(ctx, *operands, **attributes)[:results]


def run_once(ctx, results):
    """The results of a call, behind a barrier.

    Where `scan` keeps a result that other operations read too, as it does for the backward pass,
    XLA copies the call into a fusion that writes the kept array, and leaves the call itself for the
    others: the kernel runs twice (openxla/xla#45799, seen with jax 0.11.2). It does not look
    through a barrier.
    """
    avals = [plain(x) for x in ctx.avals_out]
    barrier = mlir.lower_fun(lambda *x: jax.lax.optimization_barrier(x), multiple_results=True)
    return barrier(ctx.replace(primitive=None, avals_in=avals, avals_out=avals), *results)


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


COUNTER = array(1, dtype=jnp.int32)  # from which programs draw tiles
ABSENT = array(0)  # of an operand or a result that is not there


def made_constant(ctx, function, aval):
    make = mlir.lower_fun(lambda: function(aval), multiple_results=False)
    (made,) = make(ctx.replace(primitive=None, avals_in=[], avals_out=[aval]))
    return made


def zeros(ctx, aval):
    return made_constant(ctx, lambda x: jnp.zeros(x.shape, x.dtype), aval)


def register(primitive: Any, dims: Any, elsewhere: Any, cuda: Any) -> None:
    """The primitive's rules, each of which XLA may divide over a mesh."""
    mlir.register_lowering(primitive, partitioned(primitive, dims, elsewhere))
    on_cuda = partitioned(primitive, dims, cuda, kernels=True)
    mlir.register_lowering(primitive, on_cuda, platform="cuda")
