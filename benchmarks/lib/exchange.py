"""Passes packages and arrays to a torch process: arrays as .npy files, bfloat16 as int16, in
/dev/shm if it exists."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OPERANDS = ("query", "key", "value", "cotangent")


@contextlib.contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """Two temporary folders, for inputs and results."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        for name in ("inputs", "results"):
            (Path(folder) / name).mkdir()
        yield Path(folder) / "inputs", Path(folder) / "results"


def save(folder: Path, inputs: Sequence[Any]) -> None:
    for name, x in zip(OPERANDS, inputs, strict=True):
        np.save(folder / f"{name}.npy", np.asarray(x).view(np.int16))


def load(folder: Path) -> dict[str, Any]:
    import jax.numpy as jnp

    files = folder.glob("*.npy")
    return {path.stem: jnp.asarray(np.load(path).view(jnp.bfloat16)) for path in files}


def unpacked(fa4: Path, stack: contextlib.ExitStack) -> Path:
    """The folder with FA4's packages: `fa4`, or a temporary folder with its unpacked content."""
    if fa4.is_dir():
        return fa4.resolve()
    site = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    with tarfile.open(fa4) as archive:
        archive.extractall(site, filter="data")
    return site


def torch_environment(site: Path) -> dict[str, str]:
    """This process's environment with FA4's packages on PYTHONPATH, which replaces the entries that
    hide Triton from packax (.ci/gpu)."""
    parts = [str(site), str(site / "nvidia_cutlass_dsl" / "dsl_packages")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(parts)}
