// Host tensor maps as kernels take them: the parameters with which Hopper's TMA units address
// memory.

#pragma once

#include <cstdint>

namespace packax {

// One "tma" parameter. Triton passes it as seven: the CUtensorMap by value, then three sizes and
// three strides, in elements, of the (batch, length, columns) view that it describes.
struct TensorMap {
  alignas(64) unsigned char map[128];
  int32_t shape[3];
  int64_t strides[3];
};

// The box that TMA copies at once through a map, (1, rows, columns), and its layout in shared
// memory (CUtensorMapSwizzle).
struct TensorMapBox {
  int rows, columns, swizzle;
};

inline constexpr int kMaxTensorMaps = 13;  // per kernel

}  // namespace packax
