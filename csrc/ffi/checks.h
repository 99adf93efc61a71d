// Checks of the buffers and attributes that XLA passes. Errors name the operand, what it is, and
// what is expected.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "call/sizes.h"
#include "runtime/error.h"
#include "runtime/variants.h"

namespace packax {

// All operands are bound as AnyBuffer, even if their dtype is fixed: XLA's error for another dtype
// ("Wrong buffer dtype: expected S32 but got F32", "bad operands at: 3") does not name the operand.

// An expected axis of an operand: the name of its size, and the size.
struct Axis {
  const char* name;
  int64_t size;
};

// The name in JAX, such as "bfloat16".
std::string DtypeText(ffi::DataType dtype);

// An absent operand has the shape (0,) and any dtype, and is never read. No other operand has this
// shape, unless the batch is 0.
inline bool Absent(const ffi::AnyBuffer& buffer) {
  return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0;
}

// Checks the dtype and the shape.
ffi::Error Expect(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                  std::initializer_list<Axis> axes);

// Checks only the number of axes; the error names them, as in "(batch, q_len, heads, qk_dim)".
ffi::Error ExpectRank(const char* name, const ffi::AnyBuffer& buffer, size_t rank,
                      const char* axes);

// Casts a 64-bit size to a 32-bit kernel argument, and checks that it is from `least` to `most`.
ffi::Error ToInt32(const char* name, int64_t size, int64_t least, int64_t most, int32_t* out);

// Checks that kernels can count the elements of all heads of a tile in 32 bits.
ffi::Error CheckRowSize(int32_t heads, int32_t dim);

// Checks that an attribute is from 0 to `most`.
ffi::Error ExpectAttribute(const char* name, int32_t value, int32_t most);

// The kernels' dtype for `query`, which must be bfloat16, float16 or float32, and the inverse.
ffi::Error ReadDtype(const ffi::AnyBuffer& query, bool float32_products, Dtype* dtype);
ffi::DataType DataTypeOf(Dtype dtype);

// Checks that the size of axis 0 is 1 or the batch, and stores it in `rows`.
ffi::Error ReadBatch(const char* name, const ffi::AnyBuffer& buffer, int32_t batch, int32_t* rows);

ffi::Error CheckSoftCap(float soft_cap);

// sinks: (1 or batch, heads) float32; `sink_batch` is the size of axis 0, 0 if absent.
ffi::Error ReadSinks(const ffi::AnyBuffer& sinks, int32_t batch, int32_t heads,
                     int32_t* sink_batch);

}  // namespace packax
