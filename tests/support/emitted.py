"""A made-up kernel table as input of csrc/aot/emit.py, without a GPU or Triton."""

import hashlib
import importlib.util
import json
import shutil
import sys

from paths import AOT

SCRIPT = AOT / "emit.py"


COMPILER = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)


def load_script():
    spec = importlib.util.spec_from_file_location("emit", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["emit"] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


emit = load_script()


PARAMS = [
    {"name": "out", "type": "ptr"},
    {"name": "scale", "type": "f32"},
    {"name": "rows", "type": "i32"},
    {"name": "bytes", "type": "i64"},
]


MAPPED = [  # parameters of kernel "mapped"
    {"name": "query", "type": "tma"},
    {"name": "dk", "type": "tma"},
    {"name": "q_order", "type": "ptr"},
    {"name": "rows", "type": "i32"},
]


BOXES = [{"box": [1, 1, 64, 32], "swizzle": 3}, {"box": [1, 1, 128, 64], "swizzle": 0}]


ROW = {
    "kernel": "sideways",
    "arch": "sm_90a",
    "cc": 90,
    "arch_specific": True,
    "driver": 12000,
    "dtype": "bf16",
    "qk_dim": 64,
    "v_dim": 64,
    "symbol": "sideways",
    "threads": 128,
    "shared": 1024,
    "block": 64,
    "params": PARAMS,
    "tensor_maps": [],
}


KERNELS = dict.fromkeys(("sideways", "upwards", "mask_rows"), PARAMS)
KERNELS |= {"mapped": MAPPED, "absent": MAPPED[1:]}  # the tests write no variant of "absent"


def lines(kernels):
    """The content of kernels.txt."""
    params = {k: [f"{p['name']}:{p['type']}" for p in v] for k, v in kernels.items()}
    return "".join(f"{kernel} {' '.join(p)}\n" for kernel, p in params.items())


def write(folder, name, image=None, drop=(), **changes):
    folder.mkdir(exist_ok=True)
    (folder / "kernels.txt").write_text(lines(KERNELS))
    image = f"cubin-of-{name}".encode() if image is None else image
    row = {**ROW, "sha256": hashlib.sha256(image).hexdigest(), **changes}
    row = {k: v for k, v in row.items() if k not in drop}
    (folder / f"{name}.json").write_text(json.dumps(row))
    (folder / f"{name}.cubin").write_bytes(image)


def arch(name, **changes):
    cc = int(name.rstrip("af"))
    return {"arch": f"sm_{name}", "cc": cc, "arch_specific": name.endswith("a"), **changes}


def mapped(**changes):
    row = {"kernel": "mapped", "params": MAPPED, "tensor_maps": BOXES, "block": 192}
    return {**row, **changes}


def mask(name, **changes):
    return arch(name, kernel="mask_rows", dtype="any", qk_dim=0, v_dim=0, **changes)
