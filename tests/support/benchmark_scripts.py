"""Runs code against the modules of benchmarks/ in a subprocess, so that their changes to jax's
configuration do not reach the tests."""

from __future__ import annotations

import subprocess
import sys

from paths import BENCHMARKS, COMPARE, importing


def script(code: str, *arguments: str) -> str:
    """The output of the code."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        env=importing(COMPARE),
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
