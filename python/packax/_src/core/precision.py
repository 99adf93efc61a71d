"""The precision of products of float32 operands, reduced to one of three `jax.lax.Precision`.

`DEFAULT` and `HIGH`: on GPUs TF32, 11 bits of each operand; `HIGHEST`: float32. Sums are float32 in
any case, and products of bfloat16 and float16 operands are exact in all three.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Precision = jax.lax.Precision
_config: Any = jax.config  # in some releases its type does not list all attributes
_Preset = jax.lax.DotAlgorithmPreset

# Presets that are no more precise than these; the others are as precise as float32.
_AT_LEAST = {
    Precision.DEFAULT: ("DEFAULT", "ANY_F8", "F16_F16", "BF16_BF16_BF16", "BF16_BF16_F32"),
    Precision.HIGH: ("TF32_TF32_F32",),
}
_MORE = ("_X3", "_X6", "_X9")
_ACCEPTED = (
    "None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset for float32 or less, the name of one, "
    "or a pair of them"
)


def accumulator(dtype: Any) -> Any:
    """The dtype in which values of this dtype are summed: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def checked_precision(precision: Any) -> jax.lax.Precision:
    """The lowest sufficient precision. None: that of `jax.default_matmul_precision`."""
    if precision is None:
        precision = _config.jax_default_matmul_precision
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        first, second = (checked_precision(x) for x in precision)
        return first if first.value >= second.value else second
    if precision is None:
        return Precision.DEFAULT
    try:
        return Precision(precision)
    except (ValueError, TypeError, KeyError):
        pass
    name = precision.name if isinstance(precision, _Preset) else precision
    if not isinstance(name, str) or name not in _Preset.__members__ or name == "F64_F64_F64":
        raise ValueError(f"precision must be {_ACCEPTED}, but is {precision!r}")
    for least, names in _AT_LEAST.items():
        if name.startswith(names) and not name.endswith(_MORE):
            return least
    return Precision.HIGHEST


def is_exact(precision: jax.lax.Precision) -> bool:
    """Whether products of float32 operands must be computed in float32, not TF32."""
    return precision == Precision.HIGHEST
