// The kernels of decoding: `decode` leaves float32 sums of every share of the keys in the
// workspace, `decode_combine` merges them.
//
// How many shares is chosen for the GPU (heuristics.h), of those that the workspace holds; which
// sequences have them, the programs may work out on the device. A kernel is compiled for head dims
// of its own and serves all multiples of 8 up to them.

#pragma once

#include "ffi/shape.h"

namespace packax {

struct DecodeShape {
  ffi::DataType dtype;
  bool float32_products;  // of float32 operands; otherwise TF32
  int32_t batch, q_len, heads, kv_heads, qk_dim, v_dim;
  int32_t kv_len;                         // keys that a sequence has room for
  int32_t pages, page_size, table_width;  // 0 and unused where the cache is not paged
  int32_t sink_batch, room;               // room: shares that the workspace holds

  int64_t rows() const { return int64_t{q_len} * (heads / kv_heads); }
  Dtype kernel_dtype() const {
    if (dtype == ffi::DataType::F32) return float32_products ? Dtype::kF32 : Dtype::kTf32;
    return dtype == ffi::DataType::BF16 ? Dtype::kBf16 : Dtype::kF16;
  }
  // Merging multiplies nothing: one kernel for both precisions.
  Dtype merged_dtype() const { return dtype == ffi::DataType::F32 ? Dtype::kF32 : kernel_dtype(); }
};

struct DecodeCall {
  DecodeShape shape;
  ffi::AnyBuffer query, key, value, q_lo, q_hi, block_table, sinks, out, lse, partial, sums;
  float scale, soft_cap;
  bool has_sinks;
};

// In the initialize stage kernels are found and loaded and grids checked, and nothing is launched.
ffi::Error LaunchDecode(Device* device, Stream stream, const DecodeCall& c);

}  // namespace packax
