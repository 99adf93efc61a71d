"""`flash_attention` and `create_attention_mask`; call them inside `utils.attention_specs`."""

from packax.kvax.ops.flash_attention_triton import flash_attention_triton as flash_attention
from packax.kvax.ops.mask_creator import create_attention_mask

__all__ = ["create_attention_mask", "flash_attention"]
