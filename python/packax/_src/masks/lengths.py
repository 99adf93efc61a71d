"""The lengths and the batch size that the arrays of an expression agree on."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from jax.export import is_symbolic_dim

if TYPE_CHECKING:
    from packax._src.masks.expressions import MaskExpression


def check_lengths(
    expression: MaskExpression,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    said: tuple[str, str] = ("q_len says", "kv_len says"),
) -> tuple[int | None, int | None]:
    """q_len and kv_len as the arguments and all arrays agree on, None where nothing says.

    `said`: who gave q_len and kv_len, for the text of errors.

    Raises:
        ValueError: if they do not agree.
    """
    q_len, kv_len = _length("q_len", q_len), _length("kv_len", kv_len)
    known: dict[str, tuple[str, int]] = {}
    if q_len is not None:
        known["q"] = (said[0], q_len)
    if kv_len is not None:
        known["kv"] = (said[1], kv_len)
    for name, x, side in expression.arrays():
        if side == "batch":
            continue
        length = x.shape[-1]
        first, expected = known.setdefault(side, (f"{name} is for", length))
        if length != expected:
            what = "query rows" if side == "q" else "keys"
            more = ""
            if side == "kv" and name == "segment_ids":
                more = ": give the ids of the keys as kv_segment_ids"
            raise ValueError(f"{name} is for {length} {what}, but {first} {expected}{more}")
    nothing = ("", None)
    lengths = known.get("q", nothing)[1], known.get("kv", nothing)[1]
    for part in expression.walk():
        part.check_sizes(*lengths)
    return lengths


def batch_of(expression: MaskExpression, batch: int = 1, said: str = "") -> int:
    """The batch size of the arrays, 1 where none has a batch.

    `batch`, `said`: one that is known before, and who has it, for the text of errors.

    Raises:
        ValueError: if two arrays have different batch sizes, neither of them 1.
    """
    first, note = said, ""
    for name, x, side in expression.arrays():
        size = x.shape[0] if x.ndim == 2 or side == "batch" else 1
        more = ""
        if side == "batch" and x.ndim == 1:
            more = f". {name} of shape {x.shape} is one for each row of the batch"
            if name == "lengths":
                more += f": for one of each token give (1, {size})"
        if size not in (1, batch) and (batch != 1 or said):
            raise ValueError(f"{name} has batch size {size}, but {first} has {batch}{more or note}")
        if size != 1:
            batch, first, note = size, name, more
    return batch


def _length(name: str, length: Any) -> Any:
    if length is None or is_symbolic_dim(length):
        return length
    try:
        length = operator.index(length)
    except TypeError:
        raise ValueError(f"{name} must be an integer, but is {length!r}") from None
    if not 0 <= length < 2**31:
        raise ValueError(f"{name} must be from 0 to 2**31 - 1, but is {length}")
    return length
