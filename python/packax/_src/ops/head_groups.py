"""forward_p and backward_p for a group of the query heads.

Groups of heads then need no slices of query and output, and no concatenation of their outputs.

forward_heads_p and backward_heads_p have the operands and results of forward_p and backward_p.
query, out, dout and dq have all query heads, everything else only the heads in `heads`. In out and
dq, the other heads keep their values from the operand `init`, whose memory the result reuses.
Without `init`, they may hold anything.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from packax._src.core.mask import Pass
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import ffi, lowering
from packax._src.ops.partitioning import require_device_info
from packax._src.ops.primitives import backward_results, forward_results, new_primitive

_STATIC = ("spec", "names", "heads")


def run(direction: Pass, heads: range, spec: AttentionSpec, x: Operands) -> list[jax.Array]:
    """`lowering.run` for these query heads."""
    if len(heads) == x.query.shape[2]:
        return lowering.run(direction, spec, x._replace(query=require_device_info(x.query)))
    primitive = forward_heads_p if direction == "forward" else backward_heads_p
    return primitive.bind(*x.leaves, spec=spec, names=x.names, heads=heads)


# --- The definition: slice the heads, compute, and write the result back.


def _slice_and_run(direction, *operands, spec, names, heads):
    x = Operands.of(names, operands)
    sliced = {
        name: jax.lax.slice_in_dim(y, heads.start, heads.stop, axis=2)
        for name in ("query", "out", "dout")
        if (y := getattr(x, name)) is not None
    }
    part, *others = lowering.run(direction, spec, x._replace(**sliced, init=None))
    if x.init is None:
        heads_after = x.query.shape[2] - heads.stop
        part = jnp.pad(part, ((0, 0), (0, 0), (heads.start, heads_after), (0, 0)))
    else:
        part = jax.lax.dynamic_update_slice_in_dim(x.init, part, heads.start, 2)
    return [part, *others]


def _primitive(direction: Pass, results: Any, call: Any) -> Primitive:
    """The primitive of a pass. vmap, derivatives and lowerings without kernels use the definition.

    `call` is the FFI call on CUDA, which takes the arrays of all heads.
    """
    primitive = new_primitive(f"packax_{direction}_heads", _STATIC)
    apart = functools.partial(_slice_and_run, direction)

    @primitive.def_abstract_eval
    def shapes(*avals, spec, names, heads):
        return results(spec, Operands.of(names, avals), len(heads))

    def batch(operands, dims, **params):
        outputs = jax.vmap(functools.partial(apart, **params), in_axes=tuple(dims))(*operands)
        return outputs, [0] * len(outputs)

    def jvp(primals, tangents, **params):
        indices = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*floats):
            merged = list(primals)
            for index, x in zip(indices, floats, strict=True):
                merged[index] = x
            return apart(*merged, **params)

        float_tangents = [ad.instantiate_zeros(tangents[i]) for i in indices]
        return jax.jvp(of_floats, [primals[i] for i in indices], float_tangents)

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    lower_apart = lowering.lower_xla(apart, _STATIC)

    def lower_cuda(ctx, *operands, spec, names, heads):
        avals = Operands.of(names, ctx.avals_in)
        fallback = ffi.takes_fallback(direction, avals, spec, ffi.for_export(ctx))
        no_dq = direction == "backward" and "query" not in spec.needs_grad
        if spec.implementation == "xla" or fallback or no_dq:
            return lower_apart(ctx, *operands, spec=spec, names=names, heads=heads)
        ffi.require_kernels(direction, avals, spec)
        return call(ctx, Operands.of(names, operands), spec, heads)

    mlir.register_lowering(primitive, lower_apart)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")
    return primitive


forward_heads_p = _primitive("forward", forward_results, ffi.forward)
backward_heads_p = _primitive("backward", backward_results, ffi.backward)
