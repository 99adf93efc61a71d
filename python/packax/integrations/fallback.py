"""What no kernel takes runs on the other project's own path: said once, or an error on request."""

from __future__ import annotations

import os
import warnings

_VARIABLE = "PACKAX_FALLBACK"
_CHOICES = ("warn", "silent", "error")
_said: set[str] = set()


class FallbackWarning(UserWarning):
    """A call of a drop-in runs on the attention of the project that it stands in for."""


def fall_back(what: str, whose: str, faster: str, *, forbidden: bool = False) -> None:
    """Says once in this process that `what` runs on `whose` attention, and what is faster.

    The environment variable PACKAX_FALLBACK, read at each call, is "warn" (the default), "silent"
    or "error". `forbidden`: the caller asked for kernels.

    Raises:
        NotImplementedError: `forbidden`, or PACKAX_FALLBACK=error.
        ValueError: PACKAX_FALLBACK is something else.
    """
    choice = os.environ.get(_VARIABLE) or "warn"
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE} must be {', '.join(_CHOICES)} or unset, but is {choice!r}")
    if forbidden:
        raise NotImplementedError(
            f'{what}: no kernel takes that, and implementation="cuda" asks for one. {faster}'
        )
    if choice == "error":
        raise NotImplementedError(
            f"{what}: no kernel takes that, and {_VARIABLE}=error forbids {whose}. {faster}"
        )
    said = f"{what}: runs on {whose}, with memory quadratic in the lengths. {faster}"
    if choice == "silent" or said in _said:
        return
    warnings.warn(
        f"{said} (Said once. {_VARIABLE}=error makes it an error, {_VARIABLE}=silent hides it.)",
        FallbackWarning,
        stacklevel=3,
    )
    _said.add(said)  # only now: a filter may have made the warning an error
