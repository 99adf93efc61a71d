"""Where things of the repository lie, for tests that read files or start programs."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
KERNEL_DIR = ROOT / "csrc" / "kernels"
AOT = ROOT / "csrc" / "aot"
