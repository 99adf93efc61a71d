"""Runs code against the modules of benchmarks/, in a separate process: what they set in jax stays
there."""

from __future__ import annotations

import subprocess
import sys

from paths import BENCHMARKS, COMPARE, TUNE, importing


def script(code: str, *arguments: str) -> str:
    """What the code prints."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        env=importing(COMPARE, TUNE),
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
