"""Lists the FFI targets and the arguments of the kernels from the sources that decide them.

    python docs/internals/generate.py ffi.md        # or kernels.md

The site shows the lists at the end of these pages (docs/site_hooks.py). The operands, results and
attributes of the FFI targets are those that csrc/ffi binds; the arguments of the kernels are those
that csrc/kernels declares, typed by csrc/aot/table.py.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
sys.path.insert(0, str(CSRC / "aot"))

import table  # noqa: E402

BINDING = re.compile(r"\.(?:template )?(Arg|Ret|Attr)<([^()]*)>\((?:\"(\w+)\")?\)+;?\s*(.*)")
KINDS = {"Arg": "operand", "Ret": "result", "Attr": "attribute"}
C_TYPES = {"float": "f32", "int32_t": "i32", "int64_t": "i64", "std::string_view": "string"}


def signatures(text: str) -> dict[str, tuple[str | None, list[tuple[str, str, str]]]]:
    """Function -> (the signature that it goes on from, its own (kind, name, what))."""
    found = {}
    for name, body in re.findall(r"auto (\w*Signature)\(.*?\) \{\n(.*?)\n\}", text, re.S):
        rows: list[tuple[str, str, str]] = []
        for line in body.splitlines():
            bound = BINDING.search(line)
            comment = re.fullmatch(r"\s*//(.*)", line)
            if bound:
                kind, type_, attribute, after = bound.groups()
                note = after.removeprefix("//").strip()
                label, _, what = note.partition(":")
                if kind == "Attr":
                    label, what = attribute, ", ".join(filter(None, (C_TYPES[type_], note)))
                rows.append((KINDS[kind], label.strip(), what.strip()))
            elif comment and rows:  # goes on with the line before
                kind, label, what = rows[-1]
                rows[-1] = kind, label, f"{what} {comment[1].strip()}"
        base = re.search(r"return (\w+Signature)\(", body)
        found[name] = base[1] if base else None, rows
    return found


def targets() -> str:
    names = re.findall(r'"(packax_\w+_v\d+)"', (CSRC / "ffi" / "stages.h").read_text())
    shared = signatures((CSRC / "ffi" / "attention.h").read_text())
    parts = []
    for path in sorted((CSRC / "ffi").glob("*.cc")):
        text = path.read_text()
        known = shared | signatures(text)
        for target, signature in re.findall(
            r"^PACKAX_DEFINE_TARGET\((\w+), .*packax::(\w+)\);", text, re.M
        ):
            base, rows = known[signature]
            if base is not None:
                rows = [*known[base][1], *rows]
            number = next(i for i, name in enumerate(names) if name.startswith(f"packax_{target}_"))
            parts.append((number, path.name, rows))
    assert [number for number, *_ in sorted(parts)] == list(range(len(names)))
    lines = []
    for number, source, rows in sorted(parts):
        lines += [f"### {names[number]}", "", f"Bound in `csrc/ffi/{source}`.", ""]
        lines += ["| | name | shape and type |", "|---|---|---|"]
        for kind in KINDS.values():
            for this, name, what in rows:
                if this == kind:
                    first, *more = textwrap.wrap(what, 60)
                    lines.append(f"| {kind} | `{name}` | {first} |")
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
