"""The package's version and description, as pip and a package index show them."""

from __future__ import annotations

import re
import shutil
import tomllib

import packax
import pytest
from aot_modules import load
from paths import ROOT

metadata = load("package_metadata")


def test_version_is_that_of_the_package():
    assert metadata.version(environment={"PACKAX_ARCHS": "all"}) == packax.__version__


def test_a_part_of_the_kernels_has_a_local_version():
    environment = {"PACKAX_ARCHS": "sm_90a", "PACKAX_DTYPES": "bf16"}
    assert metadata.version(environment=environment) == f"{packax.__version__}+sm90a.bf16"


def test_an_sdist_of_an_index_keeps_the_version_that_pip_expects(tmp_path):
    (tmp_path / "python/packax").mkdir(parents=True)
    shutil.copy(ROOT / "python/packax/__init__.py", tmp_path / "python/packax")
    (tmp_path / "PKG-INFO").write_text("")
    assert metadata.version(tmp_path, {"PACKAX_ARCHS": "90a"}) == packax.__version__


def test_no_other_file_says_another_version():
    """pyproject.toml and CMakeLists.txt have none; the changelog and the citation have this one."""
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
    assert not re.search(r"project\([^)]*VERSION", (ROOT / "CMakeLists.txt").read_text())
    cited = re.search(r"version = \{([^}]+)\}", (ROOT / "README.md").read_text())
    assert cited and cited[1] == packax.__version__
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert not released or released[0] == packax.__version__


def test_no_link_or_picture_of_the_description_is_relative():
    text = metadata.readme()
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    assert not [target for target in found if not metadata.is_elsewhere(target)]
    assert "<!--" not in text and "![" not in text
    assert "docs/guide/quick_start.md" in (ROOT / "README.md").read_text()
    assert "quick start" in text and "# packax" in text


@pytest.mark.parametrize("address", ["https://x.org/p/", ""])
def test_links_go_to_the_repository_once_it_has_an_address(tmp_path, address):
    """Without an address, relative links become text."""
    text = "![A chart](pages/a.svg)\n\nSee [the\nguide](pages/a.md), [b](https://b.org), [c](#c).\n"
    (tmp_path / "README.md").write_text(text)
    urls = f'[project.urls]\nSource = "{address}"\n' if address else "[project]\n"
    (tmp_path / "pyproject.toml").write_text(urls)
    want = "See the\nguide, [b](https://b.org), [c](#c).\n"
    if address:
        want = text.replace("(pages/a.svg", f"({address}raw/HEAD/pages/a.svg")
        want = want.replace("(pages/a.md", f"({address}blob/HEAD/pages/a.md")
    assert metadata.readme(tmp_path) == want


@pytest.mark.parametrize("field", ["version", "readme"])
def test_as_scikit_build_core_asks(field, monkeypatch):
    monkeypatch.setenv("PACKAX_ARCHS", "all")
    got = metadata.dynamic_metadata(field, {})
    assert got == (packax.__version__ if field == "version" else got)
    assert field == "version" or (got["content-type"] == "text/markdown" and got["text"])


def test_other_fields_are_refused():
    with pytest.raises(ValueError, match="'name' came, version and readme are accepted"):
        metadata.dynamic_metadata("name", {})
    with pytest.raises(ValueError, match=r"settings .* none are accepted"):
        metadata.dynamic_metadata("version", {"input": "x"})
