"""CMake's messages about missing or unsuitable tools and settings, before anything is compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from tiers import some

CMAKE = Path(sys.executable).parent / "cmake"  # from the extra `test`: Debian's may be too old
pytestmark = pytest.mark.skipif(not CMAKE.exists(), reason="no cmake beside this Python")


def configure(folder: Path, *defines: str, **environment: str) -> str:
    """CMake's error output, joined into one line."""
    command = [CMAKE, "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}", *defines]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode != 0
    return re.sub(r"\s+", " ", done.stderr)


@pytest.mark.parametrize("variable", ["CXX", "CC"])
def test_a_missing_compiler_is_named(tmp_path, variable):
    text = configure(tmp_path, **{variable: "/nonexistent/compiler"})
    assert "packax: no C++20 compiler (GCC 10, Clang 12 or newer): install one" in text
    assert f"was found ({variable}='/nonexistent/compiler')" in text


def test_an_old_compiler_is_named(tmp_path):
    """A compiler with the macros of GCC 9: CMake identifies compilers and versions by them."""
    old = tmp_path / "c++"
    old.write_text(
        '#!/bin/sh\nexec c++ -U__GNUC__ -D__GNUC__=9 -U__GNUC_MINOR__ -D__GNUC_MINOR__=4 -w "$@"\n'
    )
    old.chmod(0o755)
    text = configure(tmp_path / "build", CXX=str(old))
    assert f"Found: {old}, GNU 9.4" in text


def test_the_oldest_compiler_has_all_that_the_sources_use():
    """Headers, names and keywords of C++20 and later that GCC 10 lacks."""
    newer = re.compile(
        r"<(barrier|expected|format|generator|latch|print|semaphore|source_location|spanstream|"
        r"stacktrace|syncstream)>|\bstd::(bit_cast|byteswap|move_only_function|to_underlying|"
        r"unreachable|make_unique_for_overwrite|ranges::(to|fold_\w+|contains))\b|"
        r"\b(from_chars|to_chars|notify_one|notify_all)\(|\.(contains|view)\(|\busing enum\b"
    )
    files = [f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".cc", ".h")]
    assert files and not {f.name: found[0] for f in files if (found := newer.search(f.read_text()))}


def test_the_headers_wanted_are_those_that_pip_installs():
    pattern = re.compile(r"jaxlib==([\d.]+\d)")
    for_each_python = pattern.findall((ROOT / "pyproject.toml").read_text())
    for file in ("cmake/FindXlaFfi.cmake", "README.md"):
        assert pattern.findall((ROOT / "third_party" / file).read_text()) == for_each_python


def test_a_relative_cache_is_refused(tmp_path):
    text = configure(tmp_path, PACKAX_CUBIN_CACHE="here")
    assert "PACKAX_CUBIN_CACHE is 'here': an absolute folder is accepted" in text


@pytest.mark.parametrize(
    "name", some(["PACKAX_ARCHS", "PACKAX_HEAD_DIMS", "PACKAX_DTYPES", "PACKAX_ASSEMBLERS"], 0)
)
def test_what_decides_the_version_is_refused_as_a_define(tmp_path, name):
    """The version of the wheel is computed before CMake runs, from the environment."""
    text = configure(tmp_path, f"-D{name}=all")
    assert f"packax: {name}=all came as a CMake define" in text
    assert f"export {name}=all" in text


def test_another_system_is_refused(tmp_path):
    """Before a compiler or anything else is looked for."""
    text = configure(tmp_path, "-DCMAKE_SYSTEM_NAME=Darwin", CXX="/nonexistent/compiler")
    assert "packax needs Linux with glibc; this is Darwin" in text and "compiler" not in text
