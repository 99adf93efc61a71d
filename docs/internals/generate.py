"""Lists the FFI targets and the arguments of the kernels from the sources that decide them.

    python docs/internals/generate.py ffi.md        # or kernels.md

The site shows the lists at the end of these pages (docs/site_hooks.py). The operands, results and
attributes of the FFI targets are those of the package's core/schema.py; the arguments of the
kernels are those that csrc/kernels declares, typed by csrc/aot/table.py.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
sys.path.insert(0, str(CSRC / "aot"))

import table  # noqa: E402
from emit import schema  # noqa: E402

C_TYPES = {"float": "f32", "int32_t": "i32", "int64_t": "i64", "std::string_view": "string"}


def targets() -> str:
    lines = []
    for name, target in schema.TARGETS.items():
        base = schema.SHARED if target.of_attention else schema.Target(())
        rows = [("operand", x.name, x.shape) for x in (*base.operands, *target.operands)]
        rows += [("result", x.name, x.shape) for x in target.results]
        rows += [
            ("attribute", x.name, f"{C_TYPES[x.type]}: {x.values}")
            for x in (*base.attributes, *target.attributes)
        ]
        lines += [f"### {schema.SYMBOLS[name]}", ""]
        lines += ["| | name | shape and dtype, or values |", "|---|---|---|"]
        for kind, label, what in rows:
            first, *more = textwrap.wrap(what, 60)
            lines.append(f"| {kind} | `{label}` | {first} |")
            lines += [f"| | | {rest} |" for rest in more]
        lines.append("")
    return "\n".join(lines)


def declared(kernel: str) -> list[str]:
    """A kernel's arguments in the order of its source; upper case: constants of a variant."""
    module = table.KERNELS[kernel]
    function = table.function(kernel, module)
    path = CSRC / "kernels" / (module.replace(".", "/") + ".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    raise LookupError(f"{kernel} is not in {path}")


def kernels() -> str:
    lines = []
    seen: dict[str, str] = {}  # arguments -> the first kernel that has them
    for kernel, module in table.KERNELS.items():
        maps = table.TENSOR_MAPS.get(kernel, {})
        groups: dict[str, list[str]] = {"tensor maps": [], "pointers": [], "numbers": []}
        for name in declared(kernel):
            if name.isupper() or name in table.absent_arguments(kernel):
                continue
            group = "tensor maps" if name in maps else "pointers" if name in table.POINTERS else ""
            groups[group or "numbers"].append(f"{name} (f32)" if name in table.FLOATS else name)
        path = module.replace(".", "/") + ".py"
        lines += [f"### {kernel}", "", f"In `csrc/kernels/{path}`.", ""]
        written = []
        for group, names in groups.items():
            if names:
                text = f"- {group}: {', '.join(names)}"
                written += textwrap.wrap(text, 100, subsequent_indent="  ")
        first = seen.setdefault("\n".join(written), kernel)
        lines += [*(written if first == kernel else [f"Arguments as `{first}`."]), ""]
    return "\n".join(lines)


MARK = "<!-- generated when the site is built -->\n"
PARTS = {"ffi.md": targets, "kernels.md": kernels}

if __name__ == "__main__":
    print(PARTS[sys.argv[1]]())
