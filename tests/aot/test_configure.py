"""CMake's messages about missing or unsuitable tools and settings, before anything is compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

CMAKE = Path(sys.executable).parent / "cmake"  # from the extra `test`: Debian's may be too old
pytestmark = pytest.mark.skipif(not CMAKE.exists(), reason="no cmake beside this Python")


def configure(folder: Path, **environment: str) -> str:
    """CMake's error output, joined into one line."""
    command = [CMAKE, "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"]
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


def test_a_relative_cache_is_refused(tmp_path):
    text = configure(tmp_path, PACKAX_CUBIN_CACHE="here")
    assert "PACKAX_CUBIN_CACHE is 'here': an absolute folder is accepted" in text
