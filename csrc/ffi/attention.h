// Reads and checks the operands that both passes of attention share.

#pragma once

#include "call/operands.h"
#include "ffi/checks.h"
#include "ffi/stages.h"

namespace packax {

// In the order of AttentionSignature.
struct AttentionBuffers {
  ffi::AnyBuffer query, key, value;
  ffi::AnyBuffer kv_start, kv_end, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order;
  ffi::AnyBuffer block_mask, q_block_lists;
  ffi::AnyBuffer scales, slopes, q_bias_pos, kv_bias_pos, bias, dropout_streams, dropout_rows;
  float scale, soft_cap;
  int64_t dropout_threshold;
  int32_t mask_mode, q_block, kv_block, bias_of_indices, float32_products;
  int32_t first_head, heads;  // the query heads that the call computes; both 0: all
};

// Binds the operands and attributes that both passes share. Each pass adds others after them.
template <typename Binding>
auto AttentionSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // query: (batch, q_len, row_heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // key: (batch, kv_len, kv_heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // value: (batch, kv_len, kv_heads, v_dim)
      .template Arg<ffi::AnyBuffer>()  // kv_start: (mask_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // kv_end: like kv_start
      .template Arg<ffi::AnyBuffer>()  // q_ids: like kv_start
      .template Arg<ffi::AnyBuffer>()  // kv_ids: (mask_batch, kv_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_pos: like kv_start, or (mask_batch, 2, q_len) if
                                       //   mask_mode is 3
      .template Arg<ffi::AnyBuffer>()  // kv_pos: like kv_ids
      .template Arg<ffi::AnyBuffer>()  // q_blocks: (mask_batch, 5, ceil(q_len/64)) int32
      .template Arg<ffi::AnyBuffer>()  // q_order: (mask_batch, ceil(q_len/128)) int32
      .template Arg<ffi::AnyBuffer>()  // block_mask: (1 or mask_batch, 1 or heads,
                                       //   ceil(q_len/q_block), words) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // q_block_lists: (mask_batch, heads of block_mask,
                                       //   ceil(q_len/128), 2 + ceil(kv_len/64)) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // scales: (1 or batch) float32; or absent
      .template Arg<ffi::AnyBuffer>()  // slopes: (1 or batch, heads) float32; or absent
      .template Arg<ffi::AnyBuffer>()  // q_bias_pos: (1 or batch, q_len) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // kv_bias_pos: (1 or batch, kv_len) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // bias: (groups, 1 or heads, 1 or q_len, kv_len), in
                                       //   query's dtype or float32; or absent
      .template Arg<ffi::AnyBuffer>()  // dropout_streams: (batch, heads, 4) uint32; or absent
      .template Arg<ffi::AnyBuffer>()  // dropout_rows: (1 or batch, q_len) int32; or absent
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<int64_t>("dropout_threshold")
      .template Attr<int32_t>("mask_mode")
      .template Attr<int32_t>("q_block")
      .template Attr<int32_t>("kv_block")
      .template Attr<int32_t>("bias_of_indices")
      .template Attr<int32_t>("float32_products")
      .template Attr<int32_t>("first_head")
      .template Attr<int32_t>("heads");
}

// Reads and checks the shared operands.
ffi::Error ReadAttention(const AttentionBuffers& b, AttentionOperands* o);

// RowsOf: a view of query, out or one of their gradients, starting at the call's first head.
// KeysOf: a view of key, value or one of their gradients.
TensorView RowsOf(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                  int64_t dim);
TensorView KeysOf(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                  int64_t dim);

// (batch, q_len, row_heads, dim): query, out and their gradients.
ffi::Error ExpectRows(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                      Axis dim);

// (batch, kv_len, kv_heads, dim): gradients of key and value.
ffi::Error ExpectKeys(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                      Axis dim);

// (batch, heads, q_len) in float32: one number per row.
ffi::Error ExpectSums(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o);

// lse: (batch, heads, q_len), or (batch, heads, q_len, 2) if o.lse_in_two().
ffi::Error ExpectLse(const ffi::AnyBuffer& lse, const AttentionOperands& o);

// For a call that computes some of the heads: `init` holds the heads of earlier calls, and `result`
// must be the same memory. Absent in the first call, and if nothing is written.
ffi::Error CheckInit(const char* name, const ffi::AnyBuffer& init, const ffi::AnyBuffer& result);

}  // namespace packax
