// Tensor maps as kernel parameters: the descriptors with which Hopper's TMA units address memory.

#pragma once

#include <cstdint>

namespace packax {

// One "tma" parameter of a kernel. Triton expands it into nine parameters: the CUtensorMap by
// value, then four sizes and four strides (in elements) of the (batch, heads, length, columns)
// view.
struct TensorMap {
  alignas(64) unsigned char map[128];
  int32_t shape[4];
  int64_t strides[4];
};

// The box of (1, 1, rows, columns) that one TMA operation transfers, and its layout in shared
// memory (CUtensorMapSwizzle).
struct TensorMapBox {
  int rows, columns, swizzle;
};

inline constexpr int kMaxTensorMaps = 13;  // per kernel

}  // namespace packax
