"""From documents_p and blocks_p, which make masks, to platforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.core.shapes import is_symbolic
from packax._src.ops import ffi, partition_rules, xla_mask
from packax._src.ops.primitives import blocks_p, documents_p
from packax._src.ops.rules import ffi_call, lower_xla, register, without_kernels

_CHUNK = 1024  # keys per program of the document kernels: the workspace holds one int per chunk


_MOST_TABLE_KEYS = 1 << 27  # as csrc/ffi/mask.cc has it


_MOST_MASK_ROWS = 65535  # of a batch: a grid's y, in the kernels that make masks


def _xla_documents(q_ids, kv_ids, q_pos, kv_pos, *, compare_positions):
    return xla_mask.document_ranges(
        q_ids, kv_ids, q_pos, kv_pos, compare_positions=compare_positions
    )


def _xla_blocks(q_lo, q_hi, segment_checked, *, kv_len):
    return xla_mask.block_bounds(q_lo, q_hi, segment_checked, kv_len=kv_len)


_documents_xla = lower_xla(_xla_documents, ("compare_positions",))


_blocks_xla = lower_xla(_xla_blocks, ("kv_len",))


def _takes_mask_kernels(ctx, kernel, implementation, batch, kv_len):
    """Else XLA makes the same integers: also where sizes are beyond what the kernels count."""
    if implementation == "xla":
        return False
    if implementation == "cuda":
        ffi.require_extension()
    elif ffi.ext is None or not ffi.serves_here(kernel, for_export=ffi.for_export(ctx)):
        return False
    few = is_symbolic(batch) or batch <= _MOST_MASK_ROWS
    return few and not is_symbolic(kv_len)


def _documents_cuda(ctx, *operands, compare_positions, implementation):
    batch, kv_len = ctx.avals_in[1].shape
    # the size of the tables must be known, and so small that the kernels' 32 bits count all of them
    kernels = _takes_mask_kernels(ctx, "documents_rows", implementation, batch, kv_len)
    if not kernels or kv_len > _MOST_TABLE_KEYS:
        return _documents_xla(ctx, *operands, compare_positions=compare_positions)
    width = 5 * xla_mask.table_size(kv_len) + kv_len + -(-kv_len // _CHUNK)
    workspace = jax.core.ShapedArray((batch, width), jnp.dtype(jnp.int32))
    return ffi_call(
        ctx,
        "packax_documents_v1",
        operands,
        (workspace,),
        compare_positions=np.int32(compare_positions),
    )


def _blocks_cuda(ctx, *operands, kv_len, implementation):
    batch = ctx.avals_in[0].shape[0]
    if not _takes_mask_kernels(ctx, "blocks_rows", implementation, batch, kv_len):
        return _blocks_xla(ctx, *operands, kv_len=kv_len)
    return ffi_call(ctx, "packax_blocks_v1", operands, kv_len=np.int64(kv_len))


register(documents_p, partition_rules.documents, without_kernels(_documents_xla), _documents_cuda)


register(blocks_p, partition_rules.blocks, without_kernels(_blocks_xla), _blocks_cuda)
