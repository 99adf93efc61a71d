"""The demo's settings by device: small and short on a CPU, 32k rows in bfloat16 on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from packax.demo.data import VOCABULARY
from packax.demo.model import Config


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int
    seq_len: int
    batch: int
    seconds: float  # training stops this long after its first step, even if steps are left
    learning_rate: float
    model: Config
    whole_documents: bool  # leave out documents longer than a row instead of cutting them
    out: Path
    seed: int

    @property
    def on_gpu(self) -> bool:
        return jax.default_backend() == "gpu"


def defaults(*, out: Path, seed: int, **given: Any) -> Settings:
    """The default settings for this device; given: steps, seq_len, batch and seconds in place of
    the defaults, or None."""
    if jax.default_backend() == "gpu":
        model = Config(VOCABULARY, 8, 1024, 16, 4, 64, 2816, jnp.bfloat16)
        chosen = Settings(300, 32768, 2, 120.0, 6e-4, model, False, out, seed)
    else:
        model = Config(VOCABULARY, 2, 128, 4, 2, 32, 352)
        chosen = Settings(60, 2048, 1, 25.0, 4e-3, model, True, out, seed)
    for name, value in given.items():
        least = 128 if name == "seq_len" else 1
        if value is not None and not value >= least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least {least}, got {value}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must be from 0 to {2**32 - 1}, got {seed}")
    return dataclasses.replace(chosen, **{k: v for k, v in given.items() if v is not None})
