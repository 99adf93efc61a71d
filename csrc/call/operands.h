// The operands of a call. csrc/ffi reads them from buffers and checks them; csrc/launch/select_*.cc
// selects kernels by them and passes them to the kernels. csrc/launch/judge.cc answers questions
// about a call by its sizes and options alone; sizes that are not known yet are 0.
//
// A field that is a kernel argument has the argument's name: the generated argument lists (args.h)
// refer to fields by name, so a missing field does not compile. A kernel takes a tensor either as a
// pointer or as a tensor map over its view.

#pragma once

#include <algorithm>
#include <bit>

#include "call/sizes.h"
#include "runtime/driver.h"
#include "signatures.h"  // generated

namespace packax {

inline constexpr int64_t kBlock = 64;     // rows or keys per block of the mask's bounds
inline constexpr int64_t kTile = 128;     // rows or keys per tile of the mask's orders
inline constexpr int64_t kTile192 = 192;  // rows per tile of q_order_192

// Options of a call that the plain kernels do not support.
enum Option : uint32_t {
  kSoftCap = 1,
  kAlibi = 2,       // one slope per head times the index distance; any scales equal `scale`
  kLinearBias = 4,  // any other scales, slopes or positions
  kBlockMask = 8,
  kBias = 16,  // a bias array
  kDropout = 32,
  kRowStats = 64,  // row_max or score_grads is requested
};

// What segment-checked rows compare with keys. Each mode includes the comparisons of the previous
// ones.
enum MaskMode : int32_t {
  kNoCheck,
  kIds,
  kUpperLimit,  // of the key's position
  kBothLimits,
};

// The operands that both passes of attention share. The generated base classes (signatures.h) have
// the pointers of schema.py, of which those that no mode or option of the call needs are not read,
// and the attributes that it says are kept: scale, soft_cap, mask_mode and first_head.
struct AttentionOperands : AttentionFields {
  TensorView query, key, value, out;
  TensorView bias;  // (planes, 1 or q_len, kv_len); no data without a bias

  float inverse_keep = 1;  // 1 / the fraction of probabilities that dropout keeps
  int32_t bias_kind;       // 0: none, 1: in the query's dtype, 2: in float32
  // Bits 0 to 2: axes that are not broadcast (batch, heads, q_len). Above: the consecutive batch
  // rows that read the same bias.
  int32_t bias_axes;
  int32_t dropout_threshold;  // the bits of a uint32; 0: no dropout
  int32_t dropout_rows_batch = 1;
  int32_t batch, mask_batch;
  int32_t scales_batch, bias_batch;   // 1 or batch; 0: none
  int32_t block_mask_batch = 1;       // 1 or mask_batch
  int32_t block_mask_heads;           // 1 or heads; 0: none
  int32_t q_block = 1, kv_block = 1;  // not 0: kernels divide by them
  int32_t q_len, kv_len, heads, kv_heads, qk_dim, v_dim;
  // The heads of query, out and their gradients; the call computes `heads` of them.
  int32_t row_heads;

  // Not kernel arguments.
  Dtype dtype;  // of the kernels
  bool bias_of_indices;
  bool row_stats;

  uint32_t options() const {
    const bool alibi = bias_of_indices && bias_batch == 1;
    uint32_t bits = alibi ? kAlibi : 0U;
    if (!alibi && (scales_batch > 0 || bias_batch > 0)) bits |= kLinearBias;
    if (soft_cap > 0) bits |= kSoftCap;
    if (block_mask_heads > 0) bits |= kBlockMask;
    if (bias_kind > 0) bits |= kBias;
    if (dropout_threshold != 0) bits |= kDropout;
    if (row_stats) bits |= kRowStats;
    return bits;
  }
  // Whether lse has two numbers per row, the largest logit and the logarithm of the sum of
  // exp(logit - largest) (csrc/kernels/portable/row_sums.py).
  bool lse_in_two() const { return (options() & (kBias | kDropout)) != 0; }

  int64_t bias_group() const { return bias_axes >> 3; }

  // Of head dims, so that rows are aligned to 16 bytes.
  static constexpr int32_t multiple() { return 8; }

  int64_t q_tiles() const { return CeilDiv(q_len, kTile); }
  int64_t kv_tiles() const { return CeilDiv(kv_len, kTile); }
};

// row_max is null if not requested; the kernel then does not write it.
struct ForwardOperands : AttentionOperands, ForwardFields {
  int32_t sink_batch;  // 1 or batch; 0: none
  int32_t choice = 0;  // not 0: two kernels are launched (csrc/kernels/sm90/fwd.py)
};

// The tangents of query, key and value may be absent.
struct TangentOperands : AttentionOperands, ForwardTangentFields {
  TensorView tq, tk, tv, tout;
  int32_t has_tq, has_tk, has_tv;
};

// Algorithms of the backward, by increasing workspace. The lowering chooses one, possibly without
// knowing the GPU, and its workspace is large enough for the previous ones, too. A call uses the
// last algorithm, up to the chosen one, for which the GPU has kernels.
enum class Algorithm {
  kPortable,      // delta, then dK and dV, then dQ
  kSm90Separate,  // Hopper's kernels, one for dK and dV and one for dQ
  kSm90Fused,     // one kernel for all three, which accumulates dQ in memory (sm90, sm80)
};

inline constexpr const char* kAlgorithmNames[] = {"portable", "sm90_separate", "sm90_fused"};

constexpr const char* Name(Algorithm algorithm) {
  return kAlgorithmNames[static_cast<int>(algorithm)];
}

constexpr int64_t kCounterSize = 64;  // elements, so that what follows is aligned to 256 bytes

// The 4-byte elements of the workspace for each padded query row of the call and of the mask, and
// besides. The sums of the bias gradient follow: dbias_parts, each as large as the bias.
struct BackwardWorkspace {
  int64_t of_row, of_mask_row, others;
};

// row_delta is null if not requested.
struct BackwardOperands : AttentionOperands, BackwardFields {
  TensorView dout, dq, dk, dv;
  // In the workspace, with q_len rounded up to whole blocks; `top` only with a bias.
  TensorView lse2, delta, lo, hi, top;
  TensorView dbias;         // like bias
  const void* dbias_sums;   // (dbias_parts, planes, q_len, kv_len) float32, in the workspace
  int32_t dbias_parts = 0;  // 0: no room for sums
  const void* dq_sum;
  int64_t dq_columns = kMaxInt32;  // per row of dq_sum: at least the kernels' head dim
  const void* counter;             // tiles that persistent programs have taken
  int32_t has_dlse, has_score_grads;
  int32_t clear_dq;  // 1: clear dq_sum; 2: only rows without keys (common/bwd_preprocess.py)

  Algorithm algorithm;
  bool deterministic;  // whether `algorithm` must be, while it is chosen
  bool needs_dq, needs_dkv, needs_dbias;

  // Query rows of all heads and batch rows, with q_len rounded up to whole blocks.
  int64_t padded_rows() const { return Product({batch, heads, kBlock, CeilDiv(q_len, kBlock)}); }

  BackwardWorkspace workspace() const {
    if (algorithm == Algorithm::kPortable) return {1, 0, 0};
    const int64_t sections = 2 + (bias_kind != 0 ? 1 : 0);
    if (algorithm == Algorithm::kSm90Fused) return {Sum({sections, dq_columns}), 2, 0};
    return {sections, 2, dbias_parts > 0 ? kCounterSize : 1};
  }
};

struct DecodeOperands : DecodeFields {
  TensorView query, key, value;  // a paged cache is (pages, page_size, kv_heads, columns)

  int32_t has_sinks;
  int32_t batch, sink_batch, q_len, heads, kv_heads;
  int32_t kv_len;                         // keys that fit in the cache of a sequence
  int32_t pages, page_size, table_width;  // 0 if the cache is not paged
  int32_t qk_eighths, v_eighths;          // the head dims / 8
  int32_t splits;                         // the most shares per sequence
  int32_t shares;  // in all, divided among sequences by length; 0: `splits` for each
  // Packed rows of several sequences, in a batch of 1 (packax_ragged_v1).
  const void* workspace = nullptr;  // int32: the list of work
  const void* counter = nullptr;    // tiles of chunks that persistent programs have taken
  int32_t room;                     // shares that fit in the workspace, or items
  int32_t tile_rows = 0;            // the most tokens of an item; 0: rows are not packed
  int32_t has_tall = 0;             // whether a tall kernel computes the items with more rows
  int32_t chunks_elsewhere = 0;     // whether another kernel computes those of long chunks
  int32_t scale_rows;               // 1, batch or pages
  int32_t bfloat16_query;           // for a cache in FP8; 1: bfloat16, 0: float16

  Dtype dtype;
  bool fp8;  // key and value are float8_e4m3fn
  int32_t qk_dim, v_dim;
  int32_t chunk_tiles = 0;  // for how many tiles of chunks the list has room

  // Of head dims, so that rows are aligned to 16 bytes.
  int32_t multiple() const { return fp8 ? 16 : 8; }

  // New rows of a sequence, or the most of an item, for one key/value head.
  int64_t rows() const { return int64_t{tile_rows > 0 ? tile_rows : q_len} * (heads / kv_heads); }
};

// Mask kernels have neither a dtype nor head dims.
struct MaskOperands {
  static constexpr Dtype dtype = Dtype::kAny;
  static constexpr int32_t qk_dim = 0, v_dim = 0;
  static constexpr int32_t multiple() { return 1; }
  static constexpr int64_t kMaxBatch = 65535;  // the y axis of grids
  int32_t batch, q_len, kv_len;
};

struct DocumentsOperands : MaskOperands, DocumentsFields {
  // Keeps five tables with two slots per key below 2^31 elements; for more keys, Python uses XLA.
  static constexpr int64_t kMaxKeys = int64_t{1} << 27;

  // Of a table: a power of two, at least two slots per key.
  int64_t slots() const {
    return std::max(int64_t{1024},
                    static_cast<int64_t>(2 * std::bit_ceil(static_cast<uint64_t>(kv_len))));
  }
  // Of the workspace, for each batch row. The last section has a word for every 1,024 keys.
  int64_t words() const { return 5 * slots() + kv_len + CeilDiv(kv_len, 1024); }

  int32_t table_size, table_shift, search_steps;
};

struct BlocksOperands : MaskOperands, BlocksFields {};

}  // namespace packax
