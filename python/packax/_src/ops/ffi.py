"""Calls into C++: which kernels this build has, and the FFI calls of both passes.

C++ selects kernels for the device at run time (csrc/runtime/variants.cc). This module looks them up
while a program is lowered, when the GPU that will run it is not yet known. Absent operands and
results of a call have shape (0,) ("FFI targets" in the documentation).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from packax._src.core.mask import Pass
from packax._src.core.schema import OPERAND_NAMES, SYMBOLS
from packax._src.core.spec import (
    BLOCK,
    INT_MAX,
    AttentionSpec,
    Operands,
    ceil_div,
    is_exact,
    is_symbolic,
)
from packax._src.ops.partitioning import plain

ext: ModuleType | None
try:
    ext = importlib.import_module("packax._ext")
except ImportError as error:  # source tree or broken install: XLA still works, `info` reports it
    ext, ext_error = None, str(error)

_DTYPES = {"bfloat16": "bf16", "float16": "f16"}
FP8 = "e4m3"  # for keys and values
_FLOAT32 = {False: "tf32", True: "f32"}  # keyed by whether products are computed in float32
_KERNELS = {"forward": ("forward",), "backward": ("backward_dkdv", "backward_dq")}
_TANGENT_KERNEL = "forward_tangent_fallback"  # takes all calls that any kernel for tangents takes
TANGENTS = ("query", "key", "value")
"""The operands whose tangents the kernels for the forward's tangent take."""
MULTIPLE = 8  # head dims are multiples of it, so that rows are multiples of 16 bytes


def for_export(ctx: Any) -> bool:
    """Whether the program is lowered by jax.export, possibly for another machine."""
    return ctx.module_context.lowering_parameters.for_export


def kernel_here(
    kernel: str, dtype: str = "any", qk_dim: int = 0, v_dim: int = 0, *, for_export: bool = False
) -> bool:
    """Whether a GPU that may run the program has the kernel.

    A mask kernel has no dtype and no head dims.
    """
    wanted = _DTYPES.get(dtype, dtype), qk_dim, v_dim
    return any(_find(kernel, cc, *wanted) for cc in _capabilities(for_export))


def covering_dims(
    kernel: str, dtype: str, qk_dim: int, v_dim: int, *, for_export: bool = False
) -> tuple[int, int] | None:
    """The smallest head dims (query, value), at least these, for which a GPU that may run the
    program has the kernel. Kernels for Hopper take fewer columns than they have (Dims::kClipped in
    csrc/launch/select.cc)."""
    if qk_dim % MULTIPLE or v_dim % MULTIPLE:
        return None
    built = {(row["qk_dim"], row["v_dim"]) for row in variants() if row["kernel"] == kernel}
    wide = sorted((x for x in built if x[0] >= qk_dim and x[1] >= v_dim), key=sum)
    here = (x for x in wide if kernel_here(kernel, dtype, *x, for_export=for_export))
    return next(here, None)


def common_dims(
    kernels: tuple[str, ...], dtype: str, *, for_export: bool = False
) -> set[tuple[int, int]]:
    """The head dims (query, value) for which every GPU that may run the program has one of these
    kernels. GPUs for which there is none of these kernels are ignored."""
    short = _DTYPES.get(dtype, dtype)
    rows = [row for row in variants() if row["kernel"] in kernels and row["dtype"] == short]
    built = {(row["kernel"], row["qk_dim"], row["v_dim"]) for row in rows}
    of_gpus = [
        {(qk, v) for kernel, qk, v in built if _find(kernel, cc, short, qk, v)}
        for cc in _capabilities(for_export)
    ]
    return set.intersection(*filter(None, of_gpus)) if any(of_gpus) else set()


def whole_table() -> tuple[Any, ...]:
    """The kernels of a full build, as rows of the table."""
    assert ext is not None
    return _cached_rows(ext.whole_table)


def variants() -> tuple[Any, ...]:
    """The kernels of this build, as rows of the table."""
    assert ext is not None
    return _cached_rows(ext.variants)


@functools.lru_cache(4)
def _cached_rows(table: Callable[[], Any]) -> tuple[Any, ...]:
    return tuple(table())  # cached: 1,600 rows take milliseconds, and each lowering reads it often


def _find(kernel: str, cc: int, dtype: str, qk_dim: int, v_dim: int) -> str | None:
    """The variant that C++ would choose on this GPU, with the newest driver."""
    assert ext is not None
    return ext.find(kernel, cc, dtype, qk_dim, v_dim)


def _capabilities(for_export: bool) -> set[int]:
    """The capabilities of the GPUs that may run the program: this process's, or all of the
    build's."""
    local = None if for_export else local_capabilities()
    return local or {row["cc"] for row in variants()}


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
    precisions = (False, True) if str(query.dtype) == "float32" else (True,)
    sets = (True,) if options or with_bias else (False, True)
    return ext is None or all(
        any(
            found(direction, query, value, fallback, float32_products, with_bias, whole_table())
            for fallback in sets
        )
        for direction in _KERNELS
        for float32_products in precisions
    )


def _names(direction: str, fallback: bool, with_bias: bool) -> list[str]:
    """The names of the kernels of a pass. With bias or dropout the backward has one more."""
    suffix = "_bias" if with_bias else "_fallback" if fallback else ""
    names = [name + suffix for name in _KERNELS[direction]]
    return [*names, "backward_dbias"] if with_bias and direction == "backward" else names


def found(
    direction: str,
    query: Any,
    value: Any,
    fallback: bool,
    float32_products: bool = True,
    with_bias: bool = False,
    rows: tuple[Any, ...] | None = None,
) -> bool:
    """Whether this build has all kernels of a pass for these head dims.

    Fallback kernels support all head dims up to a maximum, other kernels exactly one pair.
    `float32_products` matters only for float32. `rows`: the table to search instead.
    """
    names = _names(direction, fallback, with_bias)
    return _all_found(names, query, value, fallback, float32_products, rows)


def _all_found(
    names: list[str],
    query: Any,
    value: Any,
    covering: bool,
    float32_products: bool,
    rows: tuple[Any, ...] | None = None,
) -> bool:
    """`covering`: kernels of larger head dims count, too."""
    dtype, dims = kernel_dtype(query.dtype, float32_products), (query.shape[3], value.shape[3])
    if covering and any(dim % MULTIPLE for dim in dims):
        return False
    by_dims: dict[tuple[int, int], set[str]] = {}
    for row in variants() if rows is None else rows:
        if row["dtype"] == dtype and row["kernel"] in names:
            by_dims.setdefault((row["qk_dim"], row["v_dim"]), set()).add(row["kernel"])
    return any(
        len(kernels) == len(names)
        and (have[0] >= dims[0] and have[1] >= dims[1] if covering else have == dims)
        for have, kernels in by_dims.items()
    )


def has_tangent_kernel(of: Operands, spec: AttentionSpec, tangents: tuple[str, ...]) -> bool:
    """Whether this build has a kernel for these tangents of the forward."""
    if ext is None or of.lse_in_two or not set(tangents).issubset(TANGENTS):
        return False
    if not set(of.names).issubset(OPERAND_NAMES["forward_tangent"]):
        return False
    exact = is_exact(spec.precision)
    return _all_found([_TANGENT_KERNEL], of.query, of.value, True, exact)


def kernel_dtype(dtype: Any, float32_products: bool) -> str | None:
    """The dtype's name in the table; for float32 it depends on the precision. None: no kernel."""
    name = str(dtype)
    return _FLOAT32[float32_products] if name == "float32" else _DTYPES.get(name)


def require_kernels(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool = False
) -> None:
    """Raises if this build has no kernels for the call. C++ checks for the GPU that runs it."""
    require_extension()
    unread = [x for x in of.names if x not in OPERAND_NAMES[direction]]
    if unread:
        raise NotImplementedError(
            f'no {direction} kernel takes {" and ".join(unread)}: implementation="xla" does'
        )
    query, value, with_bias = of.query, of.value, of.lse_in_two
    if is_clipped(direction, of, spec, for_export):
        return
    if direction == "backward" and choose_algorithm(of, spec, for_export) != "portable":
        return
    fallback = takes_fallback(direction, of, spec)
    float32_products = not fallback or is_exact(spec.precision)
    if found(direction, query, value, fallback, float32_products, with_bias):
        return
    names = _names(direction, fallback, with_bias)
    have = [row for row in variants() if row["kernel"] in names]
    text = listed(_largest(have) if with_bias else have)
    if fallback and not have and not with_bias:
        text += ", among those that take soft_cap, bias, a scale array, max logits, any head dim, "
        text += "block_sparse masks"
    up_to = f", and all smaller multiples of {MULTIPLE}" if fallback and have else ""
    raise NotImplementedError(
        f"no {direction} kernel for {_with_arguments(of)}{query.dtype} with head dims "
        f"{query.shape[3]}/{value.shape[3]} (query and key / value); available: "
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


def in_order(
    ctx, names: tuple[str, ...], avals: Operands, values: Operands
) -> tuple[list[Any], list[Any]]:
    """The avals and the values of the operands `names`, with ABSENT for absent operands."""

    def listed(of: Operands, absent: Any) -> list[Any]:
        return [absent if getattr(of, x) is None else getattr(of, x) for x in names]

    return listed(avals, ABSENT), listed(values, zeros(ctx, ABSENT))


# --- Attention


class HeadGroup(NamedTuple):
    """The query heads that a call computes; `heads` 0: all."""

    first: int
    heads: int


_ALL_HEADS = HeadGroup(0, 0)


def forward(ctx, values: Operands, spec: AttentionSpec, group: HeadGroup = _ALL_HEADS):
    """The results of forward_p."""
    avals = Operands.of(values.names, ctx.avals_in)
    row_max = () if spec.max_logits else (ABSENT,)
    attributes = {"row_keys": np.int32(spec.row_keys)}
    return _call(ctx, "forward", avals, values, spec, group, (*row_max, COUNTER), **attributes)


def backward(ctx, values: Operands, spec: AttentionSpec, group: HeadGroup = _ALL_HEADS):
    """The results of backward_p. In the FFI call, gradients that no kernel writes are absent."""
    avals = Operands.of(values.names, ctx.avals_in)
    query, of_keys = avals.query, "key" in spec.needs_grad or "value" in spec.needs_grad
    if group.heads:
        query = plain(query).update(shape=(*query.shape[:2], group.heads, query.shape[3]))
    of = avals._replace(query=query)
    algorithm = choose_algorithm(of, spec, for_export(ctx))
    elements = backward_workspace(algorithm, of, spec, for_export(ctx))

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
        for x, w, aval in zip(call_results, written, ctx.avals_out, strict=False)
    ]
    given = zip(call_results[3:], spec.has_score_params, strict=True)
    return [*results, *(x for x, has in given if has)]


def forward_tangent(ctx, operands, spec: AttentionSpec, names, tangents: tuple[str, ...]):
    """The results of forward_tangent_p. In the FFI call, tangents that are zero are absent."""
    count = len(names)
    avals, values = Operands.of(names, ctx.avals_in[:count]), Operands.of(names, operands[:count])
    given = zip(tangents, zip(ctx.avals_in[count:], operands[count:], strict=True), strict=True)
    by_name = dict(given)
    more = [by_name.get(name, (ABSENT, None)) for name in TANGENTS]
    return _call(ctx, "forward_tangent", avals, values, spec, _ALL_HEADS, (), more)


def _call(
    ctx, target: str, avals: Operands, values: Operands, spec: AttentionSpec, group: HeadGroup,
    workspace, more=(), **attributes: Any,
):  # fmt: skip
    """`more`: the last operands of the target, pairs of aval and value (None: absent)."""
    names = OPERAND_NAMES[target]
    names = names[: len(names) - len(more)]
    bias_of_indices = avals.bias_of_indices
    if bias_of_indices:  # sm90 kernels do not read positions, the fallback kernels need arrays
        for name, rows in (("q_bias_pos", avals.query), ("kv_bias_pos", avals.key)):
            of_name = array(avals.slopes.shape[0], rows.shape[1], dtype=jnp.int32)
            avals = avals._replace(**{name: of_name})
            values = values._replace(**{name: lower_constant(ctx, _indices, of_name)})
    # Ids and positions that the segment check does not read may be any int32 array.
    unread = {
        x: "kv_start" for x in ("q_ids", "kv_ids", "q_pos", "kv_pos") if getattr(avals, x) is None
    }
    avals, values = (
        x._replace(**{name: getattr(x, other) for name, other in unread.items()})
        for x in (avals, values)
    )
    q_block, kv_block = spec.block_size or (0, 0)
    avals_in, buffers = in_order(ctx, names, avals, values)
    for aval, value in more:
        avals_in.append(aval)
        buffers.append(zeros(ctx, ABSENT) if value is None else value)
    return ffi_call(
        ctx.replace(avals_in=avals_in),
        SYMBOLS[target],
        buffers,
        workspace,
        # The first result reuses the memory of `init`, so that the other heads are not copied.
        {names.index("init"): 0} if values.init is not None else None,
        scale=np.float32(spec.scale),
        soft_cap=np.float32(spec.soft_cap),
        dropout_threshold=np.int64(spec.dropout_threshold),
        mask_mode=np.int32(spec.mask_mode),
        q_block=np.int32(q_block),
        kv_block=np.int32(kv_block),
        bias_of_indices=np.int32(bias_of_indices),
        float32_products=np.int32(is_exact(spec.precision)),
        first_head=np.int32(group.first),
        heads=np.int32(group.heads),
        **attributes,
    )


def choose_algorithm(of: Operands, spec: AttentionSpec, for_export: bool = False) -> str:
    """The backward algorithm that determines the workspace size.

    If the GPU that runs the program has no kernels for it, C++ uses the previous algorithm in the
    list in csrc/call/operands.h.
    """
    suffix = suffix_of(of, spec)
    # The kernels count rows in 32 bits. For symbolic sizes C++ checks that at run time.
    rows = _padded_rows(of.query)
    if suffix is None or (not is_symbolic(rows) and rows > INT_MAX):
        return "portable"
    dims = (str(of.query.dtype), of.query.shape[3], of.value.shape[3])
    fused = covering_dims("backward_sm90" + suffix, *dims, for_export=for_export) is not None
    of_keys = ("backward_dkdv_sm90" + suffix, *(() if suffix else ("backward_dkdv_sm90_parts",)))
    separate = any(covering_dims(kernel, *dims, for_export=for_export) for kernel in of_keys)
    if spec.bias_grad and suffix != "_dbias":
        shared = f"backward_shared{suffix.removesuffix('bias')}dbias"
        separate = separate and covering_dims(shared, *dims, for_export=for_export) is not None
    everything = {"query", "key", "value"}.issubset(spec.needs_grad)
    if everything:
        fused = fused or kernel_here("backward_sm80" + suffix, *dims, for_export=for_export)
    # Separate kernels are deterministic, and can compute only the gradients that are needed.
    if separate and (spec.deterministic or not everything or not fused):
        return "sm90_separate"
    return "sm90_fused" if fused and not spec.deterministic else "portable"


def backward_workspace(
    algorithm: str, of: Operands, spec: AttentionSpec, for_export: bool = False
) -> Any:
    """The workspace size of a backward pass in 4-byte elements (ReadWorkspace)."""
    rows = elements = _padded_rows(of.query)
    if algorithm != "portable":
        mask_rows = of.kv_start.shape[0] * BLOCK * ceil_div(of.query.shape[1], BLOCK)
        elements = (2 + (of.bias is not None)) * rows + 2 * mask_rows
        elements += rows * _sum_columns(of, spec, for_export) if algorithm == "sm90_fused" else 1
    if sums := dbias_sums(algorithm, of, spec):  # after the counter, which is padded
        elements += BLOCK - 1 + sums * math.prod(of.bias.shape)
    return elements


def dbias_sums(algorithm: str, of: Operands, spec: AttentionSpec) -> int:
    """How many sums of the bias gradient the workspace holds."""
    if algorithm != "sm90_separate" or not spec.bias_grad or suffix_of(of, spec) == "_dbias":
        return 0
    return dbias_parts(of.query, of.bias)


def _sum_columns(of: Operands, spec: AttentionSpec, for_export: bool) -> int:
    """The columns of the sum of dQ: those of the kernels, which may have more than the call."""
    dims = (of.query.shape[3], of.value.shape[3])
    kernel = f"backward_sm90{suffix_of(of, spec)}"
    found = covering_dims(kernel, str(of.query.dtype), *dims, for_export=for_export)
    return max(dims[0], found[0] if found else 0)


def _padded_rows(query: Any) -> Any:
    batch, q_len, heads, _ = query.shape
    return batch * heads * BLOCK * ceil_div(q_len, BLOCK)


def suffix_of(of: Operands, spec: AttentionSpec) -> str | None:
    """The name suffix of the dedicated kernels for the call's only option; None: there are none."""
    if spec.score_grads:
        return None
    suffixes: dict[Any, str] = {
        (False, False, False, ()): "",
        (True, False, False, ()): "_soft_cap",
        (False, True, False, ()): "_block_lists",
        (False, False, True, ()): "_max_logits",
        (False, False, False, ("scales", "slopes")): "_alibi",
    }
    options = bool(spec.soft_cap), bool(spec.block_size), spec.max_logits
    if not any(options) and of.optional_operands == ("bias",):
        return _bias_suffix(of, spec)
    return suffixes.get((*options, of.optional_operands))


def _bias_suffix(of: Operands, spec: AttentionSpec) -> str | None:
    """`suffix_of` for a bias, as in OnlyBiasOfRows and DkvWritesDbias in csrc/launch/select.cc."""
    batch, q_len, heads, _ = of.query.shape
    groups, of_heads, rows, kv_len = of.bias.shape
    own = of.bias.dtype == of.query.dtype
    if str(of.query.dtype) not in _DTYPES or rows != q_len or is_symbolic(kv_len):
        return None
    if kv_len % (8 if own else 4):  # rows of 16 bytes
        return None
    of_pairs = own and groups == batch and of_heads == heads
    if (
        of.dout is not None
        and of_pairs
        and {"key", "value", "bias"} & set(spec.needs_grad) > {"bias"}
    ):
        return "_dbias"
    return "_bias" if own else "_float32_bias"


_PROGRAMS = 132  # multiprocessors of an H200, with a program each


def dbias_parts(query: Any, bias: Any) -> int:
    """The parts into which the batch rows that share a bias are divided for its gradient, so that
    programs of equal length keep all multiprocessors busy (csrc/kernels/sm90/shared_dbias.py)."""
    batch, _, heads, _ = query.shape
    groups, of_heads, q_len, kv_len = bias.shape
    if any(is_symbolic(n) for n in (batch, heads, *bias.shape)) or not batch:
        return 1
    tiles = groups * of_heads * ceil_div(q_len, 2 * BLOCK) * ceil_div(kv_len, BLOCK)
    most = min(batch // groups * (heads // of_heads), max(1, 8 * _PROGRAMS // tiles))
    rounds = {n: ceil_div(tiles * n, _PROGRAMS) / n for n in range(1, most + 1)}
    return min(rounds, key=lambda n: (rounds[n], n))


def takes_fallback(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool = False
) -> bool:
    """Whether a GPU may use the fallback kernels: for options, or for uncommon head dims."""
    if of.optional_operands or spec.soft_cap or spec.max_logits or spec.block_size:
        return True
    if ext is None or is_clipped(direction, of, spec, for_export):
        return False
    dtype, dims = str(of.query.dtype), (of.query.shape[3], of.value.shape[3])
    return not all(
        dims in common_dims((kernel,), dtype, for_export=for_export)
        for kernel in _KERNELS[direction]
    )


def is_clipped(
    direction: Pass, of: Operands, spec: AttentionSpec, for_export: bool = False
) -> bool:
    """Whether the program runs on Hopper alone, and a kernel for Hopper takes the call, so that
    head dims need no padding."""
    suffix = suffix_of(of, spec)
    if suffix is None or _capabilities(for_export) != {90}:
        return False
    if direction == "backward":
        return choose_algorithm(of, spec, for_export) != "portable"
    dims = str(of.query.dtype), of.query.shape[3], of.value.shape[3]
    return covering_dims("forward_sm90" + suffix, *dims, for_export=for_export) is not None


def _indices(aval):
    return jax.lax.broadcasted_iota(aval.dtype, aval.shape, 1)
