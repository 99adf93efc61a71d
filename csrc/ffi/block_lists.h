// Block masks: read from the buffers of a general call and checked once
// (docs/internals/mask_format.md, "Block masks").

#pragma once

#include <bit>
#include <optional>

#include "ffi/shape.h"

namespace packax {

// A map of blocks that narrows the mask, and the lists of what a tile of rows, and in the backward
// one of keys, meets in it. Without blocks (of 0) there is none, and no buffer is ever read.
struct BlockMap {
  ffi::AnyBuffer bits;        // (batch, heads, ceil(q_len/q_block), words) int32
  ffi::AnyBuffer entries;     // (mask_batch, heads, q_tiles, 2 + kv_blocks) int32
  ffi::AnyBuffer kv_entries;  // (mask_batch, heads, kv_tiles, 2 + q_blocks) int32; of a backward
  int32_t q_block, kv_block;
  int32_t batch = 1, heads = 0;  // 1 or mask_batch, 1 or the heads of query; no heads: not there

  bool there() const { return heads > 0; }
  std::optional<BlockMap> if_there() const { return there() ? std::optional(*this) : std::nullopt; }
  // Whether the kernels for Hopper can take it: they find blocks by shifts (sm90/block_lists.py).
  bool shifts() const {
    return std::has_single_bit(static_cast<uint32_t>(q_block)) &&
           std::has_single_bit(static_cast<uint32_t>(kv_block));
  }
};

// Members of `Args{...}`, as those of attention.h.
#define PACKAX_MAPPED_SIZES(s, m)                                                               \
  .batch = (s).batch, .mask_batch = (s).mask_batch, .map_batch = (m).batch,                     \
  .map_heads = (m).heads, .q_block = (m).q_block, .kv_block = (m).kv_block, .q_len = (s).q_len, \
  .kv_len = (s).kv_len, .heads = (s).heads, .kv_heads = (s).kv_heads

// Of q_block and kv_block of 0, for no map, it makes divisors of 1.
ffi::Error ReadBlockMap(const Shape& s, BlockMap* m);

// The lists of tiles of keys, which a backward has besides.
ffi::Error CheckListsOfKeys(const Shape& s, const BlockMap& m);

}  // namespace packax
