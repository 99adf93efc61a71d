"""Calls into C++: what it judges of a call, and the FFI calls of both passes.

C++ selects kernels for the device at run time (csrc/launch/rows.h), and by the same tables says
what lowering must know before (csrc/launch/judge.h), when the GPU that will run the program is not
yet known. Absent operands and results of a call have shape (0,) ("FFI targets" in the
documentation).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from packax._src.core.mask import Pass
from packax._src.core.schema import ATTRIBUTES, OPERAND_NAMES, SYMBOLS
from packax._src.core.spec import (
    BLOCK,
    INT_MAX,
    MAX_LENGTH,
    AttentionSpec,
    Operands,
    ceil_div,
    is_fp8,
    is_symbolic,
)
from packax._src.ops import packed_rows
from packax._src.ops.partitioning import plain

ext: ModuleType | None
try:
    ext = importlib.import_module("packax._ext")
except ImportError as error:  # source tree or broken install: XLA still works, `info` reports it
    ext, ext_error = None, str(error)

_DTYPES = {"bfloat16": "bf16", "float16": "f16"}
FP8 = "e4m3"  # for keys and values
_FLOAT32 = {False: "tf32", True: "f32"}  # keyed by whether products are computed in float32
MULTIPLE = 8  # of head dims, as error messages say it
_OPTIONS = tuple(x.name for x in ATTRIBUTES["forward"] if x.type == "float" and x.name != "scale")
TANGENTS = ("query", "key", "value")
"""The operands whose tangents the kernels for the forward's tangent take."""


def for_export(ctx: Any) -> bool:
    """Whether the program is lowered by jax.export, possibly for another machine."""
    return ctx.module_context.lowering_parameters.for_export


def judge(target: str, call: dict[str, Any], for_export: bool = False) -> Any:
    """What C++ says of a call, for the GPUs that may run the program: this process's, or all of the
    build's. `Judgement` in _ext.pyi; `call`: `fields`."""
    assert ext is not None
    return ext.judge(target, call, sorted((not for_export and local_capabilities()) or ()))


def judge_attention(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool = False
) -> Any:
    return judge(direction, fields(direction, of, spec), for_export)


def fields(target: str, of: Operands, spec: AttentionSpec) -> dict[str, Any]:
    """The fields of csrc/call/operands.h that are not 0, as csrc/ffi reads them from the buffers of
    the call. Sizes that are not known yet are 0, too."""
    query, value = of.query, of.value
    call: dict[str, Any] = {
        "dtype": kernel_dtype(query.dtype, spec.float32_products) or "any",
        "qk_dim": query.shape[3],
        "v_dim": value.shape[3],
    }
    sizes = dict(zip(("batch", "q_len", "heads"), query.shape[:3], strict=True))
    sizes |= {"kv_len": of.key.shape[1], "kv_heads": of.key.shape[2]}
    if target == "decode":
        if of.block_table is not None:
            sizes["pages"], sizes["page_size"] = of.key.shape[:2]
            sizes["table_width"] = of.block_table.shape[1]
            sizes["kv_len"] *= of.block_table.shape[1]
        if of.work is not None:
            room = packed_rows.room_of(of)
            sizes |= {"tile_rows": room.tile_rows, "chunk_tiles": room.chunk_tiles}
            call |= {"scale": spec.scale, "soft_cap": spec.soft_cap}
        call |= known(**sizes)
        return {**call, "kv_len": min(call["kv_len"], MAX_LENGTH), "fp8": is_fp8(value)}
    call |= (
        known(**sizes)
        | {name: getattr(spec, name) for name in ("scale", *_OPTIONS)}
        | {
            "dropout_threshold": min(spec.dropout_threshold, INT_MAX),  # only whether it is 0
            "row_stats": spec.max_logits if target == "forward" else spec.score_grads,
            "scales_batch": 0 if of.scales is None else 1,
            "bias_of_indices": of.bias_of_indices,
        }
    )
    if of.slopes is not None:
        call["bias_batch"] = 1 if of.slopes.shape[0] == 1 else 2  # only whether it is 0 or 1
    if of.bias is not None:
        call["bias_kind"] = 2 if of.bias.dtype == jnp.float32 else 1
        groups, *_ = axes = of.bias.shape[:3]
        of_axes = sum((is_symbolic(n) or n > 1) << axis for axis, n in enumerate(axes))
        symbolic = is_symbolic(groups) or is_symbolic(query.shape[0])
        group = 1 if groups == query.shape[0] else 2 if symbolic else query.shape[0] // groups
        call["bias_axes"] = of_axes + (group << 3)
    if spec.block_size is not None:
        call["q_block"], call["kv_block"] = spec.block_size
        call["block_mask_heads"] = 1
    if target == "forward":
        return call | {"row_keys": spec.row_keys, "mask_mode": int(spec.mask_mode)}
    return call | {
        "deterministic": spec.deterministic,
        "needs_dq": "query" in spec.needs_grad or spec.score_grads,
        "needs_dkv": "key" in spec.needs_grad or "value" in spec.needs_grad,
        "needs_dbias": spec.bias_grad,
    }


def known(**sizes: Any) -> dict[str, int]:
    return {name: 0 if is_symbolic(n) else n for name, n in sizes.items()}


def variants() -> list[Any]:
    """The kernels of this build, as rows of the table."""
    assert ext is not None
    return ext.variants()


_assumed: contextvars.ContextVar[int | None] = contextvars.ContextVar("assumed", default=None)


@contextlib.contextmanager
def assumed_capability(cc: int) -> Iterator[None]:
    """Selects kernels as if this process's only CUDA device had this compute capability."""
    token = _assumed.set(cc)
    try:
        yield
    finally:
        _assumed.reset(token)


def local_capabilities() -> set[int] | None:
    """The compute capabilities of this process's CUDA devices (90 for 9.0).

    None: it has none, so it compiles for another machine.
    """
    assumed = _assumed.get()
    if assumed is not None:
        return {assumed}
    try:
        devices = jax.local_devices(backend="cuda")
        return {int(str(d.compute_capability).replace(".", "")) for d in devices} or None
    except (RuntimeError, AttributeError, ValueError):
        return None


def has_kernels(
    query: Any, key: Any, value: Any, *, options: bool = False, with_bias: bool = False
) -> bool:
    """Whether a full build has kernels of both passes for the dtype and head dims.

    True if the extension is not built. `options`: with a block mask, or another option that only
    the fallback kernels support. `with_bias`: with a bias array or dropout.
    """
    if ext is None:
        return True
    dtype = str(query.dtype)
    call = {"qk_dim": query.shape[3], "v_dim": value.shape[3]}
    call |= {"bias_kind": 1} if with_bias else {"scales_batch": 1} if options else {}
    precisions = (False, True) if dtype == "float32" else (True,)
    return all(
        ext.full_build_has(target, {**call, "dtype": kernel_dtype(dtype, exact) or "any"})
        for target in ("forward", "backward")
        for exact in precisions
    )


def has_tangent_kernel(of: Operands, spec: AttentionSpec, tangents: tuple[str, ...]) -> bool:
    """Whether this build has a kernel for these tangents of the forward."""
    if ext is None or of.lse_in_two or not set(tangents).issubset(TANGENTS):
        return False
    if unread("forward_tangent", of, spec):
        return False
    return judge("forward_tangent", fields("forward_tangent", of, spec))["found"]


def kernel_dtype(dtype: Any, float32_products: bool) -> str | None:
    """The dtype's name in the table; for float32 it depends on the precision. None: no kernel."""
    name = str(dtype)
    return _FLOAT32[float32_products] if name == "float32" else _DTYPES.get(name)


# Fields of AttentionSpec that reach kernels otherwise than as an attribute of their name.
_READ = {"precision", "block_size", "max_logits", "deterministic", "needs_grad", "implementation"}


def unread(target: str, of: Operands, spec: AttentionSpec) -> list[str]:
    """The operands, and the fields of the spec with other values than the default, that no kernel
    of the target reads."""
    read = _READ | {x.name for x in ATTRIBUTES[target]}
    if target in ("backward", "forward_tangent"):
        read.add("row_keys")  # only selects a forward kernel
    numbers = [
        x.name
        for x in dataclasses.fields(spec)
        if x.name not in read and getattr(spec, x.name) != x.default
    ]
    return [*(x for x in of.names if x not in OPERAND_NAMES[target]), *numbers]


def refuse_unread(target: str, of: Operands, spec: AttentionSpec) -> None:
    if names := unread(target, of, spec):
        raise NotImplementedError(
            f'no {target} kernel takes {" and ".join(names)}: implementation="xla" does'
        )


def require_kernels(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool = False
) -> None:
    """Raises if this build has no kernels for the call. C++ checks for the GPU that runs it."""
    require_extension()
    refuse_unread(direction, of, spec)
    if judge_attention(direction, of, spec, for_export)["found"]:
        return
    kernels = {"forward": ("forward",), "backward": ("backward_dkdv", "backward_dq")}[direction]
    suffix = "_bias" if of.lse_in_two else "_fallback"
    have = [row for row in variants() if row["kernel"] in [name + suffix for name in kernels]]
    text = listed(_largest(have) if of.lse_in_two else have)
    if not have and not of.lse_in_two:
        text += ", among those that take soft_cap, bias, a scale array, max logits, any head dim, "
        text += "block_sparse masks"
    up_to = f", and all smaller multiples of {MULTIPLE}" if have else ""
    raise NotImplementedError(
        f"no {direction} kernel for {_with_arguments(of)}{of.query.dtype} with head dims "
        f"{of.query.shape[3]}/{of.value.shape[3]} (query and key / value); available: "
        f"{text}{up_to}{whole_build()}. "
        'implementation="xla" takes any head dim, and float64'
    )


def _with_arguments(of: Operands) -> str:
    """The arguments for which the call needs the kernels with a bias array or dropout, as text."""
    given = (("bias=", of.bias), ("dropout_rate=", of.dropout_streams))
    names = [name for name, x in given if x is not None]
    return f"{' and '.join(names)} in " if names else ""


def whole_build() -> str:
    """How to build all kernels if this build has only some; variants.cc has the same text."""
    assert ext is not None
    part = ext.part()
    if not part:
        return ""
    return (
        f"; this build has only some of packax's kernels ({part}): "
        "PACKAX_ARCHS=all pip install ./ builds all"
    )


def require_extension() -> None:
    if ext is None:
        raise NotImplementedError(
            f"the extension module packax._ext, which holds the kernels, did not load "
            f'({ext_error}): reinstall packax, or pass implementation="xla"'
        )


def _largest(rows: Any) -> list[Any]:
    """The rows whose head dims are not covered by another row of the same dtype."""
    return [
        row
        for row in rows
        if not any(
            other["dtype"] == row["dtype"]
            and (other["qk_dim"], other["v_dim"]) != (row["qk_dim"], row["v_dim"])
            and other["qk_dim"] >= row["qk_dim"]
            and other["v_dim"] >= row["v_dim"]
            for other in rows
        )
    ]


def listed(rows: Any) -> str:
    names = {short: name for name, short in _DTYPES.items()}
    names |= dict.fromkeys(_FLOAT32.values(), "float32") | {FP8: "float8_e4m3fn"}
    have = sorted({(row["qk_dim"], row["v_dim"], names[row["dtype"]]) for row in rows})
    return ", ".join(f"{dtype} {qk}/{v}" for qk, v, dtype in have) or "none in this build"


# --- Calls


def ffi_call(
    ctx, target: str, operands, workspace: tuple[Any, ...] = (),
    same_memory: dict[int, int] | None = None, **attributes: Any,
):  # fmt: skip
    """The FFI call. Workspaces are extra results, whose memory stays valid under CUDA graphs.

    `same_memory`: from the index of an operand to the index of the result that reuses its memory.
    """
    results = len(ctx.avals_out)
    ctx = ctx.replace(
        avals_in=[plain(x) for x in ctx.avals_in],
        avals_out=[*(plain(x) for x in ctx.avals_out), *workspace],
    )
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=same_memory)
    return rule(ctx, *operands, **attributes)[:results]


def run_once(ctx, results):
    """The results of a call, after an optimization barrier, so that the kernel does not run twice.

    If `scan` stores a result for the backward pass, and other operations read that result too, XLA
    copies the call into the fusion that writes the stored array, and also keeps the original call:
    the kernel runs twice (openxla/xla#45799, seen with jax 0.11.2). XLA does not look through a
    barrier.
    """
    avals = [plain(x) for x in ctx.avals_out]
    barrier = mlir.lower_fun(lambda *x: jax.lax.optimization_barrier(x), multiple_results=True)
    return barrier(ctx.replace(primitive=None, avals_in=avals, avals_out=avals), *results)


_NUMBERS = {"float": np.float32, "int32_t": np.int32, "int64_t": np.int64}


def attributes(target: str, spec: AttentionSpec, **of_call: Any) -> dict[str, Any]:
    """The attributes of a call: `of_call`, and for the others the fields of the spec."""
    return {
        x.name: _NUMBERS.get(x.type, str)(
            of_call[x.name] if x.name in of_call else getattr(spec, x.name)
        )
        for x in ATTRIBUTES[target]
    }


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


COUNTER = array(1, dtype=jnp.int32)  # from which the programs of a kernel take their next tile
ABSENT = array(0)  # an absent operand or result


def lower_constant(ctx, function, aval):
    make = mlir.lower_fun(lambda: function(aval), multiple_results=False)
    (constant,) = make(ctx.replace(primitive=None, avals_in=[], avals_out=[aval]))
    return constant


def zeros(ctx, aval):
    return lower_constant(ctx, lambda x: jnp.zeros(x.shape, x.dtype), aval)


def in_order(ctx, names: tuple[str, ...], given: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The avals and the values of the operands `names`, from pairs of both, with ABSENT for absent
    operands."""
    absent = ABSENT, zeros(ctx, ABSENT)
    avals, values = zip(*(given.get(x, absent) for x in names), strict=True)
    return list(avals), list(values)


# --- Attention


_ALL_HEADS = range(0)


def forward(ctx, values: Operands, spec: AttentionSpec, heads: range = _ALL_HEADS):
    """The results of forward_p. `heads`: the query heads that the call computes."""
    row_max = () if spec.max_logits else (ABSENT,)
    return _call(ctx, "forward", values, spec, heads, (*row_max, COUNTER))


def backward(ctx, values: Operands, spec: AttentionSpec, heads: range = _ALL_HEADS):
    """The results of backward_p. In the FFI call, gradients that no kernel writes are absent."""
    avals = Operands.of(values.names, ctx.avals_in)
    query, of_keys = avals.query, "key" in spec.needs_grad or "value" in spec.needs_grad
    if heads:
        query = plain(query).update(shape=(*query.shape[:2], len(heads), query.shape[3]))
    of = avals._replace(query=query)
    algorithm, elements = backward_workspace(of, spec, for_export(ctx))

    # The dq kernel also computes score_grads. The fused kernel always writes dk and dv.
    nothing = array(0, dtype=query.dtype)
    of_query = "query" in spec.needs_grad
    dkv = algorithm == "sm90_fused" or of_keys
    written = (of_query or spec.score_grads, dkv, dkv)
    tensors = [x if w else nothing for x, w in zip(ctx.avals_out, written, strict=False)]
    more = (ABSENT if x is None else x for x in spec.score_params(ctx.avals_out[3:]))
    call_results = _call(
        ctx.replace(avals_out=[*tensors, *more]),
        "backward",
        values,
        spec,
        heads,
        (array(elements),),
        algorithm=algorithm,
        needs_grad=of_query + 2 * of_keys,
    )
    results = [
        x if w else zeros(ctx, plain(aval))  # unused, so never computed
        for x, w, aval in zip(call_results, written, ctx.avals_out, strict=False)
    ]
    given = zip(call_results[3:], spec.has_score_params, strict=True)
    return [*results, *(x for x, has in given if has)]


def forward_tangent(ctx, operands, spec: AttentionSpec, names, tangents: tuple[str, ...]):
    """The results of forward_tangent_p. In the FFI call, tangents that are zero are absent."""
    count = len(names)
    pairs = list(zip(ctx.avals_in, operands, strict=True))
    more = {f"t{name[0]}": pair for name, pair in zip(tangents, pairs[count:], strict=True)}
    values = Operands.of(names, operands[:count])
    return _call(ctx, "forward_tangent", values, spec, _ALL_HEADS, (), more)


def _call(
    ctx, target: str, values: Operands, spec: AttentionSpec, heads: range, workspace,
    more: Mapping[str, Any] = MappingProxyType({}), **of_call: Any,
):  # fmt: skip
    """`more`: operands that are not in `Operands`, as pairs of aval and value. `of_call`:
    attributes that are not fields of the spec."""
    names = OPERAND_NAMES[target]
    avals = Operands.of(values.names, ctx.avals_in[: len(values.names)])
    pairs = zip(avals.leaves, values.leaves, strict=True)
    given: dict[str, Any] = dict(zip(values.names, pairs, strict=True)) | dict(more)
    if avals.bias_of_indices:  # sm90 kernels do not read positions, the fallback kernels need them
        for name, rows in (("q_bias_pos", avals.query), ("kv_bias_pos", avals.key)):
            aval = array(avals.slopes.shape[0], rows.shape[1], dtype=jnp.int32)
            given[name] = aval, lower_constant(ctx, _indices, aval)
    for name in ("q_ids", "kv_ids", "q_pos", "kv_pos"):
        given.setdefault(name, given["kv_start"])  # never read; may be any int32 array
    q_block, kv_block = spec.block_size or (0, 0)
    avals_in, buffers = in_order(ctx, names, given)
    return ffi_call(
        ctx.replace(avals_in=avals_in),
        SYMBOLS[target],
        buffers,
        workspace,
        # The first result reuses the memory of `init`, so that the other heads are not copied.
        {names.index("init"): 0} if values.init is not None else None,
        **attributes(
            target,
            spec,
            q_block=q_block,
            kv_block=kv_block,
            bias_of_indices=avals.bias_of_indices,
            first_head=heads.start,
            heads=len(heads),
            **of_call,
        ),
    )


def backward_workspace(
    of: Operands, spec: AttentionSpec, for_export: bool = False
) -> tuple[str, Any]:
    """The algorithm of a backward pass, and the size of its workspace in 4-byte elements.

    If the GPU that runs the program has no kernels for the algorithm, C++ uses the previous one in
    the list in csrc/call/operands.h.
    """
    judged = judge_attention("backward", of, spec, for_export)
    batch, q_len, heads, _ = of.query.shape
    padded = BLOCK * ceil_div(q_len, BLOCK)
    of_row, of_mask_row, others = judged["workspace"]
    elements = of_row * batch * heads * padded + of_mask_row * of.kv_start.shape[0] * padded
    if judged["dbias_parts"]:
        others += judged["dbias_parts"] * math.prod(of.bias.shape)
    return judged["algorithm"], elements + others


def takes_fallback(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool = False
) -> bool:
    """Whether a GPU may use the fallback kernels: for options, or for uncommon head dims."""
    if of.optional_operands or any(getattr(spec, x) for x in _OPTIONS):
        return True
    if spec.max_logits or spec.block_size:
        return True
    return ext is not None and not judge_attention(direction, of, spec, for_export)["native"]


def _indices(aval):
    return jax.lax.broadcasted_iota(aval.dtype, aval.shape, 1)
