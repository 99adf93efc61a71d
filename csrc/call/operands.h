// The operands of a call, read from its buffers and checked (csrc/ffi). csrc/launch/select.cc
// chooses kernels by them, and kernels take their arguments from them.
//
// A field that is a kernel's argument has the argument's name: the generated lists (args.h) take
// every argument from the field of that name, so a missing one does not compile. A kernel takes a
// tensor either as an address or as a tensor map over its view.

#pragma once

#include <bit>

#include "call/sizes.h"
#include "runtime/driver.h"

namespace packax {

inline constexpr int64_t kBlock = 64;     // rows or keys whose bounds the mask stores
inline constexpr int64_t kTile = 128;     // rows or keys whose order the mask stores
inline constexpr int64_t kTile192 = 192;  // rows, in q_order_192

// Options of a call that the plain kernels do not have.
enum Option : uint32_t {
  kSoftCap = 1,
  kAlibi = 2,       // one slope per head times the distance of indices; all scales are `scale`
  kLinearBias = 4,  // other scales, slopes and positions
  kBlockMask = 8,
  kBias = 16,  // an array
  kDropout = 32,
  kRowStats = 64,  // row_max, or score_grads
};

// What segment-checked rows compare with keys; each compares what those before it do.
enum MaskMode : int32_t {
  kNoCheck,
  kIds,
  kUpperLimit,  // of positions
  kBothLimits,
};

// For both passes of attention.
struct AttentionOperands {
  TensorView query, key, value, out;
  const void* lse;
  const void *kv_start, *kv_end;  // (mask_batch, q_len)
  const void *q_ids, *kv_ids;     // read from kIds on
  const void *q_pos, *kv_pos;     // read from kUpperLimit on; at kBothLimits q_pos has two limits
  const void* q_blocks;           // (mask_batch, 5, ceil(q_len/64))
  const void* q_order;            // (mask_batch, ceil(q_len/128))
  const void* block_mask;     // (block_mask_batch, block_mask_heads, ceil(q_len/q_block), words)
  const void* q_block_lists;  // (mask_batch, block_mask_heads, q_tiles, 2 + ceil(kv_len/64))
  const void* scales;         // (scales_batch) float32
  const void* slopes;         // (bias_batch, heads) float32
  const void *q_bias_pos, *kv_bias_pos;  // (bias_batch, q_len), (bias_batch, kv_len) int32
  TensorView bias;                       // (planes, q_len, kv_len); no data where there is none
  const void* dropout_streams;           // (batch, heads, 4) uint32
  const void* dropout_rows;              // (dropout_rows_batch, q_len) int32
  const void* counter;                   // of the tiles that persistent programs have taken

  float scale, soft_cap;   // soft_cap 0: none
  float inverse_keep = 1;  // 1 / the fraction of probabilities that is kept
  int32_t mask_mode;
  int32_t bias_kind;          // 1: of the query's dtype, 2: of float32; 0: none
  int32_t bias_axes;          // bit 0: one per batch row, 1: one per head, 2: one per query row
  int32_t dropout_threshold;  // the bits of a uint32; 0: nothing is dropped
  int32_t dropout_rows_batch = 1;
  int32_t batch, mask_batch;
  int32_t scales_batch, bias_batch;   // 1 or batch; 0: none
  int32_t block_mask_batch = 1;       // 1 or mask_batch
  int32_t block_mask_heads;           // 1 or heads; 0: none
  int32_t q_block = 1, kv_block = 1;  // kernels divide by them
  int32_t q_len, kv_len, heads, kv_heads, qk_dim, v_dim;
  // The heads in query, out and their gradients; the call computes `heads` of them.
  int32_t row_heads;

  // Not arguments of kernels.
  Dtype dtype;  // of the kernels
  int32_t first_head;
  bool bias_of_indices;
  bool row_stats;

  uint32_t options() const {
    const bool alibi = bias_of_indices && bias_batch == 1;
    uint32_t asked = alibi ? kAlibi : 0U;
    if (!alibi && (scales_batch > 0 || bias_batch > 0)) asked |= kLinearBias;
    if (soft_cap > 0) asked |= kSoftCap;
    if (block_mask_heads > 0) asked |= kBlockMask;
    if (bias_kind > 0) asked |= kBias;
    if (dropout_threshold != 0) asked |= kDropout;
    if (row_stats) asked |= kRowStats;
    return asked;
  }
  // lse is then a row's largest logit, and the logarithm of its sum relative to that
  // (csrc/kernels/portable/row_sums.py).
  bool lse_in_two() const { return (options() & (kBias | kDropout)) != 0; }

  int64_t q_tiles() const { return CeilDiv(q_len, kTile); }
  int64_t kv_tiles() const { return CeilDiv(kv_len, kTile); }
};

struct ForwardOperands : AttentionOperands {
  const void* row_max;      // null if not requested: the kernel must not write it
  const void* q_order_192;  // (mask_batch, ceil(q_len/192))
};

// The algorithm for which the backward's workspace is large enough, as for those before it. It is
// chosen when a program is lowered, possibly without knowing the GPU that will run it. When it
// runs, the last one up to it is used for which the GPU has kernels.
enum class Algorithm {
  kPortable,      // delta, then dK and dV, then dQ
  kSm90Separate,  // Hopper's kernels, one for dK and dV and one for dQ
  kSm90Fused,     // one kernel for all three, which sums dQ in memory: Hopper's or sm80's
};

struct BackwardOperands : AttentionOperands {
  TensorView dout, dq, dk, dv;
  // In the workspace, with q_len rounded up to whole blocks; `top` with a bias.
  TensorView lse2, delta, lo, hi, top;
  TensorView dbias;  // like bias
  const void* dq_sum;
  const void *dlse, *score_grads;
  const void* kv_blocks;       // (mask_batch, 4, ceil(kv_len/64))
  const void* kv_order;        // (mask_batch, ceil(kv_len/128))
  const void* kv_block_lists;  // (mask_batch, block_mask_heads, kv_tiles, 2 + ceil(q_len/64))
  int32_t has_dlse, has_score_grads;
  int32_t clear_dq;  // whether to clear dq_sum

  Algorithm algorithm;
  bool needs_dq, needs_dkv, needs_dbias;

  // For query rounded up to whole blocks, over all heads.
  int64_t padded_rows() const { return Product({batch, heads, kBlock, CeilDiv(q_len, kBlock)}); }
};

struct DecodeOperands {
  const void *query, *key, *value, *kv_start, *kv_end;
  const void *block_table, *sinks;      // not read if the cache is not paged, or without sinks
  const void *key_scale, *value_scale;  // (scale_rows, kv_heads) float32, for a cache in FP8
  const void *partial, *sums, *out, *lse;
  float scale, soft_cap;
  int32_t has_sinks;
  int32_t batch, sink_batch, q_len, heads, kv_heads;
  int32_t kv_len;                         // keys for which a sequence has room
  int32_t pages, page_size, table_width;  // 0 if the cache is not paged
  int32_t qk_eighths, v_eighths;          // the head dims / 8
  int32_t splits;                         // the most shares of one sequence
  int32_t shares;          // of all sequences, divided among them by length; 0: each has `splits`
  int32_t scale_rows;      // 1, the batch or the pages
  int32_t bfloat16_query;  // 1: bfloat16, 0: float16; for a cache in FP8

  Dtype dtype;
  bool fp8;  // of key and value: float8_e4m3fn
  int32_t qk_dim, v_dim;
  int32_t room;  // shares for which the workspace has room

  int64_t rows() const { return int64_t{q_len} * (heads / kv_heads); }
};

// Kernels of masks have neither dtype nor head dims.
struct MaskOperands {
  static constexpr Dtype dtype = Dtype::kAny;
  static constexpr int32_t qk_dim = 0, v_dim = 0;
  int32_t batch, q_len, kv_len;
};

struct DocumentsOperands : MaskOperands {
  const void *q_ids, *kv_ids, *q_pos, *kv_pos, *workspace, *lo, *hi, *segment_checked;
  int32_t compare_positions, table_size, table_shift, search_steps;
};

struct BlocksOperands : MaskOperands {
  const void *kv_start, *kv_end, *segment_checked;
  const void *q_blocks, *kv_blocks, *q_order, *q_order_192, *kv_order;
};

}  // namespace packax
