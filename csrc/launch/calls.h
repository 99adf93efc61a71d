// One checked call of a pass, as its handler (ffi/forward.cc, ffi/backward.cc) hands it to the
// launches.

#pragma once

#include "ffi/attention.h"

namespace packax {

struct ForwardCall : AttentionCall {
  ffi::AnyBuffer query, key, value, q_order_192, out, lse, row_max, counter;
  bool needs_row_max;  // the largest score of every row, like lse

  // Whether no option of the fallback kernels is asked for.
  bool plain() const { return nothing_beside() && !needs_row_max; }
};

// What the backward's workspace has room for: that algorithm, and those before it. It is chosen
// while a program is lowered, when it may not be known which GPU will run it; there the last one is
// taken that this GPU has kernels for.
enum class Algorithm {
  kPortable,      // delta, then dK and dV, then dQ
  kSm90Separate,  // Hopper's kernels, dK and dV apart from dQ
  kSm90Fused,     // one kernel for all three, which adds dQ up in memory: Hopper's or sm80's
};

struct BackwardCall : AttentionCall {
  ffi::AnyBuffer query, key, value, out, lse, dout, dlse, kv_blocks, kv_order;
  ffi::AnyBuffer dq, dk, dv, score_grads, workspace;
  Algorithm algorithm;
  bool has_dlse;
  bool needs_dq, needs_dkv;
  bool needs_score_grads;  // (batch, heads, 2, q_len) float32, from the kernel of dQ

  void* dbias;  // null where nobody asks for it

  bool plain() const { return nothing_beside() && !needs_score_grads; }
};

// Members of a kernel's `Args{...}`, as those of shape.h.
#define PACKAX_LINEAR_BIAS(p)                                               \
  .scales = (p).scales.untyped_data(), .slopes = (p).slopes.untyped_data(), \
  .q_bias_pos = (p).q_bias_pos.untyped_data(), .kv_bias_pos = (p).kv_bias_pos.untyped_data()
#define PACKAX_SCORE_PARAMS(p) PACKAX_LINEAR_BIAS(p), .scale = (p).scale, .soft_cap = (p).soft_cap
#define PACKAX_BIAS_PARAMS(p, b)                                                      \
  PACKAX_LINEAR_BIAS(p), .bias = (b).bias, .dropout_streams = (b).dropout_streams,    \
      .dropout_rows = (b).dropout_rows, .scale = (p).scale, .soft_cap = (p).soft_cap, \
      .inverse_keep = (b).inverse_keep
#define PACKAX_BIAS_NUMBERS(b)                            \
  .bias_kind = (b).bias_kind, .bias_axes = (b).bias_axes, \
  .dropout_threshold = (b).dropout_threshold, .dropout_rows_batch = (b).dropout_rows_batch
#define PACKAX_FALLBACK_SIZES(s, p, m)                                                        \
  .batch = (s).batch, .mask_batch = (s).mask_batch, .scales_batch = (p).scales_batch,         \
  .bias_batch = (p).bias_batch, .block_mask_batch = (m).batch, .block_mask_heads = (m).heads, \
  .q_block = (m).q_block, .kv_block = (m).kv_block, .q_len = (s).q_len, .kv_len = (s).kv_len, \
  .heads = (s).heads, .kv_heads = (s).kv_heads, .qk_dim = (s).qk_dim, .v_dim = (s).v_dim
#define PACKAX_BLOCK_MASK_SIZES(s, m)                                              \
  .batch = (s).batch, .mask_batch = (s).mask_batch, .block_mask_batch = (m).batch, \
  .block_mask_heads = (m).heads, .q_block = (m).q_block, .kv_block = (m).kv_block, \
  .q_len = (s).q_len, .kv_len = (s).kv_len, .heads = (s).heads, .kv_heads = (s).kv_heads

}  // namespace packax
