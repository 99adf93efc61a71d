#include "ffi/bias.h"

#include <bit>

namespace packax {
namespace {

constexpr int64_t kWords = int64_t{1} << 32;
constexpr int64_t kMostKeys = int64_t{1} << 24;  // offsets in a tile of 64 rows have 32 bits

ffi::Error ReadArray(const Shape& s, const ffi::AnyBuffer& bias, BiasParams* p) {
  PACKAX_TRY(ExpectRank("bias", bias, 4, "(1 or batch, 1 or heads, 1 or q_len, kv_len)"));
  const Axis axes[] = {{"batch", s.batch}, {"heads", s.heads}, {"q_len", s.q_len}};
  int32_t* const sizes[] = {&p->batch, &p->heads, &p->rows};
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t size = bias.dimensions()[axis];
    PACKAX_CHECK(size == 1 || size == axes[axis].size, kInvalidArgument)
        << "bias has " << size << " entries along axis " << axis << ", expected 1 or "
        << axes[axis].name << ", " << axes[axis].size;
    *sizes[axis] = static_cast<int32_t>(size);
    if (size > 1) p->bias_axes |= 1 << axis;
  }
  const bool wide = bias.element_type() == ffi::DataType::F32;
  PACKAX_TRY(
      Expect("bias", bias, wide ? ffi::DataType::F32 : s.dtype,
             {{"batch", p->batch}, {"heads", p->heads}, {"q_len", p->rows}, {"kv_len", s.kv_len}}));
  PACKAX_CHECK(p->rows == 1 || s.kv_len <= kMostKeys, kUnimplemented)
      << "bias has rows of " << s.kv_len << " keys, there are kernels for " << kMostKeys
      << " at most";
  p->bias = bias.untyped_data();
  p->bias_kind = wide ? 2 : 1;
  return ffi::Error::Success();
}

}  // namespace

ffi::Error ReadBias(const Shape& s, const BiasOperands& o, BiasParams* p) {
  if (!Absent(o.bias)) PACKAX_TRY(ReadArray(s, o.bias, p));
  PACKAX_CHECK(o.dropout_threshold >= 0 && o.dropout_threshold < kWords, kInvalidArgument)
      << "attribute dropout_threshold is " << o.dropout_threshold << ", expected 0 to "
      << kWords - 1;
  if (o.dropout_threshold == 0) return ffi::Error::Success();
  PACKAX_TRY(Expect("dropout_streams", o.dropout_streams, ffi::DataType::U32,
                    {{"batch", s.batch}, {"heads", s.heads}, {"words", 4}}));
  PACKAX_TRY(ExpectRank("dropout_rows", o.dropout_rows, 2, "(1 or batch, q_len)"));
  const int64_t rows_batch = o.dropout_rows.dimensions()[0];
  PACKAX_CHECK(rows_batch == 1 || rows_batch == s.batch, kInvalidArgument)
      << "dropout_rows has " << rows_batch << " rows (axis 0), expected 1 or the batch, "
      << s.batch;
  PACKAX_TRY(Expect("dropout_rows", o.dropout_rows, ffi::DataType::S32,
                    {{"batch", rows_batch}, {"q_len", s.q_len}}));
  p->dropout_streams = o.dropout_streams.untyped_data();
  p->dropout_rows = o.dropout_rows.untyped_data();
  p->dropout_rows_batch = static_cast<int32_t>(rows_batch);
  p->dropout_threshold = std::bit_cast<int32_t>(static_cast<uint32_t>(o.dropout_threshold));
  // As inverse_keep of python/packax/_src/ops/dropout.py.
  p->inverse_keep = static_cast<float>(
      1.0 / (1.0 - static_cast<double>(o.dropout_threshold) / static_cast<double>(kWords)));
  return ffi::Error::Success();
}

ffi::Error CheckBiasGradient(const ffi::AnyBuffer& bias, const ffi::AnyBuffer& dbias) {
  PACKAX_CHECK(!Absent(bias), kInvalidArgument) << "dbias is there, but bias is absent";
  const auto sizes = bias.dimensions();
  return Expect(
      "dbias", dbias, bias.element_type(),
      {{"batch", sizes[0]}, {"heads", sizes[1]}, {"q_len", sizes[2]}, {"kv_len", sizes[3]}});
}

}  // namespace packax
