"""Imports between the layers of the package go one way, and there are no import cycles.

Guards against low layers that use helpers of higher ones, against modules that only make sense
together, and against imports of private names. Reads sources and imports nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "python" / "packax"
LAYERS = (  # from low to high; entries of one line do not import each other
    ("_src.core",),
    ("_src.segments",),
    ("_src.ops",),
    ("_src.context",),
    ("_src.masks", "_src.autodiff"),
    ("_src.requests",),
    ("_src.attention", "_src.decode"),
    ("_src.cascade", "_src.ragged"),
    ("_src.explain",),
    (
        "integrations",
        "kvax",
        "context",
        "kv_cache",
        "masks",
        "segments",
        "info",
        "check",
        "demo",
        "extend",
        "__main__",
    ),
)
OUTSIDE = ("packax.integrations", "packax.kvax", "packax.demo")  # they use the public API alone
SOURCES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module: str) -> tuple[int, str] | None:
    """The number of the module's layer and its entry there; None for the public package itself."""
    for number, entries in enumerate(LAYERS):
        for entry in entries:
            if module == f"packax.{entry}" or module.startswith(f"packax.{entry}."):
                return number, entry
    return None


def name_of(path: Path) -> str:
    parts = ("packax", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of a packax module, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("packax"):
            for alias in node.names:
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("packax"):
                    yield alias.name, ""


def problems_of(module: str, text: str) -> list[str]:
    own, found = layer_of(module), []
    aliases: dict[str, str] = {}  # local name -> module
    for source, name in imported(ast.parse(text)):
        whole = f"{source}.{name}"
        target = layer_of(whole) or layer_of(source)
        if module.startswith(OUTSIDE) and whole.startswith("packax._"):
            found.append(f"{module} imports {whole}, which is not public")
        if name.startswith("_") and name != "_ext":
            found.append(f"{module} imports the private name {whole}")
        if own is None or target is None:
            continue
        above = target[0] > own[0] or (target[0] == own[0] < len(LAYERS) - 1 and target != own)
        if above:
            found.append(f"{module} imports {whole}, which is not below it")
        aliases[name] = whole
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        if private and node.value.id in aliases and node.value.id.islower():
            found.append(f"{module} uses {node.value.id}.{node.attr}, a private name of another")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_run_one_way(path):
    assert problems_of(name_of(path), path.read_text()) == []


def test_every_module_has_a_layer():
    below = ("packax", "packax._src")
    assert [x for x in map(name_of, SOURCES) if x not in below and layer_of(x) is None] == []


def circle_of(imports: dict[str, set[str]]) -> list[str]:
    """Modules that form an import cycle, [] if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        found = (visit(x, [*path, module]) for x in sorted(imports.get(module, ())))
        circle = next((x for x in found if x), [])
        done.add(module)
        return circle

    return next((x for module in sorted(imports) if (x := visit(module, []))), [])


def test_modules_import_in_no_circle():
    """Imports for annotations count, too, since a reader follows them. Those of the package itself
    do not: Python runs it before all its modules."""
    modules = set(map(name_of, SOURCES))
    imports = {
        name_of(path): {
            whole if (whole := f"{source}.{name}") in modules else source
            for source, name in imported(ast.parse(path.read_text()))
        }
        - {name_of(path), "packax"}
        for path in SOURCES
    }
    assert circle_of(imports) == []


def test_a_circle_is_found():
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_wrong_import_is_found():
    assert problems_of("packax._src.core.x", "from packax._src.ops import lowering") != []
    assert problems_of("packax._src.masks.x", "from packax._src.autodiff import attention") != []
    assert problems_of("packax._src.masks.x", "from packax._src.core.mask import _array") != []
    private = "from packax._src.ops import lowering\nlowering._call()"
    assert problems_of("packax._src.decode", private) != []
    assert problems_of("packax._src.masks.x", "from packax._src.core.mask import FIELDS") == []
    assert problems_of("packax.kvax.x", "from packax._src.core.mask import FIELDS") != []
    assert problems_of("packax.kvax.x", "import packax._src.core.mask") != []
    assert problems_of("packax.kvax.x", "from packax.masks import AttentionMask") == []
    assert problems_of("packax._src.ops.x", "def f():\n    import packax._src.decode") != []


CPP_LAYERS = ("runtime", "call", "launch", "ffi")  # from low to high; plan is separate


def test_includes_of_cpp_run_one_way():
    for path in (ROOT / "csrc").rglob("*.*"):
        if path.suffix in (".h", ".cc") and path.parent.name in CPP_LAYERS:
            own = CPP_LAYERS.index(path.parent.name)
            included = re.findall(r'#include "(\w+)/', path.read_text())
            assert set(included) <= {*CPP_LAYERS[: own + 1], "xla"}, path
