"""`fall_back`: the warning or error for a call that runs on another project's attention."""

from __future__ import annotations

import os
import warnings

_VARIABLE = "PACKAX_FALLBACK"
_CHOICES = ("warn", "silent", "error")
_said: set[str] = set()


class FallbackWarning(UserWarning):
    """A call of a drop-in replacement runs on the attention of the project that it replaces."""


def fall_back(what: str, whose: str, faster: str, *, forbidden: bool = False) -> None:
    """Warns once per process that `what` runs on `whose` attention; `faster` says what has kernels.

    The environment variable PACKAX_FALLBACK, read in each call, is "warn" (the default), "silent"
    or "error". `forbidden`: the caller requires kernels.

    Raises:
        NotImplementedError: `forbidden`, or PACKAX_FALLBACK=error.
        ValueError: PACKAX_FALLBACK is something else.
    """
    choice = os.environ.get(_VARIABLE) or "warn"
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE} must be {', '.join(_CHOICES)} or unset, but is {choice!r}")
    if forbidden:
        raise NotImplementedError(
            f'{what}: there is no kernel for it, and implementation="cuda" requires one. {faster}'
        )
    if choice == "error":
        raise NotImplementedError(
            f"{what}: there is no kernel for it, and {_VARIABLE}=error forbids {whose}. {faster}"
        )
    said = f"{what}: runs on {whose}, with memory quadratic in the lengths. {faster}"
    if choice == "silent" or said in _said:
        return
    warnings.warn(
        f"{said} (Shown once. {_VARIABLE}=error makes it an error, {_VARIABLE}=silent hides it.)",
        FallbackWarning,
        stacklevel=3,
    )
    _said.add(said)  # after the warning, which a filter may turn into an error
