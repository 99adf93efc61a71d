"""Lowers the primitives: to FFI calls on CUDA, to jax.numpy on other platforms.

Importing this module registers the FFI targets and the lowering rules. Shapes and dtypes are not
attributes, because C++ reads them from the buffers. Python does not choose kernels: it checks that
some exist, and rewrites some calls into a form that runs faster on CUDA (second half of this file).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from packax._src.core.mask import Pass
from packax._src.core.schema import OPERAND_NAMES, SYMBOLS, TARGETS
from packax._src.core.sharding import vary_together
from packax._src.core.spec import (
    BLOCK,
    FP8,
    MAX_LENGTH,
    TILE,
    AttentionSpec,
    MaskMode,
    Operands,
    ceil_div,
    fill_up,
    is_fp8,
    is_symbolic,
)
from packax._src.ops import (
    ffi,
    packed_rows,
    partition_rules,
    primitives,
    xla_attention,
    xla_decode,
    xla_mask,
)
from packax._src.ops.ffi import ffi_call
from packax._src.ops.partitioning import partitioned, plain, without_mesh
from packax._src.ops.primitives import (
    BLOCK_ARRAYS,
    backward_p,
    blocks_p,
    decode_p,
    documents_p,
    forward_p,
)

if ffi.ext is not None:
    for _name, _stages in ffi.ext.registrations().items():
        jax.ffi.register_ffi_target(_name, _stages, platform="CUDA")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=)` needs for programs with packax's kernels.

    jax does not guarantee that custom calls it does not know still exist when the program runs. The
    names of packax's calls have a version, which increases with every change of a call: where the
    program runs, import a packax that has the same versions.

    Returns:
        One `DisabledSafetyCheck` for each of packax's custom calls.

    Examples:
        >>> exported = jax.export.export(
        ...     jax.jit(step), platforms=["cuda"], disabled_checks=packax.export_checks()
        ... )(*shapes)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(SYMBOLS[x]) for x in TARGETS]


def lower_xla(function: Any, static: tuple[str, ...]) -> Any:
    # jit, so that it is traced once for all layers of a model.
    rule = mlir.lower_fun(jax.jit(function, static_argnames=static), multiple_results=True)

    def lower(ctx, *operands, implementation=None, **params):  # ignores implementation
        ctx = ctx.replace(
            avals_in=[plain(x) for x in ctx.avals_in], avals_out=[plain(x) for x in ctx.avals_out]
        )
        with without_mesh(ctx.avals_in):
            return rule(ctx, *operands, **params)

    return lower


def _without_kernels(rule: Any) -> Any:
    """The lowering rule of a platform without kernels: raises if they are requested."""

    def lower(ctx, *operands, **params):
        requested = params["spec"].implementation if "spec" in params else params["implementation"]
        if requested == "cuda":
            platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
            raise NotImplementedError(
                f'implementation="cuda" needs a CUDA device, but this is lowered for {platforms}: '
                'use implementation=None (kernels on CUDA, XLA elsewhere) or "xla"'
            )
        return rule(ctx, *operands, **params)

    return lower


def register(primitive: Any, dims: Any, xla: Any, cuda: Any) -> None:
    """Registers the lowering rules of a primitive, which XLA may partition over a mesh. `xla` is
    the rule of platforms without kernels."""
    mlir.register_lowering(primitive, partitioned(primitive, dims, _without_kernels(xla)))
    on_cuda = partitioned(primitive, dims, cuda, kernels=True)
    mlir.register_lowering(primitive, on_cuda, platform="cuda")


# --- Attention


def xla_forward(*operands, spec, names, on_gpu=False):
    return xla_attention.forward(spec, Operands.of(names, operands), on_gpu)


def xla_backward(*operands, spec, names, on_gpu=False):
    return xla_attention.backward(spec, Operands.of(names, operands), on_gpu)


def _rewrite(*operands, direction, spec, names, rewrite, to):
    return rewrite(direction, spec, Operands.of(names, operands), to)


_STATIC = ("spec", "names")
_rewritten = lower_xla(_rewrite, ("direction", *_STATIC, "rewrite", "to"))


def _attention_on_cuda(direction, run):
    on_gpu = lower_xla(functools.partial(run, on_gpu=True), _STATIC)

    def lower(ctx, *operands, spec, names):
        if spec.implementation == "xla":
            return on_gpu(ctx, *operands, spec=spec, names=names)
        avals = Operands.of(names, ctx.avals_in)
        found = rewritten(direction, avals, spec, ffi.for_export(ctx))
        if found is not None:
            rewrite, to = found
            params = {"spec": spec, "names": names, "rewrite": rewrite, "to": to}
            return _rewritten(ctx, *operands, direction=direction, **params)
        ffi.require_kernels(direction, avals, spec, ffi.for_export(ctx))
        values = Operands.of(names, operands)
        if direction == "backward":
            return ffi.backward(ctx, values, spec)
        return ffi.run_once(ctx, ffi.forward(ctx, values, spec))

    return lower


for _primitive, _dims, _direction, _run in (
    (forward_p, partition_rules.forward, "forward", xla_forward),
    (backward_p, partition_rules.backward, "backward", xla_backward),
):
    register(_primitive, _dims, lower_xla(_run, _STATIC), _attention_on_cuda(_direction, _run))


# --- Masks

_documents_xla = lower_xla(xla_mask.document_ranges, ("compare_positions",))
_blocks_xla = lower_xla(xla_mask.block_bounds, ("kv_len",))


def _judge_mask(ctx, target, implementation, batch, kv_len):
    """What C++ says of the kernels that build the mask. None: XLA computes the same integers, for
    example if sizes exceed the limits of the kernels."""
    if implementation == "cuda":
        ffi.require_extension()
    if implementation == "xla" or ffi.ext is None:
        return None
    judged = ffi.judge(target, ffi.known(batch=batch, kv_len=kv_len), ffi.for_export(ctx))
    return judged if judged["found" if implementation == "cuda" else "here"] else None


def _documents_cuda(ctx, *operands, compare_positions, implementation):
    batch, kv_len = ctx.avals_in[1].shape
    judged = _judge_mask(ctx, "documents", implementation, batch, kv_len)
    if judged is None:
        return _documents_xla(ctx, *operands, compare_positions=compare_positions)
    workspace = (ffi.array(batch, judged["workspace"][2], dtype=jnp.int32),)
    compared = np.int32(compare_positions)
    return ffi_call(ctx, SYMBOLS["documents"], operands, workspace, compare_positions=compared)


def _blocks_cuda(ctx, *operands, kv_len, implementation):
    if _judge_mask(ctx, "blocks", implementation, ctx.avals_in[0].shape[0], kv_len) is None:
        return _blocks_xla(ctx, *operands, kv_len=kv_len)
    return ffi_call(ctx, SYMBOLS["blocks"], operands, kv_len=np.int64(kv_len))


register(documents_p, partition_rules.documents, _documents_xla, _documents_cuda)
register(blocks_p, partition_rules.blocks, _blocks_xla, _blocks_cuda)


# --- Decoding
#
# The keys are split into shares. The workspace is a result of the call, so its size, the maximum
# number of shares, depends on shapes alone. C++ chooses the number that the GPU uses
# (csrc/launch/decode_shares.cc).


def _xla_decode(*operands, spec, names):
    decode, x = functools.partial(xla_decode.decode, spec), Operands.of(names, operands)
    return decode(x) if x.row_bounds is None else packed_rows.in_tiles(decode, x)


def with_work_list(*operands, spec, names):
    """Packed rows, as the call of kernels."""
    x = Operands.of(names, operands)
    x = x._replace(row_bounds=None, work=packed_rows.work_list(x))
    return primitives.decode(spec, x)


_decode_xla, _decode_packed = (lower_xla(x, _STATIC) for x in (_xla_decode, with_work_list))


def _decode_cuda(ctx, *operands, spec, names):
    if spec.implementation == "xla":
        return _decode_xla(ctx, *operands, spec=spec, names=names)
    of = Operands.of(names, ctx.avals_in)
    require_decode_kernel(of, spec)
    if of.row_bounds is not None:
        return _decode_packed(ctx, *operands, spec=spec, names=names)
    workspace = [ffi.array(*shape) for shape in decode_workspace(of, spec)]
    workspace += [ffi.COUNTER] if of.work is not None else []
    target = "decode" if of.work is None else "ragged"
    given = dict(zip(names, zip(ctx.avals_in, operands, strict=True), strict=True))
    avals, buffers = ffi.in_order(ctx, OPERAND_NAMES[target], given)
    ctx, attributes = ctx.replace(avals_in=avals), ffi.attributes(target, spec)
    return ffi_call(ctx, SYMBOLS[target], buffers, tuple(workspace), **attributes)


def decode_workspace(of: Operands, spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
    """The shapes of the float32 arrays of the workspace: partial results and their sums."""
    batch, q_len, heads, _ = of.query.shape
    if of.work is not None:
        size, _, items, _ = packed_rows.room_of(of)
        return (items, size, heads, of.value.shape[3]), (items, size, heads)
    splits = ffi.judge("decode", ffi.fields("decode", of, spec))["splits"]
    rows = (splits, batch, q_len, heads)
    return (*rows, of.value.shape[3]), rows


def require_decode_kernel(of: Operands, spec: AttentionSpec) -> None:
    ffi.require_extension()
    ffi.refuse_unread("ragged", of._replace(row_bounds=None), spec)  # which has all of "decode"
    if ffi.judge("decode", ffi.fields("decode", of, spec))["found"]:
        return
    fp8 = is_fp8(of.value)
    multiple = 2 * ffi.MULTIPLE if fp8 else ffi.MULTIPLE  # 16 bytes
    kernel = "decode_fp8" if fp8 else "decode"
    rows = [row for row in ffi.variants() if row["kernel"] == kernel]
    dtype = f"{of.query.dtype} over a {FP8} cache" if fp8 else of.query.dtype
    queries = ", and queries in bfloat16 or float16" if fp8 else ""
    raise NotImplementedError(
        f"no decode kernel for {dtype} with head dims {of.query.shape[3]}/{of.value.shape[3]} "
        f"(query and key / value); available, for multiples of {multiple} up to these{queries}: "
        f"{ffi.listed(rows)}{ffi.whole_build()}. "
        'implementation="xla" takes any head dim, and float64'
    )


register(decode_p, partition_rules.decode, _decode_xla, _decode_cuda)


# --- Rewrites of calls into forms that run faster on CUDA, with the same results.

Rewrite = Callable[..., list[jax.Array]]


def rewritten(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool
) -> tuple[Rewrite, Any] | None:
    """The rewrite for these avals, and its last argument; None: no rewrite."""
    # Batch packing does not support positions and block masks, which refer to one batch row.
    own_sinks = of.sinks is not None and of.sinks.shape[0] > 1  # of batch rows, under vmap
    packable = not of.optional_operands and not spec.block_size and not own_sinks
    if packable and worth_packing(of.query, of.key):
        return packed, None
    if direction == "backward" and ("key" in spec.needs_grad or "value" in spec.needs_grad):
        parts = parts_of_group(of.query, of.key)
        if parts > 1:
            return in_parts, parts
    if ffi.ext is None:
        return None
    judged = ffi.judge_attention(direction, of, spec, for_export)
    if judged["kv_len"]:
        return with_keys, judged["kv_len"]
    return (padded, judged["dims"]) if judged["dims"] else None


def run(direction: Pass, spec: AttentionSpec, operands: Operands) -> list[jax.Array]:
    function = primitives.forward if direction == "forward" else primitives.backward
    return function(spec, operands)


# --- Batch packing: short batch rows run as documents of a single batch row.
#
# A tile of the attention kernels is 128 rows of one batch row. So thousands of batch rows of 16
# tokens would be thousands of nearly empty tiles, and the backward would pad its sum of dq to 64
# rows for each. As documents of a single batch row, they fill the tiles. The row ranges of the mask
# are shifted by the number of preceding keys, which separates the batch rows. Only the propagation
# of NaN differs (docs/guide/numerics.md).

PACKED_ROWS = BLOCK  # at most, so that two batch rows fit into a tile
PACKED_KEYS = TILE  # at most; with more, packing does not reduce the number of steps
# At least. Calculated for tiles of 3.5 us on 132 multiprocessors: fewer tiles take no longer than
# computing the mask's block bounds again.
PACKED_TILES = 1024


def worth_packing(query: Any, key: Any) -> bool:
    """Whether batch packing is faster, for shapes (B, Sq, H, D) and (B, Skv, Hkv, D)."""
    batch, q_len, heads, _ = query.shape
    if any(is_symbolic(n) for n in (*query.shape, *key.shape)):
        return False
    short = q_len <= PACKED_ROWS and key.shape[1] <= PACKED_KEYS
    rows = batch * max(q_len, key.shape[1])
    return short and batch > 1 and batch * heads >= PACKED_TILES and rows <= MAX_LENGTH


def packed(direction: Pass, spec: AttentionSpec, x: Operands, _: Any = None) -> list[jax.Array]:
    """The call with all batch rows as documents of a single batch row."""
    batch, q_len, heads, _ = x.query.shape
    joined = {
        name: y.reshape(1, batch * y.shape[1], *y.shape[2:])
        for name, y in x._asdict().items()
        if name in ("query", "key", "value", "out", "dout") and y is not None
    }
    joined |= {
        name: _flat(y, batch) for name, y in (("lse", x.lse), ("dlse", x.dlse)) if y is not None
    }
    results = run(direction, spec, x._replace(**joined, **one_row(spec, x)))
    tensors, numbers = results[:1], results[1:]
    shapes = [(*x.query.shape[:3], x.value.shape[3])]
    if direction == "backward":
        tensors, numbers = results[:3], results[3:]
        shapes = [y.shape for y in x[:3]]
    apart = (y.reshape(heads, batch, q_len).swapaxes(0, 1) for y in numbers)
    return [*(y.reshape(n) for y, n in zip(tensors, shapes, strict=True)), *apart]


def _flat(x: jax.Array, batch: int) -> jax.Array:
    """Joins the batch rows: (1 or B, ..., S) to (1, ..., B * S)."""
    x = jnp.moveaxis(jnp.broadcast_to(x, (batch, *x.shape[1:])), 0, -2)
    return x.reshape(1, *x.shape[:-2], -1)


def one_row(spec: AttentionSpec, x: Operands) -> dict[str, jax.Array]:
    """The mask arrays of the single batch row: shifted row ranges, recomputed block bounds."""
    batch, kv_len = x.query.shape[0], x.key.shape[1]
    before, kv_start, kv_end = vary_together(
        jnp.arange(batch, dtype=jnp.int32)[:, None], x.kv_start, x.kv_end
    )
    lo, hi = (_flat(y + before * kv_len, batch) for y in (kv_start, kv_end))
    # A batch row has at most 64 rows, so it is one block of the mask.
    segment_checked = _flat(jnp.broadcast_to(x.q_blocks[:, 4] & 1, kv_start.shape), batch)
    arrays = {"kv_start": lo, "kv_end": hi}
    of_modes = {MaskMode.IDS: ("q_ids", "kv_ids"), MaskMode.UPPER_LIMIT: ("q_pos", "kv_pos")}
    for mode, names in of_modes.items():
        for name in names:
            y = getattr(x, name)
            if spec.mask_mode >= mode:
                arrays[name] = _flat(y, batch)
            elif y is not None:  # present, but never read
                arrays[name] = lo
    blocks = blocks_p.bind(
        *vary_together(lo, hi, segment_checked),
        kv_len=batch * kv_len,
        implementation=spec.implementation,
    )
    present = x.names
    return arrays | {n: y for n, y in zip(BLOCK_ARRAYS, blocks, strict=True) if n in present}


# --- Low occupancy: the query heads of a GQA group are divided among programs.
#
# In the kernels for dK and dV, a program computes 128 keys of one key/value head, for all query
# heads that read it. One head with 16k keys is 128 programs, and with a causal mask the first has
# 128 times the work of the last, so most of the GPU waits for a few programs. In this case the
# query heads of a group are divided into parts. Keys and values are repeated for every part, and
# the gradients of the parts are added in float32. With enough programs, nothing is repeated.

# Numbers of programs: about two and about eight per multiprocessor of the largest GPUs. With one
# per multiprocessor and a causal mask, the longest program takes twice the mean.
ALL_BUSY = 256
BALANCED = 1024
# If all multiprocessors are busy, calculation shows that with fewer keys times query heads per part
# than this, repeating keys and values costs more than the balance gains.
LONG = 32768
# With fewer keys, a program has at most 16 steps per query head.
SHORT = 1024


def parts_of_group(query: Any, key: Any) -> int:
    """The number of parts into which to divide the query heads of each key/value head, for shapes
    (B, Sq, H, D) and (B, Skv, Hkv, D).
    """
    batch, kv_len, kv_heads, _ = key.shape
    if any(is_symbolic(n) for n in (batch, kv_len, kv_heads, query.shape[2])):
        return 1
    programs = batch * kv_heads * ceil_div(kv_len, TILE)
    group = query.shape[2] // kv_heads
    if programs == 0 or programs >= BALANCED or kv_len < SHORT:
        return 1
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    parts = next((n for n in divisors if n * programs >= BALANCED), group)
    return parts if programs < ALL_BUSY or kv_len * group >= LONG * parts else 1


def in_parts(direction: Pass, spec: AttentionSpec, x: Operands, parts: int) -> list[jax.Array]:
    """The call with `parts` times as many key/value heads."""
    key, value = (jnp.repeat(y, parts, axis=2) for y in (x.key, x.value))
    dq, dk, dv, *rest = run(direction, spec, x._replace(key=key, value=value))
    return [dq, _added(dk, parts), _added(dv, parts), *rest]


def _added(gradient: Any, parts: int) -> Any:
    batch, length, heads, dim = gradient.shape
    apart = gradient.reshape(batch, length, heads // parts, parts, dim)
    return apart.sum(3, dtype=jnp.float32).astype(gradient.dtype)


# --- Head dims between those of the kernels: padded with zeros to the next larger one.
#
# Zeros do not change scores, and the padding of results and gradients is cut off. Hopper's kernels
# read and write the call's columns alone, so a program for Hopper is not padded. The fallback
# kernels need no padding, but take more than twice as long (docs/internals/proxy.md).


def padded(
    direction: Pass, spec: AttentionSpec, x: Operands, dims: tuple[int, int]
) -> list[jax.Array]:
    """The call with head dims padded with zeros to `dims`."""
    of_name = {"query": dims[0], "key": dims[0], "value": dims[1], "out": dims[1], "dout": dims[1]}
    wide = {
        name: fill_up(y, 3, dim)
        for name, dim in of_name.items()
        if (y := getattr(x, name)) is not None
    }
    results = run(direction, spec, x._replace(**wide))
    if direction == "forward":
        out, *numbers = results
        return [out[..., : x.value.shape[3]], *numbers]
    narrow = [y[..., : like.shape[3]] for y, like in zip(results, x[:3], strict=False)]
    return [*narrow, *results[3:]]  # with that of the bias


# --- A bias whose rows are no multiple of 16 bytes: the keys are padded.
#
# The kernels for Hopper read a bias and write its gradient by TMA, which needs rows of whole 16
# bytes. The kernels for other rows take up to three times as long, and a copy moves the bias only
# twice. No row attends to the padding, which is behind all key ranges. Blocks of 64 keys are
# multiples of 8, so the mask has the same blocks.


def with_keys(direction: Pass, spec: AttentionSpec, x: Operands, keys: int) -> list[jax.Array]:
    """The call with keys padded with zeros to this number."""
    kv_len = x.key.shape[1]
    longer = {}
    for name, axis in {"key": 1, "value": 1, "bias": 3, "kv_ids": 1, "kv_pos": 1}.items():
        y = getattr(x, name)
        if y is not None and y.shape[axis] == kv_len:  # otherwise nothing reads it
            longer[name] = fill_up(y, axis, keys)
    results = run(direction, spec, x._replace(**longer))
    if direction == "forward":
        return results
    dq, dk, dv, *others = results
    if spec.bias_grad:  # the last result
        others[-1] = others[-1][..., :kv_len]
    return [dq, dk[:, :kv_len], dv[:, :kv_len], *others]
