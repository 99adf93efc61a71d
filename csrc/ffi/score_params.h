// What changes scores beside the mask: scales, slopes and positions, read from the buffers and
// checked once.

#pragma once

#include <optional>

#include "ffi/shape.h"

namespace packax {

struct ScoreParams {
  ffi::AnyBuffer scales;                     // (scales_batch) float32
  ffi::AnyBuffer slopes;                     // (bias_batch, heads) float32
  ffi::AnyBuffer q_bias_pos, kv_bias_pos;    // (bias_batch, q_len), (bias_batch, kv_len) int32
  float scale, soft_cap;                     // soft_cap 0: none
  int32_t scales_batch = 0, bias_batch = 0;  // 1 or batch; 0: not there
  bool of_indices = false;                   // positions are indices, and scales hold only `scale`

  bool any() const { return scales_batch > 0 || bias_batch > 0 || soft_cap > 0; }

  // One slope a head, and nothing else that an attribute or the kernel does not know itself.
  bool only_slopes() const { return of_indices && bias_batch == 1 && soft_cap == 0; }
};

ffi::Error ReadScoreParams(const Shape& s, int32_t bias_of_indices, ScoreParams* p);

}  // namespace packax
