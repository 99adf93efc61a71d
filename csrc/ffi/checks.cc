#include "ffi/checks.h"

#include <cmath>

namespace packax {
namespace {

// "int32[2, 300]"
std::string ShapeText(const ffi::AnyBuffer& buffer) {
  std::string text;
  for (int64_t size : buffer.dimensions())
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  return DtypeText(buffer.element_type()) + "[" + text + "]";
}

// "int32[batch=2, q_len=300]"
std::string ShapeText(ffi::DataType dtype, std::initializer_list<Axis> axes) {
  std::string text;
  for (const Axis& axis : axes) {
    text += (text.empty() ? "" : ", ") + std::string(axis.name) + "=" + std::to_string(axis.size);
  }
  return DtypeText(dtype) + "[" + text + "]";
}

bool Matches(const ffi::AnyBuffer& buffer, ffi::DataType dtype, std::initializer_list<Axis> axes) {
  if (buffer.element_type() != dtype || buffer.dimensions().size() != axes.size()) return false;
  const int64_t* size = buffer.dimensions().begin();
  for (const Axis& axis : axes) {
    if (axis.size != *size++) return false;
  }
  return true;
}

}  // namespace

std::string DtypeText(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED:
      return "bool";
    case ffi::DataType::S8:
      return "int8";
    case ffi::DataType::S16:
      return "int16";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::S64:
      return "int64";
    case ffi::DataType::U32:
      return "uint32";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::F64:
      return "float64";
    case ffi::DataType::F8E4M3FN:
      return "float8_e4m3fn";
    default:
      // Never valid here, so the number in XLA's PrimitiveType is enough.
      return "XLA type " + std::to_string(static_cast<int>(dtype));
  }
}

ffi::Error Expect(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                  std::initializer_list<Axis> axes) {
  PACKAX_CHECK(Matches(buffer, dtype, axes), kInvalidArgument)
      << name << " is " << ShapeText(buffer) << ", expected " << ShapeText(dtype, axes);
  return ffi::Error::Success();
}

ffi::Error ExpectRank(const char* name, const ffi::AnyBuffer& buffer, size_t rank,
                      const char* axes) {
  PACKAX_CHECK(buffer.dimensions().size() == rank, kInvalidArgument)
      << name << " is " << ShapeText(buffer) << ", expected " << rank << " axes " << axes;
  return ffi::Error::Success();
}

ffi::Error ToInt32(const char* name, int64_t size, int64_t least, int64_t most, int32_t* out) {
  PACKAX_CHECK(least <= size && size <= most, kInvalidArgument)
      << name << " is " << size << ", expected " << least << " to " << most;
  *out = static_cast<int32_t>(size);
  return ffi::Error::Success();
}

ffi::Error CheckRowSize(int32_t heads, int32_t dim) {
  const int64_t size = int64_t{heads} * dim;
  PACKAX_CHECK(size <= kMaxHeadsTimesDim, kInvalidArgument)
      << "heads * head dim is " << heads << " * " << dim << " = " << size << ", expected at most "
      << kMaxHeadsTimesDim;
  return ffi::Error::Success();
}

ffi::Error ExpectAttribute(const char* name, int32_t value, int32_t most) {
  PACKAX_CHECK(0 <= value && value <= most, kInvalidArgument)
      << "attribute " << name << " is " << value << ", expected 0 to " << most;
  return ffi::Error::Success();
}

ffi::Error ReadDtype(const ffi::AnyBuffer& query, bool float32_products, Dtype* dtype) {
  switch (query.element_type()) {
    case ffi::DataType::BF16:
      *dtype = Dtype::kBf16;
      return ffi::Error::Success();
    case ffi::DataType::F16:
      *dtype = Dtype::kF16;
      return ffi::Error::Success();
    case ffi::DataType::F32:
      *dtype = float32_products ? Dtype::kF32 : Dtype::kTf32;
      return ffi::Error::Success();
    default:
      return ErrorBuilder(ffi::ErrorCode::kInvalidArgument)
             << "query is " << DtypeText(query.element_type())
             << ", expected bfloat16, float16 or float32";
  }
}

ffi::DataType DataTypeOf(Dtype dtype) {
  if (dtype == Dtype::kBf16) return ffi::DataType::BF16;
  return dtype == Dtype::kF16 ? ffi::DataType::F16 : ffi::DataType::F32;
}

ffi::Error ReadBatch(const char* name, const ffi::AnyBuffer& buffer, int32_t batch, int32_t* rows) {
  const int64_t size = buffer.dimensions()[0];
  PACKAX_CHECK(size == 1 || size == batch, kInvalidArgument)
      << name << " has " << size << " rows (axis 0), expected 1 or the batch, " << batch;
  *rows = static_cast<int32_t>(size);
  return ffi::Error::Success();
}

ffi::Error CheckSoftCap(float soft_cap) {
  PACKAX_CHECK(std::isfinite(soft_cap) && soft_cap >= 0, kInvalidArgument)
      << "attribute soft_cap is " << soft_cap << ", expected a finite number, 0 for none";
  return ffi::Error::Success();
}

ffi::Error ReadSinks(const ffi::AnyBuffer& sinks, int32_t batch, int32_t heads,
                     int32_t* sink_batch) {
  *sink_batch = 0;
  if (Absent(sinks)) return ffi::Error::Success();
  PACKAX_TRY(ExpectRank("sinks", sinks, 2, "(1 or batch, heads)"));
  PACKAX_TRY(ReadBatch("sinks", sinks, batch, sink_batch));
  return Expect("sinks", sinks, ffi::DataType::F32,
                {{"sink_batch", *sink_batch}, {"heads", heads}});
}

}  // namespace packax
