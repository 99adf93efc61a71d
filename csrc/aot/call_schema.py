"""Loads core/schema.py of the Python package, which imports jax and so cannot itself be imported
here."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def _load() -> Any:
    path = Path(__file__).resolve().parents[2] / "python/packax/_src/core/schema.py"
    spec = importlib.util.spec_from_file_location("schema", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["schema"] = module
    spec.loader.exec_module(module)
    return module


schema = _load()
