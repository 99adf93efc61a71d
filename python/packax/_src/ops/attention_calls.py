"""The FFI calls of both passes: operands, attributes, workspaces, and which algorithm may run.

What is not there, of operands and results, has shape (0,): docs/internals/ffi.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.mask import Pass
from packax._src.core.precision import is_exact
from packax._src.core.shapes import BLOCK, INT_MAX, ceil_div, is_symbolic
from packax._src.ops import ffi
from packax._src.ops.operands import call_names, named, of_indices, version
from packax._src.ops.partitioning import plain
from packax._src.ops.rules import ABSENT, COUNTER, array, ffi_call, made_constant, zeros


class HeadGroup(NamedTuple):
    """Heads of the query that a call is about; `before`: aval and value of out or dq, in which the
    others are already, or None where there are none yet.
    """

    first: int
    heads: int
    before: tuple[Any, Any] | None


_ALL_HEADS = HeadGroup(0, 0, None)


def forward(ctx, operands, params: Any, group: HeadGroup = _ALL_HEADS):
    """The results of forward_p."""
    row_max = () if params["max_logits"] else (ABSENT,)
    return _call(ctx, "forward", operands, params, group, (*row_max, COUNTER))


def backward(ctx, operands, params: Any, group: HeadGroup = _ALL_HEADS):
    """Those of backward_p: of dq, dk and dv, those that no kernel writes are absent in the call."""
    avals = named("backward", ctx.avals_in, params)
    query, needs_grad, score_grads = avals["query"], params["needs_grad"], params["score_grads"]
    if group.heads:
        query = plain(query).update(shape=(*query.shape[:2], group.heads, query.shape[3]))
    algorithm = choose_algorithm(query, avals["value"], params, ffi.for_export(ctx))
    elements = workspace_size(algorithm, query, avals["q_lo"].shape[0])

    # The kernel of dq makes score_grads, and the fused one writes dk and dv with dq's sum. A call
    # of the second version has dbias in front.
    nothing = array(0, dtype=query.dtype)
    dq, dkv = needs_grad[0] or score_grads, algorithm == "sm90_fused" or any(needs_grad[1:])
    written = (dq, dkv, dkv)
    tensors = [x if w else nothing for x, w in zip(ctx.avals_out, written, strict=False)]
    others = list(ctx.avals_out[3:])
    of_bias = [others.pop() if params["bias_grad"] else ABSENT] * (version(params) > 1)
    avals_out = [*of_bias, *tensors, *(others or [ABSENT])]
    made = _call(
        ctx.replace(avals_out=avals_out),
        "backward",
        operands,
        params,
        group,
        (array(elements),),
        algorithm=algorithm,
        needs_grad=np.int32(needs_grad[0] + 2 * any(needs_grad[1:])),
    )
    dbias, gradients = made[: len(of_bias)], made[len(of_bias) :]
    results = [
        x if w else zeros(ctx, plain(aval))  # not used, so never made
        for x, w, aval in zip(gradients, written, ctx.avals_out, strict=False)
    ]
    results += gradients[3:] if score_grads else []
    return [*results, *(dbias if params["bias_grad"] else [])]


def _call(ctx, direction: Pass, operands, params: Any, group, workspace, **attributes: Any):
    avals, values = (named(direction, x, params) for x in (ctx.avals_in, operands))
    if direction == "backward" and not params["has_dlse"]:
        del values["dlse"]
    if of_indices(params):  # the sm90 kernels need none, the fallback ones arrays
        for name, rows in (("q_bias_pos", "query"), ("kv_bias_pos", "key")):
            shape = (avals["slopes"].shape[0], avals[rows].shape[1])
            avals[name] = array(*shape, dtype=jnp.int32)
            values[name] = made_constant(ctx, _indices, avals[name])
    if group.before is not None:
        avals["before"], values["before"] = group.before
    absent = zeros(ctx, ABSENT)
    number = version(params)
    names = call_names(direction, number)
    if number > 1:
        attributes["dropout_threshold"] = np.int64(params["dropout_threshold"])
    q_block, kv_block = params["block_size"] or (0, 0)
    return ffi_call(
        ctx.replace(avals_in=[avals[x] if x in values else ABSENT for x in names]),
        f"packax_{direction}_v{number}",
        [values.get(x, absent) for x in names],
        workspace,
        # The first result is where it was before, so that nothing copies the other heads.
        None if group.before is None else {names.index("before"): 0},
        scale=np.float32(params["scale"]),
        soft_cap=np.float32(params["soft_cap"]),
        segment_check=np.int32(params["segment_check"]),
        q_block=np.int32(q_block),
        kv_block=np.int32(kv_block),
        bias_of_indices=np.int32(of_indices(params)),
        float32_products=np.int32(is_exact(params["precision"])),
        first_head=np.int32(group.first),
        heads=np.int32(group.heads),
        **attributes,
    )


def choose_algorithm(query: Any, value: Any, params: Any, for_export: bool = False) -> str:
    """The backward's: what its workspace has room for. Where the GPU that runs it has no kernels
    for that, C++ takes the one before (csrc/launch/calls.h).
    """
    suffix = suffix_of(params)
    # The kernels count rows in 32 bits. If there are more when an exported program runs, C++ knows.
    rows = _padded_rows(query)
    if suffix is None or (not is_symbolic(rows) and rows > INT_MAX):
        return "portable"
    dims = (str(query.dtype), query.shape[3], value.shape[3])
    fused = ffi.kernel_here("backward_sm90" + suffix, *dims, for_export=for_export)
    separate = ffi.kernel_here("backward_dkdv_sm90" + suffix, *dims, for_export=for_export)
    if not suffix and all(params["needs_grad"]):
        fused = fused or ffi.kernel_here("backward_sm80", *dims, for_export=for_export)
    # Separate ones make the same bits every run, or only what is needed.
    if separate and (params["deterministic"] or not all(params["needs_grad"]) or not fused):
        return "sm90_separate"
    return "sm90_fused" if fused and not params["deterministic"] else "portable"


def workspace_size(algorithm: str, query: Any, mask_batch: Any) -> Any:
    """In elements of 4 bytes, as WorkspaceSize of csrc/launch/backward_sm90.cc has it."""
    rows = _padded_rows(query)
    if algorithm == "portable":
        return rows
    sections = 2 * rows + 2 * mask_batch * BLOCK * ceil_div(query.shape[1], BLOCK)
    return sections + (rows * query.shape[3] if algorithm == "sm90_fused" else 1)


def _padded_rows(query: Any) -> Any:
    batch, q_len, heads, _ = query.shape
    return batch * heads * BLOCK * ceil_div(q_len, BLOCK)


def suffix_of(params: Any) -> str | None:
    """Of the names of the sm90 kernels: with one option, or none; None: there are none."""
    if params.get("score_grads") or params.get("max_logits"):
        return None
    alibi = ("scales", "slopes")
    suffixes: dict[Any, str] = {
        (False, False, ()): "",
        (True, False, ()): "_soft_cap",
        (False, True, ()): "_block_lists",
        (False, False, alibi): "_alibi",
    }
    return suffixes.get((bool(params["soft_cap"]), bool(params["block_size"]), params["extras"]))


def _indices(aval):
    return jax.lax.broadcasted_iota(aval.dtype, aval.shape, 1)
