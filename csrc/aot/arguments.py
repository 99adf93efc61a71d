"""Kernel arguments: which of its function's a kernel has, and their types: pointers, numbers and
tensor maps (table.py)."""

from __future__ import annotations

import re
from typing import Any

from call_schema import schema
from tiles_decode import DECODE_TILES
from tiles_fallback import FALLBACK_KERNELS
from tiles_sm90 import LIKE_PLAIN, SM90_TILES
from tiles_tangent import TANGENT_TILES

# kernel -> argument -> (element, rows, columns) of a TMA copy. Names are constants of the variant,
# and "" is its dtype. Maps are (batch, heads, length, dim); those of float32 and int32 are rows of
# numbers, one per query row.
TENSOR_MAPS: dict[str, dict[str, tuple[str, int | str, int | str]]] = {
    "forward_sm90": {
        "query": ("", 64, "QK_CHUNK"),
        "key": ("", "BLOCK_N", "QK_CHUNK"),
        "value": ("", "BLOCK_N", "V_CHUNK"),
        "out": ("", 64, "V_CHUNK"),
    },
    "backward_sm90": {
        "query": ("", 64, "QK_CHUNK"),
        "key": ("", 64, "QK_CHUNK"),
        "value": ("", 64, "V_CHUNK"),
        "dout": ("", 64, "V_CHUNK"),
        "lse2": ("fp32", 1, 64),
        "delta": ("fp32", 1, 64),
        "lo": ("i32", 1, 64),
        "hi": ("i32", 1, 64),
        "dk": ("", 64, "QK_CHUNK"),
        "dv": ("", 64, "V_CHUNK"),
    },
    "backward_dq_sm90": {
        "query": ("", 64, "QK_CHUNK"),
        "key": ("", "BLOCK_N", "QK_CHUNK"),
        "value": ("", "BLOCK_N", "V_CHUNK"),
        "dout": ("", 64, "V_CHUNK"),
        "dq": ("", 64, "QK_CHUNK"),
    },
    "ragged_sm90": {
        "query": ("", 64, "QK_CHUNK"),
        "key": ("", "PAGE_ROWS", "QK_CHUNK"),
        "value": ("", "PAGE_ROWS", "V_CHUNK"),
    },
}
TENSOR_MAPS["forward_tangent_sm90"] = {
    "query": ("", 64, "QK_DIM"),
    "key": ("", "BLOCK_N", "QK_DIM"),
    "value": ("", "BLOCK_N", "V_DIM"),
    "out": ("", 64, "V_DIM"),
    "tq": ("", 64, "QK_DIM"),
    "tk": ("", "BLOCK_N", "QK_DIM"),
    "tv": ("", "BLOCK_N", "V_DIM"),
    "tout": ("", 64, "V_DIM"),
}
TENSOR_MAPS["backward_dkdv_sm90"] = TENSOR_MAPS["backward_sm90"]
TENSOR_MAPS["backward_dkdv_sm90_parts"] = TENSOR_MAPS["backward_sm90"] | {  # 32 rows per step
    **{name: ("", 32, chunk) for name, chunk in (("query", "QK_CHUNK"), ("dout", "V_CHUNK"))},
    **dict.fromkeys(("lse2", "delta"), ("fp32", 1, 32)),
    **dict.fromkeys(("lo", "hi"), ("i32", 1, 32)),
}
TENSOR_MAPS["backward_dq_sm90_parts"] = TENSOR_MAPS["backward_dq_sm90"]
TENSOR_MAPS |= {kernel: TENSOR_MAPS[plain] for kernel, plain in LIKE_PLAIN.items()}
TENSOR_MAPS["ragged_sm90_small_pages"] = {"query": TENSOR_MAPS["ragged_sm90"]["query"]}
TENSOR_MAPS["backward_dkdv_sm90_dbias"] = TENSOR_MAPS["backward_dkdv_sm90"] | {
    "top": ("fp32", 1, 64),
    **dict.fromkeys(("bias", "dbias"), ("", 64, 64)),
}
for _dtype, _element in (("", ""), ("_float32", "fp32")):  # of the bias
    TENSOR_MAPS[f"backward_dkdv_sm90{_dtype}_bias"] = TENSOR_MAPS["backward_dkdv_sm90"] | {
        "top": ("fp32", 1, 64),
        "bias": (_element, 64, 64),
    }
    for _kernel in ("forward_sm90", "backward_dq_sm90"):
        TENSOR_MAPS[f"{_kernel}{_dtype}_bias"] = TENSOR_MAPS[_kernel] | {
            "bias": (_element, 64, "BLOCK_N")
        }
    TENSOR_MAPS[f"backward_shared{_dtype}_dbias"] = {
        **dict.fromkeys(("query", "key"), ("", 64, "QK_CHUNK")),
        **dict.fromkeys(("value", "dout"), ("", 64, "V_CHUNK")),
        **dict.fromkeys(("lse2", "delta", "top"), ("fp32", 1, 64)),
    }

# Run-time numbers that are multiples of this: rows with such head dims are 16-byte aligned.
MULTIPLES = {"qk_dim": 8, "v_dim": 8}


def _type_of(array: Any, rows: dict[str, Any]) -> str:
    """The type of an array's elements; "" is the variant's dtype."""
    if array.view:
        return ""
    if like := re.match(r"like (\w+)", array.shape):
        return _type_of(rows[like[1]], rows)
    dtype = re.search(r"float32|int32", array.shape)
    return {"float32": "fp32", "int32": "i32"}[dtype[0]] if dtype else ""


def _elements(target: Any) -> dict[str, str]:
    arrays = (*schema.SHARED.operands, *target.operands, *target.results)
    rows = schema.ROWS | {x.name: x for x in arrays}
    return {x.name: _type_of(x, rows) for x in arrays}


# argument -> element type: those of the FFI targets, and parts of a backward's workspace. A bias
# may also be float32, which kernels check at run time. All other arguments are int32, except for
# the float32 ones in FLOATS.
POINTERS = {name: x for y in schema.TARGETS.values() for name, x in _elements(y).items()}
POINTERS |= dict.fromkeys(("delta", "lse2", "top", "dq_sum", "dbias_sums"), "fp32")
POINTERS["workspace"] = "i32"
POINTERS_OF_KERNEL = {"backward_shared_float32_dbias": {"bias": "fp32"}}  # in place of POINTERS
_untyped = {x.name for x in schema.OPERANDS if x.passes and not (x.view or POINTERS[x.name])}
assert not _untyped, f"{_untyped}: their texts in schema.py need the type of their elements"
FLOATS = (*(x.name for x in schema.SHARED.attributes if x.type == "float"), "inverse_keep")


def _of(*options: str) -> tuple[str, ...]:
    return tuple(x for option in options for x in schema.KERNEL_ARGUMENTS[option])


_OTHERS = [x for x in schema.KERNEL_ARGUMENTS if x not in ("bias", "dropout", "fp8")]
# Of functions in csrc/kernels/portable: what only fallback kernels have, what only those with a
# bias array and dropout have, and what only plain kernels have.
_FALLBACK = (*_of(*_OTHERS), "qk_dim", "v_dim", "has_tq", "has_tk", "has_tv")
_BIAS = _of("bias", "dropout")
_PLAIN = ("row_heads",)
# Of functions in csrc/kernels/sm90: end of a kernel's name -> what only such kernels have.
_SM90 = {
    "soft_cap": _of("soft_cap"),
    "alibi": ("slopes",),
    "max_logits": ("row_max",),
    "bias": ("bias", "bias_axes", "top"),  # also in kernels ending in "dbias"
    "dbias": ("dbias",),
    "block_lists": _of("block_mask"),
    "dropout": _of("dropout"),
}


def absent_arguments(kernel: str) -> tuple[str, ...]:
    """Arguments of the kernel's function that are None in this kernel, and perhaps names that the
    function does not have."""
    absent: list[str] = []
    if kernel.endswith("_alone"):  # with a bias array and no other option
        absent += [*_PLAIN, *_FALLBACK, "bias_kind", *_of("dropout")]
        absent = [x for x in absent if x not in ("qk_dim", "v_dim")]
    elif kernel.endswith("_bias"):
        absent += _PLAIN
    elif kernel.endswith("_fallback"):
        absent += [*_PLAIN, *_BIAS]
    elif f"{kernel}_fallback" in (*FALLBACK_KERNELS, *TANGENT_TILES):
        absent += [*_FALLBACK, *_BIAS]
    if kernel in DECODE_TILES:
        absent += _of("fp8")
    if kernel in SM90_TILES:
        absent += [x for end, names in _SM90.items() if not kernel.endswith(end) for x in names]
        absent += [] if kernel in ("forward_sm90", "forward_sm90_short") else ["choice"]
        absent += ["dq_sum"] if kernel.startswith("backward_dkdv") else []
    if kernel == "backward_sm80":
        absent += _of("soft_cap")
    if "dbias" not in kernel:  # an argument of the functions for dK and dV
        absent.append("dbias")
    return tuple(absent)
