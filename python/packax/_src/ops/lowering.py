"""From primitives to platforms: FFI calls on CUDA, jax.numpy elsewhere.

Importing this module registers the FFI targets and the rules. What a buffer already says (shapes,
dtypes) is no attribute; Python never names a kernel's launch, only asks whether one exists.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from packax._src.core.mask import operand_names
from packax._src.core.precision import is_exact
from packax._src.core.shapes import BLOCK, INT_MAX, ceil_div, is_symbolic
from packax._src.ops import (
    batch_packing,
    ffi,
    low_occupancy,
    partition_rules,
    xla_attention,
    xla_tiles,
)
from packax._src.ops.operands import TENSORS, named
from packax._src.ops.partitioning import plain
from packax._src.ops.primitives import (
    OF_INDICES,
    backward_p,
    forward_p,
)
from packax._src.ops.rules import (
    COUNTER,
    array,
    ffi_call,
    lower_xla,
    made_constant,
    register,
    run_once,
    without_kernels,
)

if ffi.ext is not None:
    for _name, _stages in ffi.ext.registrations().items():
        jax.ffi.register_ffi_target(_name, _stages, platform="CUDA")

TARGETS = (
    *("packax_documents_v1", "packax_blocks_v1", "packax_forward_v1", "packax_backward_v1"),
    *("packax_forward_general_v1", "packax_backward_general_v1", "packax_decode_v1"),
    *("packax_forward_heads_v1", "packax_backward_heads_v1"),
)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=)` needs for programs with packax's kernels.

    jax does not promise that custom calls it does not know will still be there when the program
    runs. Of packax's, the name has a version, which goes up with every change of the call: where
    it runs, `import packax` of a version that has the same ones.

    >>> exported = jax.export.export(
    ...     jax.jit(step), platforms=["cuda"], disabled_checks=packax.export_checks()
    ... )(*shapes)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]


def _mask_and_extras(of):
    """Of the operands by name, as xla_attention takes them."""
    mask, extras = xla_tiles.Mask, xla_attention.Extras
    return (kind(**{x: of[x] for x in kind._fields if x in of}) for kind in (mask, extras))


def xla_forward(
    *operands, scale, soft_cap, precision, element_test, max_logits, block_size, extras
):
    of = named("forward", operands, {"block_size": block_size, "extras": extras})
    out, lse, row_max = xla_attention.forward(
        *(of[x] for x in TENSORS["forward"]),
        *_mask_and_extras(of),
        scale=scale,
        soft_cap=soft_cap,
        precision=precision,
        element_test=element_test,
        block_size=block_size,
    )
    return (out, lse, row_max) if max_logits else (out, lse)


def xla_backward(
    *operands, scale, soft_cap, precision, element_test, has_dlse, deterministic, score_grads,
    block_size, extras, needs_grad,
):  # fmt: skip
    of = named("backward", operands, {"block_size": block_size, "extras": extras})
    if not has_dlse:
        of["dlse"] = None
    # One order of sums in any case.
    *gradients, parts = xla_attention.backward(
        *(of[x] for x in TENSORS["backward"]),
        *_mask_and_extras(of),
        scale=scale,
        soft_cap=soft_cap,
        precision=precision,
        element_test=element_test,
        block_size=block_size,
        needs_grad=needs_grad,
    )
    return (*gradients, parts) if score_grads else gradients


FORWARD_PARAMS = (
    "scale",
    "soft_cap",
    "precision",
    "element_test",
    "max_logits",
    "block_size",
    "extras",
)
BACKWARD_PARAMS = (
    *("scale", "soft_cap", "precision", "element_test", "has_dlse", "deterministic"),
    *("score_grads", "block_size", "extras", "needs_grad"),
)
_forward_xla = lower_xla(xla_forward, FORWARD_PARAMS)
_backward_xla = lower_xla(xla_backward, BACKWARD_PARAMS)
_backward_in_parts = lower_xla(
    low_occupancy.backward_in_parts, (*BACKWARD_PARAMS, "implementation", "parts")
)
_forward_of_one_row = lower_xla(batch_packing.forward, (*FORWARD_PARAMS, "implementation"))
_backward_of_one_row = lower_xla(batch_packing.backward, (*BACKWARD_PARAMS, "implementation"))


def _forward_cuda(ctx, *operands, implementation, **params):
    if implementation == "xla":
        return _forward_xla(ctx, *operands, **params)
    query, key, value = ctx.avals_in[:3]
    if _merged(query, key, params):
        return _forward_of_one_row(ctx, *operands, implementation=implementation, **params)
    exact = is_exact(params["precision"])
    attributes: dict[str, Any] = {
        "scale": np.float32(params["scale"]),
        "element_test": np.int32(params["element_test"]),
    }
    if not takes_fallback("forward", query, value, params):
        ffi.require_kernels("forward", query, value)
        results = ffi_call(ctx, "packax_forward_v1", operands, (COUNTER,), **attributes)
        return run_once(ctx, results)
    ffi.require_kernels("forward", query, value, fallback=True, exact=exact)
    batch, q_len, heads, _ = query.shape
    results = _fallback_call(
        ctx,
        "packax_forward_general_v1",
        operands,
        len(TENSORS["forward"]) + len(operand_names(False, "forward")),
        2,
        (*(() if params["max_logits"] else (array(batch, heads, q_len),)), COUNTER),
        params,
        want_top=np.int32(params["max_logits"]),
        **attributes,
    )
    return run_once(ctx, results)


def _merged(query: Any, key: Any, params: Any) -> bool:
    """Whether its batch rows become one; places and block masks are those of a row."""
    plain_scores = not params["extras"] and not params["block_size"]
    return plain_scores and batch_packing.worth_merging(query, key)


def _backward_cuda(ctx, *operands, implementation, **params):
    if implementation == "xla":
        return _backward_xla(ctx, *operands, **params)
    query, key, value = ctx.avals_in[:3]
    if _merged(query, key, params):
        return _backward_of_one_row(ctx, *operands, implementation=implementation, **params)
    parts = low_occupancy.parts_of_group(query, key) if any(params["needs_grad"][1:]) else 1
    if parts > 1:
        return _backward_in_parts(
            ctx, *operands, implementation=implementation, parts=parts, **params
        )
    attributes = {
        "scale": np.float32(params["scale"]),
        "element_test": np.int32(params["element_test"]),
        "has_dlse": np.int32(params["has_dlse"]),
    }
    exact = is_exact(params["precision"])
    mask_batch = named("backward", ctx.avals_in, params)["q_lo"].shape[0]
    if not takes_fallback("backward", query, value, params):
        ffi.require_kernels("backward", query, value)
        elements, fused = backward_workspace(
            query, value, mask_batch, params["deterministic"], params["needs_grad"]
        )
        return backward_call(ctx, operands, elements, fused, params["needs_grad"], attributes)
    ffi.require_kernels("backward", query, value, fallback=True, exact=exact)
    score_grads, needs_grad = params["score_grads"], params["needs_grad"]
    elements, fused = backward_workspace(
        query, value, mask_batch, params["deterministic"], needs_grad, _suffix(params)
    )
    workspace = array(elements)
    call = functools.partial(
        _fallback_call,
        target="packax_backward_general_v1",
        operands=operands,
        count=len(TENSORS["backward"]) + len(operand_names(False, "backward")),
        maps=3,
        workspace=(workspace,) if score_grads else (array(1), workspace),
        params=params,
        has_dnumbers=np.int32(score_grads),
        wanted=_grad_bits(needs_grad),
        **attributes,
    )
    # The kernel of dq makes the gradients of score parameters.
    return _written(ctx, call, needs_grad[0] or score_grads, fused or any(needs_grad[1:]))


def _suffix(params: Any) -> str | None:
    """Of the names of the sm90 kernels for a fallback backward: a soft cap, a map, or slopes of
    indices, and nothing else.
    """
    if params["score_grads"]:
        return None
    suffixes = {
        (True, False, 0): "_soft_cap",
        (False, True, 0): "_block_lists",
        (False, False, OF_INDICES): "_alibi",
    }
    return suffixes.get((bool(params["soft_cap"]), bool(params["block_size"]), params["extras"]))


def takes_fallback(direction: str, query: Any, value: Any, params: Any) -> bool:
    """Whether it takes the fallback kernels: other scores, or other head dims."""
    if params["extras"] or params["soft_cap"] or params.get("max_logits") or params["block_size"]:
        return True
    return ffi.ext is not None and not ffi.found(direction, query, value, fallback=False)


def _fallback_call(ctx, target, operands, count, maps, workspace, params, **attributes):
    """With the first `count` operands, `maps` of a map and four extras: another stands in for those
    not there."""
    extras, stand_in = params["extras"], 3  # some operand of the batch, never read
    end = len(operands) - extras
    has_bias = {OF_INDICES: 2, 4: 1}.get(extras, 0)
    if extras == OF_INDICES:  # the sm90 kernels need none, the fallback ones arrays
        query, key, slopes = (ctx.avals_in[i] for i in (0, 1, -1))
        avals = [array(slopes.shape[0], x.shape[1], dtype=jnp.int32) for x in (query, key)]
        operands = [*operands, *(made_constant(ctx, _indices, aval) for aval in avals)]
        ctx, extras = ctx.replace(avals_in=[*ctx.avals_in, *avals]), 4
    q_block, kv_block = params["block_size"] or (0, 0)
    places = [*range(count), *(range(end - maps, end) if q_block else [stand_in] * maps)]
    places += [*range(end, len(operands)), *[stand_in] * (4 - extras)]
    return ffi_call(
        ctx.replace(avals_in=[ctx.avals_in[i] for i in places]),
        target,
        [operands[i] for i in places],
        workspace,
        soft_cap=np.float32(params["soft_cap"]),
        has_scales=np.int32(extras >= 1),
        has_bias=np.int32(has_bias),
        exact=np.int32(is_exact(params["precision"])),
        q_block=np.int32(q_block),
        kv_block=np.int32(kv_block),
        **attributes,
    )


def backward_call(
    ctx,
    operands,
    elements,
    fused,
    needs_grad,
    attributes,
    target="packax_backward_v1",
    same_memory=None,
):
    """One sm90 kernel writes dk and dv with dq's sum."""
    call = functools.partial(
        ffi_call,
        target=target,
        operands=operands,
        workspace=(array(elements),),
        same_memory=same_memory,
        wanted=_grad_bits(needs_grad),
        **attributes,
    )
    return _written(ctx, call, needs_grad[0], fused or any(needs_grad[1:]))


def _grad_bits(needs_grad):
    return np.int32(needs_grad[0] + 2 * any(needs_grad[1:]))


def _written(ctx, call, dq: bool, dkv: bool):
    """The results of `call`, a function of ctx: of dq, dk and dv, those that no kernel writes have
    no elements there."""
    written = (dq, dkv, dkv, *[True] * (len(ctx.avals_out) - 3))
    nothing = array(0, dtype=ctx.avals_in[0].dtype)
    made = call(
        ctx.replace(
            avals_out=[x if w else nothing for x, w in zip(ctx.avals_out, written, strict=True)]
        )
    )
    return [
        x if w else made_constant(ctx, _zeros, plain(aval))  # not used, so never made
        for x, w, aval in zip(made, written, ctx.avals_out, strict=True)
    ]


def _zeros(aval):
    return jnp.zeros(aval.shape, aval.dtype)


def _indices(aval):
    return jax.lax.broadcasted_iota(aval.dtype, aval.shape, 1)


def backward_workspace(
    query: Any,
    value: Any,
    mask_batch: int,
    deterministic: bool,
    needs_grad: tuple[bool, ...],
    suffix: str | None = "",
) -> Any:
    """Its size in float32, by which C++ knows which kernels may run (csrc/launch/backward_sm90.h),
    and whether one of them writes all gradients. `suffix`: of the kernels' names; None: not those
    for sm90."""
    batch, q_len, heads, qk_dim = query.shape
    padded = BLOCK * ceil_div(q_len, BLOCK)
    rows = batch * heads * padded
    sums = 2 * rows + 2 * mask_batch * padded
    # The kernels count rows in 32 bits. If there are more when an exported program runs, C++ knows.
    if suffix is None or (not is_symbolic(rows) and rows > INT_MAX):
        return rows, False
    dims = (str(query.dtype), qk_dim, value.shape[3])
    fused = ffi.on_sm90("backward_sm90" + suffix, *dims)
    apart = deterministic or not all(needs_grad) or not fused
    if apart and ffi.on_sm90("backward_dkdv_sm90" + suffix, *dims):
        return sums + 1, False  # the one kernel for dk and dv, or the one for dq, or both
    if deterministic or not fused:
        return rows, False
    return sums + rows * qk_dim, True


register(forward_p, partition_rules.forward, without_kernels(_forward_xla), _forward_cuda)
register(backward_p, partition_rules.backward, without_kernels(_backward_xla), _backward_cuda)
