#include "ffi/operands.h"

#include <limits>

namespace packax {
namespace {

void PrintShape(std::ostream& out, const ffi::AnyBuffer& buffer) {
  out << DtypeText(buffer.element_type()) << "[";
  const char* separator = "";
  for (int64_t size : buffer.dimensions()) {
    out << separator << size;
    separator = ", ";
  }
  out << "]";
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
    default:
      // Types that have no business here; the number is XLA's PrimitiveType.
      return "XLA type " + std::to_string(static_cast<int>(dtype));
  }
}

ffi::Error Expect(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                  std::initializer_list<Axis> axes) {
  if (Matches(buffer, dtype, axes)) [[likely]] {
    return ffi::Error::Success();
  }
  std::ostringstream text;
  text << name << " is ";
  PrintShape(text, buffer);
  text << ", expected " << DtypeText(dtype) << "[";
  const char* separator = "";
  for (const Axis& axis : axes) {
    text << separator << axis.name << "=" << axis.size;
    separator = ", ";
  }
  text << "]";
  return ffi::Error::InvalidArgument(text.str());
}

ffi::Error ExpectRank(const char* name, const ffi::AnyBuffer& buffer, size_t rank,
                      const char* axes) {
  if (buffer.dimensions().size() == rank) [[likely]] {
    return ffi::Error::Success();
  }
  std::ostringstream text;
  text << name << " is ";
  PrintShape(text, buffer);
  text << ", expected " << rank << " axes " << axes;
  return ffi::Error::InvalidArgument(text.str());
}

ffi::Error ToInt32(const char* name, int64_t size, int64_t least, int64_t most, int32_t* out) {
  PACKAX_CHECK(least <= size && size <= most, kInvalidArgument)
      << name << " is " << size << ", expected " << least << " to " << most;
  *out = static_cast<int32_t>(size);
  return ffi::Error::Success();
}

ffi::Error ExpectAttribute(const char* name, int32_t value, int32_t most) {
  PACKAX_CHECK(0 <= value && value <= most, kInvalidArgument)
      << "attribute " << name << " is " << value << ", expected 0 to " << most;
  return ffi::Error::Success();
}

int64_t Product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return std::numeric_limits<int64_t>::max();
  }
  return product;
}

int64_t Sum(std::initializer_list<int64_t> sizes) {
  int64_t sum = 0;
  for (int64_t size : sizes) {
    if (__builtin_add_overflow(sum, size, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

}  // namespace packax
