"""From primitives to platforms: FFI calls on CUDA, jax.numpy elsewhere.

Importing this module registers the FFI targets and the rules. What a buffer already says (shapes,
dtypes) is no attribute; Python never names a kernel's launch, only asks whether one exists.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.export

from packax._src.core.mask import Pass
from packax._src.core.precision import is_exact
from packax._src.ops import (
    attention_calls,
    batch_packing,
    ffi,
    head_dims,
    low_occupancy,
    partition_rules,
    xla_attention,
    xla_scores,
    xla_tiles,
)
from packax._src.ops.operands import TENSORS, lse_in_two, named, version
from packax._src.ops.primitives import backward_p, forward_p
from packax._src.ops.rules import lower_xla, register, run_once, without_kernels

if ffi.ext is not None:
    for _name, _stages in ffi.ext.registrations().items():
        jax.ffi.register_ffi_target(_name, _stages, platform="CUDA")

TARGETS = (
    *("packax_documents_v1", "packax_blocks_v1", "packax_forward_v1", "packax_backward_v1"),
    *("packax_decode_v1", "packax_forward_v2", "packax_backward_v2"),
)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=)` needs for programs with packax's kernels.

    jax does not promise that custom calls it does not know will still be there when the program
    runs. Of packax's, the name has a version, which goes up with every change of the call: where
    it runs, `import packax` of a version that has the same ones.

    Examples:
        >>> exported = jax.export.export(
        ...     jax.jit(step), platforms=["cuda"], disabled_checks=packax.export_checks()
        ... )(*shapes)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]


def _mask_and_extras(of):
    """Of the operands by name, as xla_attention takes them."""
    mask, extras = xla_tiles.Mask, xla_scores.Extras
    return (kind(**{x: of[x] for x in kind._fields if x in of}) for kind in (mask, extras))


def xla_forward(
    *operands, scale, soft_cap, precision, segment_check, max_logits, block_size, extras,
    dropout_threshold,
):  # fmt: skip
    of = named("forward", operands, {"block_size": block_size, "extras": extras})
    out, lse, row_max = xla_attention.forward(
        *(of[x] for x in TENSORS["forward"]),
        *_mask_and_extras(of),
        scale=scale,
        soft_cap=soft_cap,
        precision=precision,
        segment_check=segment_check,
        block_size=block_size,
        dropout_threshold=dropout_threshold,
        lse_in_two=lse_in_two(extras),
    )
    return (out, lse, row_max) if max_logits else (out, lse)


def xla_backward(
    *operands, scale, soft_cap, precision, segment_check, has_dlse, deterministic, score_grads,
    bias_grad, block_size, extras, dropout_threshold, needs_grad,
):  # fmt: skip
    of = named("backward", operands, {"block_size": block_size, "extras": extras})
    if not has_dlse:
        of["dlse"] = None
    # One order of sums in any case.
    *gradients, parts, dbias = xla_attention.backward(
        *(of[x] for x in TENSORS["backward"]),
        *_mask_and_extras(of),
        scale=scale,
        soft_cap=soft_cap,
        precision=precision,
        segment_check=segment_check,
        block_size=block_size,
        dropout_threshold=dropout_threshold,
        needs_grad=needs_grad,
        bias_grad=bias_grad,
    )
    others = ((parts, score_grads), (dbias, bias_grad))
    return (*gradients, *(x for x, asked in others if asked))


FORWARD_PARAMS = (
    "scale",
    "soft_cap",
    "precision",
    "segment_check",
    "max_logits",
    "block_size",
    "extras",
    "dropout_threshold",
)
BACKWARD_PARAMS = (
    *("scale", "soft_cap", "precision", "segment_check", "has_dlse", "deterministic"),
    *("score_grads", "bias_grad", "block_size", "extras", "dropout_threshold", "needs_grad"),
)
_forward_xla = lower_xla(xla_forward, FORWARD_PARAMS)
_backward_xla = lower_xla(xla_backward, BACKWARD_PARAMS)
_backward_in_parts = lower_xla(
    low_occupancy.backward_in_parts, (*BACKWARD_PARAMS, "implementation", "parts")
)
_forward_of_one_row = lower_xla(batch_packing.forward, (*FORWARD_PARAMS, "implementation"))
_backward_of_one_row = lower_xla(batch_packing.backward, (*BACKWARD_PARAMS, "implementation"))
_forward_padded = lower_xla(head_dims.forward, (*FORWARD_PARAMS, "implementation", "dims"))
_backward_padded = lower_xla(head_dims.backward, (*BACKWARD_PARAMS, "implementation", "dims"))


def _forward_cuda(ctx, *operands, implementation, **params):
    if implementation == "xla":
        return _forward_xla(ctx, *operands, **params)
    query, key, value = ctx.avals_in[:3]
    if _merged(query, key, params):
        return _forward_of_one_row(ctx, *operands, implementation=implementation, **params)
    dims = head_dims.padded("forward", query, value, params, ffi.for_export(ctx))
    if dims is not None:
        return _forward_padded(ctx, *operands, implementation=implementation, dims=dims, **params)
    _require_kernels("forward", query, value, params)
    return run_once(ctx, attention_calls.forward(ctx, operands, params))


def _require_kernels(direction: Pass, query: Any, value: Any, params: Any) -> None:
    fallback = takes_fallback(direction, query, value, params)
    float32_products = not fallback or is_exact(params["precision"])
    with_bias = version(params) > 1
    ffi.require_kernels(direction, query, value, fallback, float32_products, with_bias)


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
    dims = head_dims.padded("backward", query, value, params, ffi.for_export(ctx))
    if dims is not None:
        return _backward_padded(ctx, *operands, implementation=implementation, dims=dims, **params)
    _require_kernels("backward", query, value, params)
    return attention_calls.backward(ctx, operands, params)


def takes_fallback(direction: str, query: Any, value: Any, params: Any) -> bool:
    """Whether it takes the fallback kernels: other scores, or other head dims."""
    if params["extras"] or params["soft_cap"] or params.get("max_logits") or params["block_size"]:
        return True
    return ffi.ext is not None and not ffi.found(direction, query, value, fallback=False)


register(forward_p, partition_rules.forward, without_kernels(_forward_xla), _forward_cuda)
register(backward_p, partition_rules.backward, without_kernels(_backward_xla), _backward_cuda)
