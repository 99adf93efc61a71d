"""One attention call: `AttentionSpec`, its static part, and `Operands`, its arrays by name.

Also the sizes and dtypes that all layers share. Sizes may be symbolic dimensions of jax.export.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from packax._src.core.schema import OPERANDS
from packax._src.core.sharding import UNSHARDED, HeadGroups, Layout

BLOCK = 64  # rows or keys summarised by one entry of q_blocks and kv_blocks
TILE = 128  # rows or keys per entry of q_order and kv_order
TILE_192 = 192  # rows per entry of q_order_192
INT_MAX = 2**31 - 1
LEAST_ROW_KEYS, MOST_ROW_KEYS = 128, 1024  # of AttentionMask.row_keys
MAX_LENGTH = 1 << 29  # of a sequence; the same number is in csrc/call/sizes.h
ONE_BLOCK = (1 << 30, 1 << 30)
"""The block size of a mask that has block lists but no block mask, such as a tree: elements are
checked only by the segment check, as if the block mask were a single block that is attended."""

FP8 = "float8_e4m3fn"
"""The 8-bit dtype that a cache of keys and values may have."""

PADDING_SEGMENT_ID = -1
"""The segment id of padding: its rows attend to nothing and no row attends to its keys."""


def ceil_div(size: Any, by: int) -> Any:
    """size / by, rounded up. size may be a symbolic dimension."""
    return -(-size // by)


def is_symbolic(size: Any) -> bool:
    """Whether the size is a symbolic dimension, known only when an exported program runs."""
    return not isinstance(size, int)


def common_batch(sizes: Iterable[Any]) -> Any:
    """The batch size of arrays for B rows or for all: that which is not 1. It may be symbolic."""
    return next((size for size in sizes if size != 1), 1)


def fill_up(x: jax.Array, axis: int, size: Any, value: int = 0) -> jax.Array:
    """x padded with `value` at the end of the axis, to the given size."""
    missing = size - x.shape[axis]
    if not is_symbolic(missing) and missing == 0:
        return x
    shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
    return jax.lax.concatenate([x, jax.lax.full(shape, value, x.dtype)], axis)


def is_fp8(x: Any) -> bool:
    return str(x.dtype) == FP8


def accumulator(dtype: Any) -> Any:
    """The dtype of sums of values of this dtype: float64 for float64, otherwise float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


# --- A call

DIFFERENTIABLE = ("query", "key", "value", *(x.name for x in OPERANDS if x.gradient))
"""The operands that may have a gradient, in the order of their gradients."""
OPTIONAL_OPERANDS = tuple(x.name for x in OPERANDS if x.optional)
"""Operands that change scores and probabilities."""


class MaskMode(enum.IntEnum):
    """What segment-checked rows compare with keys. Each mode includes the previous one."""

    NO_CHECK = 0
    IDS = 1
    UPPER_LIMIT = 2  # the highest position
    BOTH_LIMITS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static parameters of one attention call, hashable.

    It does not contain which operands are present, or their shapes and dtypes: see `Operands`.
    """

    scale: float = 1.0  # used if `scales` is absent
    soft_cap: float = 0.0  # 0: no cap
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    mask_mode: MaskMode = MaskMode.NO_CHECK
    block_size: tuple[int, int] | None = None  # of the block mask
    row_keys: int = 0  # a bound on the keys that a row attends to; 0: unknown
    dropout_threshold: int = 0  # out of 2^32: smaller random words drop
    max_logits: bool = False  # whether the forward also returns each row's largest logit
    deterministic: bool = False
    needs_grad: tuple[str, ...] = ()  # names from DIFFERENTIABLE
    implementation: Literal["cuda", "xla"] | None = None
    # The fields below are not read by any primitive.
    layout: Layout = UNSHARDED
    gather_head_groups: HeadGroups = None
    bias_dims: tuple[Any, ...] = ()  # the mesh axes of the bias
    checkpoint_name: str | None = None

    @property
    def float32_products(self) -> bool:
        """Whether products of float32 operands must be computed in float32, not in TF32."""
        return self.precision == jax.lax.Precision.HIGHEST

    @property
    def score_grads(self) -> bool:
        """Whether the backward returns each row's part of the gradients of scales and slopes."""
        return "scales" in self.needs_grad or "slopes" in self.needs_grad

    @property
    def row_delta(self) -> bool:
        """Whether the backward returns sum(dout * out) - dlse of each row, for the gradient of the
        sinks."""
        return "sinks" in self.needs_grad

    @property
    def bias_grad(self) -> bool:
        return "bias" in self.needs_grad

    @property
    def has_score_params(self) -> tuple[bool, bool, bool]:
        """Which results backward_p has after dq, dk, dv: score_grads, row_delta, that of bias."""
        return self.score_grads, self.row_delta, self.bias_grad

    def score_params(self, results: Iterable[Any]) -> list[Any]:
        """These three results, or None."""
        rest = iter(results)
        return [next(rest) if has else None for has in self.has_score_params]

    def of_primitive(self, mask: Any) -> AttentionSpec:
        """The spec for primitives: with the mask's fields, without those that no primitive reads.

        Calls that run the same program have equal specs.
        """
        return dataclasses.replace(
            self,
            mask_mode=mask.mask_mode,
            block_size=mask.block_size,
            row_keys=mask.row_keys,
            layout=UNSHARDED,
            gather_head_groups=None,
            bias_dims=(),
            checkpoint_name=None,
        )


_namedtuple: Any = collections.namedtuple  # mypy knows fields that are literals only
_Fields: Any = _namedtuple(
    "_Fields", [x.name for x in OPERANDS], defaults=[None] * (len(OPERANDS) - 3)
)


class Operands(_Fields):
    """The operands of forward_p, backward_p and decode_p by name, or a value for each of them (its
    aval, MLIR value or letters). None: absent. A primitive takes the present ones, in this order.
    schema.py lists their shapes; lse is (B, H, Sq, 2) with `lse_in_two`.
    """

    __slots__ = ()

    @staticmethod
    def of(names: Iterable[str], values: Iterable[Any]) -> Operands:
        return Operands(**dict(zip(names, values, strict=True)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n, x in zip(self._fields, self, strict=True) if x is not None)

    @property
    def leaves(self) -> list[Any]:
        return [x for x in self if x is not None]

    @property
    def optional_operands(self) -> tuple[str, ...]:
        return tuple(x for x in OPTIONAL_OPERANDS if getattr(self, x) is not None)

    @property
    def lse_in_two(self) -> bool:
        """Whether lse has two numbers per row (row_sums.py): with a bias array or dropout."""
        return self.bias is not None or self.dropout_streams is not None

    @property
    def bias_of_indices(self) -> bool:
        """Whether there is an ALiBi bias whose positions are the indices of rows and keys."""
        return self.slopes is not None and self.q_bias_pos is None
