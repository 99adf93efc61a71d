// Encodes host tensor maps: cuTensorMapEncodeTiled, its limits, and its errors in words.

#include <cstring>
#include <sstream>

#include "runtime/libcuda.h"

namespace packax {
namespace {

// Limits of cuTensorMapEncodeTiled, strides in bytes; it takes sizes up to 2^32, but those that a
// kernel gets beside the map are int32.
constexpr int64_t kMaxMapStride = int64_t{1} << 40;
constexpr int64_t kMapAlignment = 16;
// In maps of tensors whose last element begins below this, drivers up to that version set bit 21 of
// the second word; Triton's and CUTLASS's launchers clear it, and so does this one.
constexpr int64_t kSmallMap = int64_t{128} * 1024;
constexpr int kSmallMapFixed = 13010;

struct MapElement {
  CUtensorMapDataType type;
  int64_t bytes;
  const char* name;
};

MapElement Describe(TensorMapElement element) {
  switch (element) {
    case TensorMapElement::kBf16:
      return {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, "bfloat16"};
    case TensorMapElement::kF16:
      return {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, "float16"};
    case TensorMapElement::kF32:
      return {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, "float32"};
    case TensorMapElement::kI32:
      return {CU_TENSOR_MAP_DATA_TYPE_INT32, 4, "int32"};
  }
  __builtin_unreachable();
}

// "tensor map of query, bfloat16[2, 300, 384] in boxes of 64 x 64, swizzle 3"
std::string MapText(const TensorView& view, const TensorMapBox& box) {
  std::ostringstream out;
  out << "tensor map of " << view.name << ", " << Describe(view.element).name << "[" << view.batch
      << ", " << view.length << ", " << view.columns << "] in boxes of " << box.rows << " x "
      << box.columns << ", swizzle " << box.swizzle;
  return out.str();
}

}  // namespace

ffi::Error CheckTensorMap(const LoadedKernel& kernel, int index, const TensorView& view) {
  const Variant& v = *kernel.variant;
  const TensorMapBox& box = v.tensor_maps[index];
  const int64_t row = view.row * Describe(view.element).bytes;
  PACKAX_CHECK(view.length <= (kMaxMapStride - 1) / row, kInvalidArgument)
      << MapText(view, box) << ": one row of the batch has 2^40 bytes or more; " << v.name;
  PACKAX_CHECK(row % kMapAlignment == 0, kInvalidArgument)
      << MapText(view, box) << ": the " << row << " bytes of a row are no multiple of "
      << kMapAlignment << "; " << v.name;
  PACKAX_CHECK(reinterpret_cast<uintptr_t>(view.data) % kMapAlignment == 0, kInvalidArgument)
      << MapText(view, box) << ": address " << view.data << " is no multiple of " << kMapAlignment
      << "; " << v.name;
  return ffi::Error::Success();
}

ffi::Error EncodeTensorMap(const LoadedKernel& kernel, int index, const TensorView& view,
                           TensorMap* map) {
  PACKAX_TRY(CheckTensorMap(kernel, index, view));
  const Variant& v = *kernel.variant;
  const TensorMapBox& box = v.tensor_maps[index];
  const MapElement element = Describe(view.element);
  const int64_t row = view.row * element.bytes;
  const int64_t matrix = row * view.length;
  const Api* api;
  PACKAX_TRY(GetApi(&api));
  // The driver counts from the innermost axis.
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(view.columns),
                              static_cast<cuuint64_t>(view.length),
                              static_cast<cuuint64_t>(view.batch)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row), static_cast<cuuint64_t>(matrix)};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box.columns),
                              static_cast<cuuint32_t>(box.rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap encoded;
  PACKAX_DRIVER(cuTensorMapEncodeTiled, &encoded, element.type, 3, const_cast<void*>(view.data),
                sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                static_cast<CUtensorMapSwizzle>(box.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
      << "; " << MapText(view, box) << ", address " << view.data << "; "
      << Where(v, *kernel.device);
  // The comparison before it keeps the product small.
  const int64_t last = (view.length - 1) * row + (view.columns - 1) * element.bytes;
  if (kernel.device->driver <= kSmallMapFixed && last + 1 < kSmallMap &&
      (view.batch == 1 ||
       (matrix < kSmallMap && (view.batch - 1) * matrix + last + 1 < kSmallMap))) {
    encoded.opaque[1] &= ~(cuuint64_t{1} << 21);
  }
  static_assert(sizeof(encoded) == sizeof(map->map));
  std::memcpy(map->map, &encoded, sizeof(encoded));
  map->shape[0] = static_cast<int32_t>(view.batch);
  map->shape[1] = static_cast<int32_t>(view.length);
  map->shape[2] = static_cast<int32_t>(view.columns);
  map->strides[0] = view.length * view.row;
  map->strides[1] = view.row;
  map->strides[2] = 1;
  return ffi::Error::Success();
}

}  // namespace packax
