// Host tensor maps, the parameters by which Hopper's TMA units address memory, as kernels take
// them.

#pragma once

#include <cstdint>

namespace packax {

// One "tma" parameter. Triton passes it as seven: the CUtensorMap by value, then three sizes and
// three strides, in elements, of the (batch, length, columns) view that it was made over.
struct TensorMap {
  alignas(64) unsigned char map[128];
  int32_t shape[3];
  int64_t strides[3];
};

// What TMA moves at once through one map, (1, rows, columns), and how it lays that out in shared
// memory (CUtensorMapSwizzle).
struct TensorMapBox {
  int rows, columns, swizzle;
};

inline constexpr int kMaxTensorMaps = 12;  // of one kernel

}  // namespace packax
