"""Constants, kernel settings and padding to whole blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from packax import PADDING_SEGMENT_ID
from packax.kvax.utils.typing import DeviceArray

H100_NAME = "H100"


@dataclasses.dataclass(frozen=True)
class FlashAttentionParamsConfig:
    """Settings of kvax's kernels.

    packax's kernels use other settings, chosen for the GPU when the wheel is built. Of these, only
    the block sizes have an effect, on the bounds of a mask.
    """

    query_block_size: int = 64
    kv_block_size: int = 64
    num_warps: int = 4
    num_stages: int = 3


def get_default_flash_attention_params(backward: bool) -> FlashAttentionParamsConfig:
    """kvax's default settings for the first GPU.

    Args:
        backward: whether the settings are for the backward pass.

    Returns:
        FlashAttentionParamsConfig. On a GPU named H100: blocks of 128 queries (64 in the backward
        pass) and 128 keys, 8 warps, 3 stages. On other GPUs and without a GPU: blocks of 64 and 64,
        4 warps, 3 stages.
    """
    try:
        devices = jax.devices("gpu")
    except RuntimeError:  # no GPU here
        devices = []
    if devices and H100_NAME in devices[0].device_kind:
        return FlashAttentionParamsConfig(64 if backward else 128, 128, num_warps=8, num_stages=3)
    return FlashAttentionParamsConfig()


def pad_to_block_size(
    embeddings: Sequence[DeviceArray] | None,
    positions: DeviceArray,
    segment_ids: DeviceArray | None,
    block_size: int,
    pos_fill_value: int,
    transposed_inputs: bool = False,
) -> tuple[Sequence[DeviceArray] | None, DeviceArray, DeviceArray | None]:
    """Pads the sequences to whole blocks.

    Args:
        embeddings: arrays (B, S, H, D), or (B, H, S, D) with transposed_inputs; filled with 0.
        positions: (B, S), filled with pos_fill_value.
        segment_ids: (B, S), filled with PADDING_SEGMENT_ID.
        block_size: the padded length is the next multiple of it.
        pos_fill_value: the position of padding.
        transposed_inputs: whether embeddings are (B, H, S, D).

    Returns:
        (embeddings, positions, segment_ids). The arguments themselves if no padding is needed,
        otherwise padded arrays, with the embeddings as a list. None stays None.

    Raises:
        ZeroDivisionError: a block_size of 0.
        ValueError: wrong rank of embeddings or segment_ids, if padding is needed.
    """
    missing = -positions.shape[1] % block_size
    if not missing:
        return embeddings, positions, segment_ids
    rows = ((0, 0), (0, missing))
    if embeddings is not None:
        widths = ((0, 0), *rows, (0, 0)) if transposed_inputs else (*rows, (0, 0), (0, 0))
        embeddings = [jnp.pad(x, widths) for x in embeddings]
    positions = jnp.pad(positions, rows, constant_values=pos_fill_value)
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, rows, constant_values=PADDING_SEGMENT_ID)
    return embeddings, positions, segment_ids
