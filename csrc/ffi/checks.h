// Checks of what XLA passes. Errors name the operand, what it is, and what is expected.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "call/sizes.h"
#include "runtime/error.h"
#include "runtime/variants.h"

namespace packax {

// All operands are bound as AnyBuffer, even if the type is fixed: XLA's error for another type
// ("Wrong buffer dtype: expected S32 but got F32", "bad operands at: 3") does not name the operand.

// An expected axis of an operand: its size, and the name of that size.
struct Axis {
  const char* name;
  int64_t size;
};

// "bfloat16", the name in JAX.
std::string DtypeText(ffi::DataType dtype);

// An absent operand arrives with shape (0,) and any type, and is never read. No other operand has
// this shape, except those that are empty because the batch is 0.
inline bool Absent(const ffi::AnyBuffer& buffer) {
  return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0;
}

// Checks that dtype and shape are exactly these.
ffi::Error Expect(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                  std::initializer_list<Axis> axes);

// Checks only the number of axes; `axes` names them, as in "(batch, q_len, heads, qk_dim)".
ffi::Error ExpectRank(const char* name, const ffi::AnyBuffer& buffer, size_t rank,
                      const char* axes);

// The checked cast from XLA's 64-bit sizes to a kernel's 32-bit arguments.
ffi::Error ToInt32(const char* name, int64_t size, int64_t least, int64_t most, int32_t* out);

// Checks that a static attribute is from 0 to `most`.
ffi::Error ExpectAttribute(const char* name, int32_t value, int32_t most);

// The kernels' dtype of `query`, which is one of bfloat16, float16 and float32; and back.
ffi::Error ReadDtype(const ffi::AnyBuffer& query, bool float32_products, Dtype* dtype);
ffi::DataType DataTypeOf(Dtype dtype);

// Checks that axis 0 is 1 or the batch.
ffi::Error ReadBatch(const char* name, const ffi::AnyBuffer& buffer, int32_t batch, int32_t* rows);

ffi::Error CheckSoftCap(float soft_cap);

}  // namespace packax
