"""Paths in the repository, for tests that read files or start programs."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
BENCHMARKS = ROOT / "benchmarks"
COMPARE = BENCHMARKS / "compare"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
KERNEL_DIR = ROOT / "csrc" / "kernels"
AOT = ROOT / "csrc" / "aot"


def importing(*folders: Path) -> dict[str, str]:
    """This process's environment, extended so that a program can import from these folders."""
    parts = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(parts)}


LIBRARY_PAGES = "migrating", "jax_nn", "flax", "equinox", "keras", "easydel", "flash_attention_jax"
