// Checks of what XLA hands over, each in the words of the caller: the operand's name, what it is,
// what it must be.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "runtime/error.h"
#include "runtime/variants.h"

namespace packax {

// All operands are bound as AnyBuffer, also where the type is fixed: what XLA says of another type
// ("Wrong buffer dtype: expected S32 but got F32", "bad operands at: 3") names no operand.

// The longest row: positions and tile ends stay below 2^31.
inline constexpr int64_t kMaxLength = int64_t{1} << 29;
// Offsets in a tile do: 128 rows of so many heads of 256.
inline constexpr int64_t kMaxHeads = 65536;
inline constexpr int64_t kMaxInt32 = 2147483647;

// One axis that an operand must have: expected size, and what that size is called.
struct Axis {
  const char* name;
  int64_t size;
};

// "bfloat16", as JAX says it.
std::string DtypeText(ffi::DataType dtype);

// An operand that is not there comes as shape (0,), of any type, and is never read. Nothing that is
// there has this shape, but for what a batch of 0 makes empty.
inline bool Absent(const ffi::AnyBuffer& buffer) {
  return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0;
}

// dtype and shape are exactly these.
ffi::Error Expect(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                  std::initializer_list<Axis> axes);

// Only the number of axes; `axes` names them, as in "(batch, q_len, heads, qk_dim)".
ffi::Error ExpectRank(const char* name, const ffi::AnyBuffer& buffer, size_t rank,
                      const char* axes);

// The checked cast from XLA's 64-bit sizes to a kernel's 32-bit arguments.
ffi::Error ToInt32(const char* name, int64_t size, int64_t least, int64_t most, int32_t* out);

// A static attribute with few values: `value` is one of 0 .. most.
ffi::Error ExpectAttribute(const char* name, int32_t value, int32_t most);

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A product of sizes; stays at the largest int64 instead of wrapping, so that a limit check still
// sees it.
int64_t Product(std::initializer_list<int64_t> sizes);

// Likewise a sum.
int64_t Sum(std::initializer_list<int64_t> sizes);

}  // namespace packax
