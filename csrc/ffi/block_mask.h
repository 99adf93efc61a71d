// Block masks: read from the buffers of a call and checked once (docs/internals/mask_format.md,
// "Block masks").

#pragma once

#include <bit>

#include "ffi/shape.h"

namespace packax {

// Narrows the mask by blocks, and lists what a tile of rows, and in the backward one of keys, meets
// in it.
struct BlockMask {
  ffi::AnyBuffer bits;      // (batch, heads, ceil(q_len/q_block), words) int32
  ffi::AnyBuffer q_lists;   // (mask_batch, heads, q_tiles, 2 + kv_blocks) int32
  ffi::AnyBuffer kv_lists;  // (mask_batch, heads, kv_tiles, 2 + q_blocks) int32; of a backward
  int32_t q_block = 0, kv_block = 0;
  int32_t batch = 1, heads = 0;  // 1 or mask_batch, 1 or the heads of the call; 0: not there

  bool there() const { return heads > 0; }
  // Whether blocks are found by shifts.
  bool shifts() const {
    return std::has_single_bit(static_cast<uint32_t>(q_block)) &&
           std::has_single_bit(static_cast<uint32_t>(kv_block));
  }
};

// Without a block mask q_block and kv_block are 0; it makes them 1, for kernels that divide by
// them.
ffi::Error ReadBlockMask(const Shape& s, BlockMask* m);

// The lists of tiles of keys, which a backward has besides.
ffi::Error CheckListsOfKeys(const Shape& s, const BlockMask& m);

}  // namespace packax
