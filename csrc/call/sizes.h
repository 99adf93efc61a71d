// Arithmetic on sizes that does not overflow, and the limits of what kernels count in 32 bits.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace packax {

// The longest row: positions and tile ends stay below 2^31.
inline constexpr int64_t kMaxLength = int64_t{1} << 29;
// Offsets in a tile do: 128 rows of so many heads of 256.
inline constexpr int64_t kMaxHeads = 65536;
inline constexpr int64_t kMaxInt32 = 2147483647;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A product of sizes; stays at the largest int64 instead of wrapping, so that a limit check still
// sees it.
constexpr int64_t Product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return std::numeric_limits<int64_t>::max();
  }
  return product;
}

// A sum of sizes; stays at the largest int64, too.
constexpr int64_t Sum(std::initializer_list<int64_t> sizes) {
  int64_t sum = 0;
  for (int64_t size : sizes) {
    if (__builtin_add_overflow(sum, size, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

}  // namespace packax
