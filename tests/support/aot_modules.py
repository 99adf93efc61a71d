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


def arguments_of(kernel: str, source: str = "") -> list[str]:
    """A kernel's arguments as its source declares them, constants included, without unused ones."""
    module = source or table.KERNELS[kernel]
    function = table.function(kernel, module)
    text = compiler.module_file(module).read_text()
    found = re.search(rf"def {function}\((.*?)\):", text, re.S)
    assert found, f"{function} is not in the file that the table names"
    names = [a.split(":")[0].strip() for a in found[1].split(",") if a.strip()]
    return [name for name in names if name not in table.absent_arguments(kernel)]
