"""From primitives to platforms: FFI calls on CUDA, jax.numpy elsewhere.

Importing this module registers the FFI targets and the rules. Shapes and dtypes are not passed as
attributes, because buffers have them. Python never chooses a launch; it only asks whether a kernel
exists.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from packax._src.core.precision import is_exact
from packax._src.core.shapes import is_symbolic
from packax._src.core.spec import Operands
from packax._src.ops import (
    ffi,
    ffi_calls,
    partition_rules,
    rewrites,
    xla_attention,
    xla_decode,
    xla_mask,
)
from packax._src.ops.ffi_calls import ABSENT, ffi_call, zeros
from packax._src.ops.partitioning import partitioned, plain
from packax._src.ops.primitives import backward_p, blocks_p, decode_p, documents_p, forward_p

if ffi.ext is not None:
    for _name, _stages in ffi.ext.registrations().items():
        jax.ffi.register_ffi_target(_name, _stages, platform="CUDA")

TARGETS = (
    *("packax_documents_v1", "packax_blocks_v1", "packax_forward_v1", "packax_backward_v1"),
    "packax_decode_v1",
)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=)` needs for programs with packax's kernels.

    jax does not guarantee that custom calls it does not know still exist when the program runs. The
    names of packax's calls have a version, which increases with every change of a call: where the
    program runs, import a packax that has the same versions.

    Examples:
        >>> exported = jax.export.export(
        ...     jax.jit(step), platforms=["cuda"], disabled_checks=packax.export_checks()
        ... )(*shapes)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]


def lower_xla(function: Any, static: tuple[str, ...]) -> Any:
    # jit, so that all layers of a model trace it only once.
    rule = mlir.lower_fun(jax.jit(function, static_argnames=static), multiple_results=True)

    def lower(ctx, *operands, implementation=None, **params):  # ignores implementation
        ctx = ctx.replace(
            avals_in=[plain(x) for x in ctx.avals_in], avals_out=[plain(x) for x in ctx.avals_out]
        )
        return rule(ctx, *operands, **params)

    return lower


def without_kernels(rule: Any) -> Any:
    """The rule of a platform that has no kernels."""

    def lower(ctx, *operands, **params):
        if implementation_of(params) == "cuda":
            platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
            raise NotImplementedError(
                f'implementation="cuda" needs a CUDA device, but this is lowered for {platforms}: '
                'use implementation=None (kernels on CUDA, XLA elsewhere) or "xla"'
            )
        return rule(ctx, *operands, **params)

    return lower


def register(primitive: Any, dims: Any, elsewhere: Any, cuda: Any) -> None:
    """Registers the primitive's rules; XLA may divide each of them over a mesh."""
    mlir.register_lowering(primitive, partitioned(primitive, dims, elsewhere))
    on_cuda = partitioned(primitive, dims, cuda, kernels=True)
    mlir.register_lowering(primitive, on_cuda, platform="cuda")


def implementation_of(params: dict[str, Any]) -> str | None:
    return params["spec"].implementation if "spec" in params else params["implementation"]


# --- Attention


def xla_forward(*operands, spec, names):
    return xla_attention.forward(spec, Operands.of(names, operands))


def xla_backward(*operands, spec, names):
    return xla_attention.backward(spec, Operands.of(names, operands))


def _rewrite(*operands, direction, spec, names, rewrite, to):
    return rewrite(direction, spec, Operands.of(names, operands), to)


_STATIC = ("spec", "names")
_forward_xla = lower_xla(xla_forward, _STATIC)
_backward_xla = lower_xla(xla_backward, _STATIC)
_rewritten = lower_xla(_rewrite, ("direction", *_STATIC, "rewrite", "to"))


def _attention_on_cuda(direction, xla):
    def lower(ctx, *operands, spec, names):
        if spec.implementation == "xla":
            return xla(ctx, *operands, spec=spec, names=names)
        avals = Operands.of(names, ctx.avals_in)
        found = rewrites.rewritten(direction, avals, spec, ffi.for_export(ctx))
        if found is not None:
            rewrite, to = found
            params = {"spec": spec, "names": names, "rewrite": rewrite, "to": to}
            return _rewritten(ctx, *operands, direction=direction, **params)
        ffi_calls.require_kernels(direction, avals, spec)
        values = Operands.of(names, operands)
        if direction == "backward":
            return ffi_calls.backward(ctx, values, spec)
        return ffi_calls.run_once(ctx, ffi_calls.forward(ctx, values, spec))

    return lower


register(
    forward_p,
    partition_rules.forward,
    without_kernels(_forward_xla),
    _attention_on_cuda("forward", _forward_xla),
)
register(
    backward_p,
    partition_rules.backward,
    without_kernels(_backward_xla),
    _attention_on_cuda("backward", _backward_xla),
)


# --- Masks

_CHUNK = 1024  # keys per program of the document kernels: the workspace holds one int per chunk
_MOST_TABLE_KEYS = 1 << 27  # as in csrc/ffi/mask.cc
_MOST_MASK_ROWS = 65535  # batch rows: the limit of a grid's y, in the kernels that build masks


def _xla_blocks(*operands, kv_len):
    return xla_mask.block_bounds(*operands, kv_len=kv_len)


_documents_xla = lower_xla(xla_mask.document_ranges, ("compare_positions",))
_blocks_xla = lower_xla(_xla_blocks, ("kv_len",))


def _takes_mask_kernels(ctx, kernel, implementation, batch, kv_len):
    """Whether kernels build the mask; otherwise XLA computes the same integers, for example for
    sizes that the kernels cannot count."""
    if implementation == "xla":
        return False
    if implementation == "cuda":
        ffi.require_extension()
    elif ffi.ext is None or not ffi.serves_here(kernel, for_export=ffi.for_export(ctx)):
        return False
    few = is_symbolic(batch) or batch <= _MOST_MASK_ROWS
    return few and not is_symbolic(kv_len)


def _documents_cuda(ctx, *operands, compare_positions, implementation):
    batch, kv_len = ctx.avals_in[1].shape
    # the size of the tables must be static, and small enough for the kernels' 32-bit indices
    kernels = _takes_mask_kernels(ctx, "documents_rows", implementation, batch, kv_len)
    if not kernels or kv_len > _MOST_TABLE_KEYS:
        return _documents_xla(ctx, *operands, compare_positions=compare_positions)
    width = 5 * xla_mask.table_size(kv_len) + kv_len + -(-kv_len // _CHUNK)
    workspace = jax.core.ShapedArray((batch, width), jnp.dtype(jnp.int32))
    return ffi_call(
        ctx,
        "packax_documents_v1",
        operands,
        (workspace,),
        compare_positions=np.int32(compare_positions),
    )


def _blocks_cuda(ctx, *operands, kv_len, implementation):
    batch = ctx.avals_in[0].shape[0]
    if not _takes_mask_kernels(ctx, "blocks_rows", implementation, batch, kv_len):
        return _blocks_xla(ctx, *operands, kv_len=kv_len)
    return ffi_call(ctx, "packax_blocks_v1", operands, kv_len=np.int64(kv_len))


register(documents_p, partition_rules.documents, without_kernels(_documents_xla), _documents_cuda)
register(blocks_p, partition_rules.blocks, without_kernels(_blocks_xla), _blocks_cuda)


# --- Decoding
#
# The workspace is a result of the call, so its size, a number of shares of the keys, is decided
# here, only from shapes. C++ decides how many the GPU uses (csrc/launch/decode_shares.cc).

_PROGRAMS = 1024  # the most that csrc/launch/decode_shares.cc launches at once on the largest GPU
_MOST_SHARES = 128  # the limit of csrc/launch/decode.cc


def _xla_decode(*operands, paged, has_sinks, **static):
    query, key, value, q_lo, q_hi, *others = operands
    table = others[0] if paged else None
    sinks = others[-1] if has_sinks else None
    return xla_decode.decode(query, key, value, q_lo, q_hi, table, sinks, **static)


_DECODE = ("scale", "soft_cap", "precision", "paged", "has_sinks")
_decode_xla = lower_xla(_xla_decode, _DECODE)


def _decode_cuda(ctx, *operands, implementation, **static):
    if implementation == "xla":
        return _decode_xla(ctx, *operands, **static)
    scale, soft_cap, precision, paged, has_sinks = (static[name] for name in _DECODE)
    query, key, value = ctx.avals_in[:3]
    float32_products = is_exact(precision)
    _require_decode_kernel(query, value, float32_products)
    buffers, avals = list(operands), list(ctx.avals_in)
    for place, there in ((5, paged), (6, has_sinks)):
        if not there:
            avals.insert(place, ABSENT)
            buffers.insert(place, zeros(ctx, ABSENT))
    batch, q_len, heads, _ = query.shape
    keys = key.shape[1] * (avals[5].shape[1] if paged else 1)
    rows = (splits(batch, q_len, heads, key.shape[2], keys), batch, q_len, heads)
    workspace = ((*rows, value.shape[3]), rows)
    return ffi_call(
        ctx.replace(avals_in=avals),
        "packax_decode_v1",
        buffers,
        tuple(jax.core.ShapedArray(shape, jnp.dtype(jnp.float32)) for shape in workspace),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap),
        float32_products=np.int32(float32_products),
    )


def splits(batch: int, q_len: int, heads: int, kv_heads: int, keys: int) -> int:
    """How many shares of the keys the workspace has room for; csrc/launch/decode.cc uses at most
    this many."""
    if is_symbolic(keys):  # of jax.export: room for the most that any size needs
        return _MOST_SHARES
    most = min(_MOST_SHARES, -(-keys // 128))
    if is_symbolic(batch):
        return most
    rows = q_len * (heads // kv_heads)
    fill = -(-_PROGRAMS // max(batch * kv_heads * -(-rows // 64), 1))
    balance = keys // (1024 + 64 * rows)
    return max(1, min(most, max(fill, balance)))


def _require_decode_kernel(query: Any, value: Any, float32_products: bool) -> None:
    ffi.require_extension()
    rows = [row for row in ffi.variants() if row["kernel"] == "decode"]
    qk_dim, v_dim = query.shape[3], value.shape[3]
    dtype = ffi.kernel_dtype(query.dtype, float32_products)
    rooms = [row for row in rows if row["qk_dim"] >= qk_dim and row["v_dim"] >= v_dim]
    if qk_dim % 8 == v_dim % 8 == 0 and any(row["dtype"] == dtype for row in rooms):
        return
    raise NotImplementedError(
        f"no decode kernel for {query.dtype} with head dims {qk_dim}/{v_dim} (query and key / "
        f"value); available, for multiples of 8 up to these: {ffi.listed(rows)}"
        f"{ffi.whole_build()}. "
        'implementation="xla" takes any head dim, and float64'
    )


register(decode_p, partition_rules.decode, without_kernels(_decode_xla), _decode_cuda)
