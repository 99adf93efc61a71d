"""The machine of a report: GPU, driver, versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
import sys

import jax
import packax


def machine() -> dict[str, str]:
    return {
        "gpu": jax.devices()[0].device_kind,
        "count": str(len(jax.devices())),
        "driver": _driver(),
        "packax": packax.__version__,
        "jax": jax.__version__,
        "cudnn": _version("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, check=True)
            .stdout.split("\n")[0]
            .strip()
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
