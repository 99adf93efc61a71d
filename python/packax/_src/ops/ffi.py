"""Which kernels this build has, and whether this process has a GPU for them.

C++ looks kernels up by the device (csrc/runtime/variants.cc). Here they are looked up while a
program is lowered, when it is not yet known which GPU will run it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

ext: ModuleType | None
try:
    ext = importlib.import_module("packax._ext")
except ImportError as error:  # a source tree or a broken install: XLA works, `info` reports it
    ext, ext_error = None, str(error)

_DTYPES = {"bfloat16": "bf16", "float16": "f16"}
_FLOAT32 = {False: "tf32", True: "f32"}  # by whether products are computed in float32
_KERNELS = {"forward": ("forward",), "backward": ("backward_dkdv", "backward_dq")}
MULTIPLE = 8  # of head dims: rows of 16 bytes


def for_export(ctx: Any) -> bool:
    """Whether jax.export lowers it, for a machine that may not be this one."""
    return ctx.module_context.lowering_parameters.for_export


def kernel_here(
    kernel: str, dtype: str, qk_dim: int, v_dim: int, *, for_export: bool = False
) -> bool:
    """Whether this build has the kernel and, as far as is known, this process a GPU for it."""
    return (qk_dim, v_dim) in dims_here(kernel, dtype, for_export=for_export)


def dims_here(kernel: str, dtype: str, *, for_export: bool = False) -> set[tuple[int, int]]:
    """The head dims of query and value for which kernel_here is true."""
    asked = (kernel, _DTYPES.get(dtype))
    by_dims: dict[tuple[int, int], list[Any]] = {}
    for row in variants():
        if (row["kernel"], row["dtype"]) == asked:
            by_dims.setdefault((row["qk_dim"], row["v_dim"]), []).append(row)
    return {dims for dims, rows in by_dims.items() if _any_serves(rows, for_export)}


def serves_here(kernel: str, *, for_export: bool = False) -> bool:
    """kernel_here for a kernel of masks, which has neither dtype nor head dims."""
    return _any_serves([row for row in variants() if row["kernel"] == kernel], for_export)


def whole_table() -> tuple[Any, ...]:
    """The kernels of a full build."""
    assert ext is not None
    return _made(getattr(ext, "whole_table", ext.variants))


def variants() -> tuple[Any, ...]:
    """Every kernel in this build."""
    assert ext is not None
    return _made(ext.variants)


@functools.lru_cache(4)
def _made(table: Callable[[], Any]) -> tuple[Any, ...]:
    return tuple(table())  # cached: 1,600 rows take milliseconds, and a lowering asks many times


def _any_serves(rows: Any, for_export: bool) -> bool:
    capabilities = None if for_export else local_capabilities()
    if capabilities is None:
        return bool(rows)
    return any(_serves(row, cc) for row in rows for cc in capabilities)


def _serves(row: Any, cc: int) -> bool:
    """The same rule as Find() in csrc/runtime/variants.cc."""
    if row["arch_specific"]:
        return row["cc"] == cc
    return row["cc"] // 10 == cc // 10 and row["cc"] <= cc


def local_capabilities() -> set[int] | None:
    """Compute capabilities of this process's CUDA devices (90 is 9.0); None: there are none, so it
    compiles for another machine."""
    try:
        devices = jax.local_devices(backend="cuda")
        return {int(str(d.compute_capability).replace(".", "")) for d in devices} or None
    except (RuntimeError, AttributeError, ValueError):
        return None


def has_kernels(
    query: Any, key: Any, value: Any, *, options: bool = False, with_bias: bool = False
) -> bool:
    """Whether packax has both passes for the dtype and head dims, in a full build; True without a
    build.

    `options`: with a block mask, or anything else that only the fallback kernels take; `with_bias`:
    with a bias array or dropout.
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
    """The kernels of a direction. With a bias array or dropout the backward has one more."""
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
    """Whether this build, or these rows of the table, have all kernels of a direction: for exactly
    these head dims, or for any up to a maximum.

    `float32_products` is for float32.
    """
    dtype, dims = kernel_dtype(query.dtype, float32_products), (query.shape[3], value.shape[3])
    if fallback and any(dim % MULTIPLE for dim in dims):
        return False
    names = _names(direction, fallback, with_bias)
    by_dims: dict[tuple[int, int], set[str]] = {}
    for row in variants() if rows is None else rows:
        if row["dtype"] == dtype and row["kernel"] in names:
            by_dims.setdefault((row["qk_dim"], row["v_dim"]), set()).add(row["kernel"])
    return any(
        len(kernels) == len(names)
        and (have[0] >= dims[0] and have[1] >= dims[1] if fallback else have == dims)
        for have, kernels in by_dims.items()
    )


def kernel_dtype(dtype: Any, float32_products: bool) -> str | None:
    """The dtype's name in the table, for float32 by precision; None: no kernel has it."""
    name = str(dtype)
    return _FLOAT32[float32_products] if name == "float32" else _DTYPES.get(name)


def require_kernels(
    direction: str,
    query: Any,
    value: Any,
    fallback: bool = False,
    float32_products: bool = True,
    with_bias: bool = False,
) -> None:
    """Raises if no GPU has the kernels. C++ checks the GPU that runs it, which is unknown here."""
    require_extension()
    if found(direction, query, value, fallback, float32_products, with_bias):
        return
    names = _names(direction, fallback, with_bias)
    have = [row for row in variants() if row["kernel"] in names]
    text = listed(have)
    if with_bias:
        text += ", among those with a bias array or dropout"
    elif fallback and not have:
        text += ", among those that take soft_cap, bias, a scale array, max logits, any head dim, "
        text += "block_sparse masks"
    up_to = f", and all smaller multiples of {MULTIPLE}" if fallback and have else ""
    raise NotImplementedError(
        f"no {direction} kernel for {query.dtype} with head dims {query.shape[3]}/{value.shape[3]} "
        f"(query and key / value); available: {text}{up_to}{whole_build()}. "
        'implementation="xla" takes any head dim, and float64'
    )


def whole_build() -> str:
    """How to build all kernels if only some were built; the same text as in variants.cc."""
    part = getattr(ext, "part", str)()
    if not part:
        return ""
    return (
        f"; this build has a part of packax's kernels ({part}): "
        "PACKAX_ARCHS=all pip install ./ builds all"
    )


def require_extension() -> None:
    if ext is None:
        raise NotImplementedError(
            f"the extension module packax._ext, which holds the kernels, did not load "
            f'({ext_error}): reinstall packax, or pass implementation="xla"'
        )


def listed(rows: Any) -> str:
    names = {short: name for name, short in _DTYPES.items()}
    names |= dict.fromkeys(_FLOAT32.values(), "float32")
    have = sorted({(row["qk_dim"], row["v_dim"], names[row["dtype"]]) for row in rows})
    return ", ".join(f"{dtype} {qk}/{v}" for qk, v, dtype in have) or "none in this build"
