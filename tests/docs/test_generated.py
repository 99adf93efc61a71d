"""The lists that docs/internals/generate.py generates from the sources are complete."""

import importlib.util

import pytest
from packax._src.core.schema import SYMBOLS
from paths import DOCS

FILE = DOCS / "internals" / "generate.py"
spec = importlib.util.spec_from_file_location("generate_docs", FILE)
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PARTS)
def test_the_page_says_where_its_list_goes(name):
    assert (FILE.parent / name).read_text().count(generate.MARK) == 1


def test_every_target_is_listed():
    text = generate.targets()
    for name in SYMBOLS.values():
        section = text.partition(f"### {name}\n")[2].partition("###")[0]
        assert "| operand | `" in section, name
        assert "| result | `" in section, name


def test_every_kernel_is_listed():
    text = generate.kernels()
    for kernel in generate.table.KERNELS:
        section = text.partition(f"### {kernel}\n")[2].partition("###")[0]
        assert "- pointers: " in section or "Arguments as `" in section, kernel


def test_every_kernel_has_a_grid():
    text = (FILE.parent / "kernels.md").read_text()
    grids = text[text.index("## Grids") : text.index("## Arguments")]
    for kernel in generate.table.KERNELS:
        assert f"`{kernel}`" in grids, kernel
