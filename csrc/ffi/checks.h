// Checks of what XLA hands over, each in the words of the caller: the operand's name, what it is,
// what it must be.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "call/sizes.h"
#include "runtime/error.h"
#include "runtime/variants.h"

namespace packax {

// All operands are bound as AnyBuffer, also where the type is fixed: what XLA says of another type
// ("Wrong buffer dtype: expected S32 but got F32", "bad operands at: 3") names no operand.

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

// The kernels' dtype of `query`, which is one of bfloat16, float16 and float32; and back.
ffi::Error ReadDtype(const ffi::AnyBuffer& query, bool float32_products, Dtype* dtype);
ffi::DataType DataTypeOf(Dtype dtype);

// Axis 0, which is 1 or the batch.
ffi::Error ReadBatch(const char* name, const ffi::AnyBuffer& buffer, int32_t batch, int32_t* rows);

ffi::Error CheckSoftCap(float soft_cap);

}  // namespace packax
