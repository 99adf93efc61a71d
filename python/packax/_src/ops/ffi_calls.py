"""FFI calls: operands, attributes, workspaces, and which algorithm of the backward may run.

Absent operands and results have shape (0,): docs/internals/ffi.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from packax._src.core.mask import FIELDS, Pass
from packax._src.core.precision import is_exact
from packax._src.core.shapes import BLOCK, INT_MAX, ceil_div, is_symbolic
from packax._src.core.spec import ARRAYS, LINEAR_BIAS, TENSORS, AttentionSpec, Operands
from packax._src.ops import ffi
from packax._src.ops.partitioning import plain


def ffi_call(
    ctx, target: str, operands, workspace: tuple[Any, ...] = (),
    same_memory: dict[int, int] | None = None, **attributes: Any,
):  # fmt: skip
    """The FFI call; workspaces are extra results, which stay valid under CUDA graphs.

    `same_memory`: operands by index, and the results that reuse their memory.
    """
    results = len(ctx.avals_out)
    ctx = ctx.replace(
        avals_in=[plain(x) for x in ctx.avals_in],
        avals_out=[*(plain(x) for x in ctx.avals_out), *workspace],
    )
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=same_memory)
    return rule(ctx, *operands, **attributes)[:results]


def run_once(ctx, results):
    """The results of a call, after an optimization barrier.

    If `scan` stores a result for the backward pass that other operations read too, XLA copies the
    call into a fusion that writes the stored array, and keeps the call itself for the others: the
    kernel runs twice (openxla/xla#45799, seen with jax 0.11.2). XLA does not look through a
    barrier.
    """
    avals = [plain(x) for x in ctx.avals_out]
    barrier = mlir.lower_fun(lambda *x: jax.lax.optimization_barrier(x), multiple_results=True)
    return barrier(ctx.replace(primitive=None, avals_in=avals, avals_out=avals), *results)


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


COUNTER = array(1, dtype=jnp.int32)  # from which kernel programs take their next tile
ABSENT = array(0)  # stands for an absent operand or result


def made_constant(ctx, function, aval):
    make = mlir.lower_fun(lambda: function(aval), multiple_results=False)
    (made,) = make(ctx.replace(primitive=None, avals_in=[], avals_out=[aval]))
    return made


def zeros(ctx, aval):
    return made_constant(ctx, lambda x: jnp.zeros(x.shape, x.dtype), aval)


# --- Attention


def call_names(direction: Pass) -> tuple[str, ...]:
    """The names of all operands of a call: first those of both passes, then those of this one.
    `before` is out or dq."""
    mask = {name: field.passes for name, field in FIELDS.items() if direction in field.passes}
    common = (name for name, passes in mask.items() if len(passes) > 1)
    own = (name for name, passes in mask.items() if len(passes) == 1)
    both, of_backward = tuple(TENSORS)[:3], tuple(TENSORS)[3:] if direction == "backward" else ()
    return (*both, *common, *LINEAR_BIAS, *ARRAYS, *of_backward, *own, "before")


class HeadGroup(NamedTuple):
    """The query heads that a call computes."""

    first: int
    heads: int


_ALL_HEADS = HeadGroup(0, 0)


def forward(ctx, values: Operands, spec: AttentionSpec, group: HeadGroup = _ALL_HEADS):
    """The results of forward_p."""
    avals = Operands.of(values.names, ctx.avals_in)
    row_max = () if spec.max_logits else (ABSENT,)
    return _call(ctx, "forward", avals, values, spec, group, (*row_max, COUNTER))


def backward(ctx, values: Operands, spec: AttentionSpec, group: HeadGroup = _ALL_HEADS):
    """The results of backward_p. Those of dq, dk and dv that no kernel writes are absent."""
    avals = Operands.of(values.names, ctx.avals_in)
    query, of_keys = avals.query, "key" in spec.needs_grad or "value" in spec.needs_grad
    if group.heads:
        query = plain(query).update(shape=(*query.shape[:2], group.heads, query.shape[3]))
    algorithm = choose_algorithm(avals._replace(query=query), spec, ffi.for_export(ctx))
    elements = workspace_size(algorithm, query, avals.q_lo.shape[0])

    # The kernel of dq computes score_grads, and the fused one writes dk and dv with dq's sum.
    nothing = array(0, dtype=query.dtype)
    of_query = "query" in spec.needs_grad
    dkv = algorithm == "sm90_fused" or of_keys
    written = (of_query or spec.score_grads, dkv, dkv)
    tensors = [x if w else nothing for x, w in zip(ctx.avals_out, written, strict=False)]
    others = list(ctx.avals_out[3:])
    dbias = others.pop() if spec.bias_grad else ABSENT
    made = _call(
        ctx.replace(avals_out=[*tensors, dbias, *(others or [ABSENT])]),
        "backward",
        avals,
        values,
        spec,
        group,
        (array(elements),),
        algorithm=algorithm,
        needs_grad=np.int32(of_query + 2 * of_keys),
    )
    results = [
        x if w else zeros(ctx, plain(aval))  # unused, so never computed
        for x, w, aval in zip(made, written, ctx.avals_out, strict=False)
    ]
    results += made[4:] if spec.score_grads else []
    return [*results, *(made[3:4] if spec.bias_grad else [])]


def _call(
    ctx, direction: Pass, avals: Operands, values: Operands, spec: AttentionSpec, group: HeadGroup,
    workspace, **attributes: Any,
):  # fmt: skip
    bias_of_indices = avals.bias_of_indices
    if bias_of_indices:  # sm90 kernels need no positions, the fallback kernels need arrays
        for name, rows in (("q_bias_pos", avals.query), ("kv_bias_pos", avals.key)):
            of_name = array(avals.slopes.shape[0], rows.shape[1], dtype=jnp.int32)
            avals = avals._replace(**{name: of_name})
            values = values._replace(**{name: made_constant(ctx, _indices, of_name)})
    # For ids and positions that the mask's check does not read, any int32 array will do.
    unread = {
        x: "q_lo" for x in ("q_ids", "kv_ids", "q_pos", "kv_pos") if getattr(avals, x) is None
    }
    avals, values = (
        x._replace(**{name: getattr(x, other) for name, other in unread.items()})
        for x in (avals, values)
    )
    absent = zeros(ctx, ABSENT)
    names = call_names(direction)
    q_block, kv_block = spec.block_size or (0, 0)
    there = values.names
    unknown = [x for x in there if x not in names]
    assert not unknown, f"packax_{direction}_v1 does not take {unknown}: no kernel would read them"
    return ffi_call(
        ctx.replace(avals_in=[getattr(avals, x) if x in there else ABSENT for x in names]),
        f"packax_{direction}_v1",
        [getattr(values, x) if x in there else absent for x in names],
        workspace,
        # The first result reuses the memory of `before`, so the other heads are not copied.
        {names.index("before"): 0} if "before" in there else None,
        scale=np.float32(spec.scale),
        soft_cap=np.float32(spec.soft_cap),
        dropout_threshold=np.int64(spec.dropout_threshold),
        segment_check=np.int32(spec.segment_check),
        q_block=np.int32(q_block),
        kv_block=np.int32(kv_block),
        bias_of_indices=np.int32(bias_of_indices),
        float32_products=np.int32(is_exact(spec.precision)),
        first_head=np.int32(group.first),
        heads=np.int32(group.heads),
        **attributes,
    )


def choose_algorithm(of: Operands, spec: AttentionSpec, for_export: bool = False) -> str:
    """The backward algorithm for which the workspace is sized. If the GPU that runs it has no
    kernels for it, C++ uses the previous one in the list (csrc/call/operands.h).
    """
    suffix = suffix_of(of, spec)
    # The kernels count rows in 32 bits. For an exported program C++ checks that when it runs.
    rows = _padded_rows(of.query)
    if suffix is None or (not is_symbolic(rows) and rows > INT_MAX):
        return "portable"
    dims = (str(of.query.dtype), of.query.shape[3], of.value.shape[3])
    fused = ffi.kernel_here("backward_sm90" + suffix, *dims, for_export=for_export)
    separate = ffi.kernel_here("backward_dkdv_sm90" + suffix, *dims, for_export=for_export)
    everything = {"query", "key", "value"}.issubset(spec.needs_grad)
    if not suffix and everything:
        fused = fused or ffi.kernel_here("backward_sm80", *dims, for_export=for_export)
    # Separate kernels are deterministic, or compute only what is needed.
    if separate and (spec.deterministic or not everything or not fused):
        return "sm90_separate"
    return "sm90_fused" if fused and not spec.deterministic else "portable"


def workspace_size(algorithm: str, query: Any, mask_batch: Any) -> Any:
    """In elements of 4 bytes, as in ReadWorkspace of csrc/ffi/backward.cc."""
    rows = _padded_rows(query)
    if algorithm == "portable":
        return rows
    sections = 2 * rows + 2 * mask_batch * BLOCK * ceil_div(query.shape[1], BLOCK)
    return sections + (rows * query.shape[3] if algorithm == "sm90_fused" else 1)


def _padded_rows(query: Any) -> Any:
    batch, q_len, heads, _ = query.shape
    return batch * heads * BLOCK * ceil_div(q_len, BLOCK)


def suffix_of(of: Operands, spec: AttentionSpec) -> str | None:
    """The suffix of the sm90 kernels' names for this option; None: there are no such kernels."""
    if spec.score_grads or spec.max_logits:
        return None
    suffixes: dict[Any, str] = {
        (False, False, ()): "",
        (True, False, ()): "_soft_cap",
        (False, True, ()): "_block_lists",
        (False, False, ("scales", "slopes")): "_alibi",
    }
    return suffixes.get((bool(spec.soft_cap), bool(spec.block_size), of.extras))


def takes_fallback(direction: Pass, of: Operands, spec: AttentionSpec) -> bool:
    """Whether the fallback kernels are used: for other scores, or other head dims."""
    if of.extras or spec.soft_cap or spec.max_logits or spec.block_size:
        return True
    return ffi.ext is not None and not ffi.found(direction, of.query, of.value, fallback=False)


def require_kernels(direction: Pass, of: Operands, spec: AttentionSpec) -> None:
    fallback = takes_fallback(direction, of, spec)
    float32_products = not fallback or is_exact(spec.precision)
    ffi.require_kernels(
        direction, of.query, of.value, fallback, float32_products, with_bias=of.lse_in_two
    )


def _indices(aval):
    return jax.lax.broadcasted_iota(aval.dtype, aval.shape, 1)
