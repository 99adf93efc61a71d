// Saturating arithmetic on sizes, and limits of sizes that kernels count in 32 bits.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace packax {

// The longest sequence: positions and tile ends stay below 2^31.
inline constexpr int64_t kMaxLength = int64_t{1} << 29;
inline constexpr int64_t kMaxInt32 = 2147483647;
inline constexpr int64_t kMaxHeads = 65536;
// The most elements of all heads of a row: offsets in a tile of 192 rows stay below 2^31.
inline constexpr int64_t kMaxHeadsTimesDim = kMaxInt32 / 192;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A product of sizes that saturates at the largest int64 instead of wrapping, so that limit checks
// still catch it.
constexpr int64_t Product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return std::numeric_limits<int64_t>::max();
  }
  return product;
}

// A sum of sizes that saturates in the same way.
constexpr int64_t Sum(std::initializer_list<int64_t> sizes) {
  int64_t sum = 0;
  for (int64_t size : sizes) {
    if (__builtin_add_overflow(sum, size, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

}  // namespace packax
