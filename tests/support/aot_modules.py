"""The build's kernel table and compiler (csrc/aot), imported as modules."""

from __future__ import annotations

import importlib.util
import re
import sys

from paths import AOT


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"packax_aot_{name}", AOT / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(AOT))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(AOT))
    return module


table = load("table")


tiles = load("tiles_sm90")


compiler = load("compile")


ALL = list(table.variants())


FP8 = ["decode_fp8", "decode_tall_fp8", "decode_fp8_pages", "decode_tall_fp8_pages"]
DECODE = ["decode", "decode_tall", "decode_combine", *FP8]
PLAIN = ["forward", "backward_delta", "backward_dkdv", "backward_dq"]
GENERAL = [f"{kernel}_fallback" for kernel in PLAIN]
DBIAS = ["backward_dbias", "backward_dbias_alone"]
BIAS = [
    *("forward_bias", "backward_dkdv_bias", "backward_dq_bias"),
    *("forward_bias_alone", "backward_dkdv_bias_alone", "backward_dq_bias_alone"),
    "backward_dkdv_dbias_alone",
    *DBIAS,
]
OF_DBIAS = ["backward_dq_of_dbias_alone"]
FORWARDS = [
    *("forward_sm90", "forward_sm90_soft_cap", "forward_sm90_low_occupancy"),
    "forward_sm90_short",
    *("forward_sm90_alibi", "forward_sm90_block_lists", "forward_sm90_max_logits"),
    *("forward_sm90_bias", "forward_sm90_float32_bias"),
]
TANGENT = ["forward_tangent_sm90"]
RAGGED = ["ragged_sm90"]
KEYS = ["backward_dkdv_sm90", "backward_dkdv_sm90_soft_cap", "backward_dkdv_sm90_block_lists"]
KEYS += ["backward_dkdv_sm90_parts", "backward_dkdv_sm90_dbias"]
KEYS += ["backward_dkdv_sm90_bias", "backward_dkdv_sm90_float32_bias"]
ROWS = ["backward_dq_sm90", "backward_dq_sm90_soft_cap", "backward_dq_sm90_block_lists"]
ROWS += ["backward_dq_sm90_parts", "backward_dq_sm90_bias", "backward_dq_sm90_float32_bias"]
SHARED_DBIAS = ["backward_shared_dbias", "backward_shared_float32_dbias"]
ONES = ["backward_sm90", "backward_sm90_soft_cap", "backward_sm90_alibi"]


def arguments_of(kernel: str, source: str = "") -> list[str]:
    """A kernel's arguments as its source declares them, constants included, without unused ones."""
    module = source or table.KERNELS[kernel]
    function = table.function(kernel, module)
    text = compiler.module_file(module).read_text()
    found = re.search(rf"def {function}\((.*?)\):", text, re.S)
    assert found, f"{function} is not in the file that the table names"
    names = [a.split(":")[0].strip() for a in found[1].split(",") if a.strip()]
    return [name for name in names if name not in table.absent_arguments(kernel)]
