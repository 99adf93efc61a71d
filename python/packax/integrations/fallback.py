"""Calls without a kernel: `why_not` says which, `fall_back` warns or raises.

The drop-in replacements share these functions.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import jax.numpy as jnp

from packax.extend import DTYPES, has_kernels

_VARIABLE = "PACKAX_FALLBACK"
_CHOICES = ("warn", "silent", "error")
_FASTER = (
    "There are kernels for bfloat16, float16 and float32, a scale that is a number, and head dims "
    "that are multiples of 8 up to 512, in float32 up to 256 (with a bias or dropout up to 256, in "
    "float32 up to 128)"
)
_said: set[str] = set()


class FallbackWarning(UserWarning):
    """A call of a drop-in replacement runs on the attention of the project that it replaces."""


def why_not(
    query: Any, key: Any, value: Any, *, bias: Any = None, dropout: bool = False, scale: Any = None,
    implementation: Any = None, blockwise: bool = True,
) -> str | None:  # fmt: skip
    """The feature for which a call cannot run on packax, or None.

    Args:
        query, key, value: anything with a shape, (B, length, heads, dim), and a dtype.
        bias, scale: as in `packax.flash_attention`.
        dropout: whether the call has dropout.
        implementation: "xla" needs no kernels.
        blockwise: whether calls without a kernel run in blockwise XLA, if they have neither a bias
            nor dropout.
    """
    if len({x.dtype for x in (query, key, value)}) == 1 and str(query.dtype) not in DTYPES:
        return f"dtype {query.dtype}"
    if scale is not None and jnp.ndim(scale):
        return f"a scale of shape {jnp.shape(scale)}"
    if bias is not None and jnp.iscomplexobj(bias):
        return f"a bias of dtype {bias.dtype}"
    what = " and ".join(["a bias"] * (bias is not None) + ["dropout"] * bool(dropout))
    if implementation == "xla" or (blockwise and not what):
        return None
    if has_kernels(query, key, value, with_bias=bool(what)):
        return None
    dims = "/".join(map(str, dict.fromkeys((query.shape[3], value.shape[3]))))
    return f"{what}{', ' if what else ''}{query.dtype} and head dim {dims}"


def with_or_without_kernels(
    query: Any, key: Any, value: Any, *, dense: bool = False, implementation: Any = None
) -> Any:
    """`implementation`, or "xla" if that is None and there is no kernel.

    It is for calls with neither a bias nor dropout: blockwise XLA supports every dtype and head
    dim. `dense`: whether the call has a block mask.
    """
    if implementation is None and not has_kernels(query, key, value, options=dense):
        return "xla"
    return implementation


def fall_back(what: str, reason: str, whose: str, *, forbidden: bool = False) -> None:
    """Warns once per process that `what` with `reason` runs on `whose` attention.

    The environment variable PACKAX_FALLBACK, read in each call, is "warn" (the default), "silent"
    or "error". `forbidden`: the caller requires kernels.

    Raises:
        NotImplementedError: `forbidden`, or PACKAX_FALLBACK=error.
        ValueError: PACKAX_FALLBACK is something else.
    """
    choice = os.environ.get(_VARIABLE) or "warn"
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE} must be {', '.join(_CHOICES)} or unset, but is {choice!r}")
    call = f"{what} with {reason}"
    if forbidden or choice == "error":
        why = f"{_VARIABLE}=error forbids {whose}"
        if forbidden:
            why = 'implementation="cuda" requires one'
        raise NotImplementedError(f"{call}: there is no kernel for it, and {why}. {_FASTER}")
    said = f"{call}: runs on {whose}, with memory quadratic in the lengths. {_FASTER}"
    if choice == "silent" or said in _said:
        return
    warnings.warn(
        f"{said} (Shown once. {_VARIABLE}=error makes it an error, {_VARIABLE}=silent hides it.)",
        FallbackWarning,
        stacklevel=3,
    )
    _said.add(said)  # after the warning, which a filter may turn into an error
