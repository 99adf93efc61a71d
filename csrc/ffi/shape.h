// What forward and backward share: the sizes of one call and its mask, read from the buffers and
// checked once.
//
// Masks arrive as row ranges and block bounds: nothing here knows of documents, positions or
// windows. Formulas of the grids: docs/internals/kernels.md.

#pragma once

#include "ffi/operands.h"
#include "ffi/stages.h"

namespace packax {

inline constexpr int64_t kBlock = 64;     // rows or keys whose bounds the mask stores
inline constexpr int64_t kTile = 128;     // rows or keys whose order the mask stores
inline constexpr int64_t kTile192 = 192;  // rows, in q_order_192

struct Shape {
  ffi::DataType dtype;
  int32_t batch, mask_batch, q_len, kv_len, heads, kv_heads, qk_dim, v_dim;
  // Rows of query, out and their gradients have this many; the call is about `heads` of them.
  int32_t row_heads, first_head;
  bool float32_products = true;  // of float32 operands; otherwise TF32

  int64_t q_blocks() const { return CeilDiv(q_len, kBlock); }
  int64_t kv_blocks() const { return CeilDiv(kv_len, kBlock); }
  int64_t q_tiles() const { return CeilDiv(q_len, kTile); }
  int64_t kv_tiles() const { return CeilDiv(kv_len, kTile); }
  int64_t q_tiles_192() const { return CeilDiv(q_len, kTile192); }
  // Rows of query in whole blocks, and those of all heads: what the backward's workspace has.
  int64_t padded() const { return kBlock * q_blocks(); }
  int64_t padded_rows() const { return Product({batch, heads, padded()}); }
  Dtype kernel_dtype() const {
    if (dtype == ffi::DataType::F32) return float32_products ? Dtype::kF32 : Dtype::kTf32;
    return dtype == ffi::DataType::BF16 ? Dtype::kBf16 : Dtype::kF16;
  }
  TensorMapElement element() const {
    return dtype == ffi::DataType::BF16 ? TensorMapElement::kBf16 : TensorMapElement::kF16;
  }
};

struct Mask {
  ffi::AnyBuffer q_lo, q_hi;     // (mask_batch, q_len)
  ffi::AnyBuffer q_ids, kv_ids;  // read where segment_check >= 1
  ffi::AnyBuffer q_pos, kv_pos;  // read where segment_check >= 2; at 3 q_pos holds two limits
  ffi::AnyBuffer q_blocks;       // (mask_batch, 5, q_blocks)
  ffi::AnyBuffer q_order;        // (mask_batch, q_tiles)
  int32_t segment_check;
};

// Members of a kernel's `Args{...}` that a mask or the sizes fill. Every one is named: a kernel
// that has more of them, fewer or in another order does not compile.
#define PACKAX_MASK_ROWS(m) \
  .q_lo = (m).q_lo.untyped_data(), .q_hi = (m).q_hi.untyped_data(), PACKAX_MASK_ELEMENTS(m)
#define PACKAX_MASK_ELEMENTS(m)                                           \
  .q_ids = (m).q_ids.untyped_data(), .kv_ids = (m).kv_ids.untyped_data(), \
  .q_pos = (m).q_pos.untyped_data(), .kv_pos = (m).kv_pos.untyped_data(), \
  .q_blocks = (m).q_blocks.untyped_data()
#define PACKAX_SIZES(s)                                                                       \
  .batch = (s).batch, .mask_batch = (s).mask_batch, .q_len = (s).q_len, .kv_len = (s).kv_len, \
  .heads = (s).heads, .kv_heads = (s).kv_heads
#define PACKAX_SIZES_OF_ROWS(s) PACKAX_SIZES(s), .row_heads = (s).row_heads

// `first_head` and `heads`: of the query's, those that the call is about; 0 and 0: all.
ffi::Error ReadShape(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                     const ffi::AnyBuffer& value, const ffi::AnyBuffer& q_lo, int32_t first_head,
                     int32_t heads, Shape* shape);

// The products of float32 operands that an attribute asks for.
ffi::Error ReadPrecision(int32_t float32_products, Shape* shape);

// Of a call for some of the heads: the others are in `before` already, whose memory `result` takes.
// Absent where there are none yet, and where nothing is written.
ffi::Error CheckBefore(const char* name, const ffi::AnyBuffer& before,
                       const ffi::AnyBuffer& result);

ffi::Error CheckMask(const Shape& s, const Mask& m);

// What dK and dV need of it besides.
ffi::Error CheckMaskOfKeys(const Shape& s, const ffi::AnyBuffer& kv_blocks,
                           const ffi::AnyBuffer& kv_order);

ffi::Error CheckScale(float scale);

// (batch, q_len, row_heads, dim): query, out and their gradients.
ffi::Error ExpectRows(const char* name, const ffi::AnyBuffer& buffer, const Shape& s, Axis dim);

// (batch, kv_len, kv_heads, dim): gradients of key and value.
ffi::Error ExpectKeys(const char* name, const ffi::AnyBuffer& buffer, const Shape& s, Axis dim);

// (batch, heads, q_len) in float32: a number of each row.
ffi::Error ExpectSums(const char* name, const ffi::AnyBuffer& buffer, const Shape& s);

// lse: like that, or with `in_two` (batch, heads, q_len, 2), a row's largest logit and the
// logarithm of its sum less that (csrc/kernels/portable/row_sums.py).
ffi::Error ExpectLse(const ffi::AnyBuffer& lse, const Shape& s, bool in_two);

// One program per query tile, or several where a program covers less than a tile. kv_heads x group
// = heads.
Grid QueryGrid(const Shape& s, int block);

Grid KeyGrid(const Shape& s, int block);

// (batch, kv_len, kv_heads, dim) as tensor maps see it: the heads beside each other in one row.
TensorView KeysOf(const char* name, const ffi::AnyBuffer& buffer, const Shape& s);

// Likewise (batch, q_len, row_heads, dim), of which it is the heads that the call is about.
TensorView RowsOf(const char* name, const ffi::AnyBuffer& buffer, const Shape& s);

// Where those heads begin.
void* FirstHead(const ffi::AnyBuffer& buffer, const Shape& s);

}  // namespace packax
