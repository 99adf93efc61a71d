// Sizes and masks of forward and backward, checked.

#include "ffi/shape.h"

#include <cmath>

namespace packax {

ffi::Error ReadShape(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                     const ffi::AnyBuffer& value, const ffi::AnyBuffer& q_lo, int32_t first_head,
                     int32_t heads, Shape* shape) {
  PACKAX_TRY(ExpectRank("query", query, 4, "(batch, q_len, heads, qk_dim)"));
  PACKAX_TRY(ExpectRank("key", key, 4, "(batch, kv_len, kv_heads, qk_dim)"));
  PACKAX_TRY(ExpectRank("value", value, 4, "(batch, kv_len, kv_heads, v_dim)"));
  PACKAX_TRY(ExpectRank("q_lo", q_lo, 2, "(mask_batch, q_len)"));

  shape->dtype = query.element_type();
  PACKAX_CHECK(shape->dtype == ffi::DataType::BF16 || shape->dtype == ffi::DataType::F16 ||
                   shape->dtype == ffi::DataType::F32,
               kInvalidArgument)
      << "query is " << DtypeText(shape->dtype) << ", expected bfloat16, float16 or float32";
  PACKAX_TRY(ToInt32("batch (query axis 0)", query.dimensions()[0], 0, kMaxInt32, &shape->batch));
  PACKAX_TRY(ToInt32("q_len (query axis 1)", query.dimensions()[1], 1, kMaxLength, &shape->q_len));
  PACKAX_TRY(
      ToInt32("heads (query axis 2)", query.dimensions()[2], 1, kMaxHeads, &shape->row_heads));
  shape->first_head = first_head;
  shape->heads = first_head == 0 && heads == 0 ? shape->row_heads : heads;
  PACKAX_CHECK(shape->heads >= 1 && shape->first_head >= 0 &&
                   shape->first_head <= shape->row_heads - shape->heads,
               kInvalidArgument)
      << "attributes first_head and heads are " << shape->first_head << " and " << shape->heads
      << ", expected some of the query's " << shape->row_heads;
  PACKAX_TRY(ToInt32("qk_dim (query axis 3)", query.dimensions()[3], 1, kMaxInt32, &shape->qk_dim));
  PACKAX_TRY(ToInt32("kv_len (key axis 1)", key.dimensions()[1], 1, kMaxLength, &shape->kv_len));
  PACKAX_TRY(ToInt32("kv_heads (key axis 2)", key.dimensions()[2], 1, kMaxHeads, &shape->kv_heads));
  PACKAX_TRY(ToInt32("v_dim (value axis 3)", value.dimensions()[3], 1, kMaxInt32, &shape->v_dim));
  PACKAX_CHECK(shape->heads % shape->kv_heads == 0, kInvalidArgument)
      << (shape->heads == shape->row_heads ? "query has " : "attribute heads is ") << shape->heads
      << (shape->heads == shape->row_heads ? " heads" : "") << ", expected a multiple of the "
      << shape->kv_heads << " heads of key and value";

  const int64_t mask_batch = q_lo.dimensions()[0];
  PACKAX_CHECK(mask_batch == 1 || mask_batch == shape->batch, kInvalidArgument)
      << "q_lo has " << mask_batch << " rows (axis 0), expected 1 or the batch, " << shape->batch;
  shape->mask_batch = static_cast<int32_t>(mask_batch);

  PACKAX_TRY(Expect("key", key, shape->dtype,
                    {{"batch", shape->batch},
                     {"kv_len", shape->kv_len},
                     {"kv_heads", shape->kv_heads},
                     {"qk_dim", shape->qk_dim}}));
  return Expect("value", value, shape->dtype,
                {{"batch", shape->batch},
                 {"kv_len", shape->kv_len},
                 {"kv_heads", shape->kv_heads},
                 {"v_dim", shape->v_dim}});
}

ffi::Error ReadPrecision(int32_t float32_products, Shape* shape) {
  PACKAX_TRY(ExpectAttribute("float32_products", float32_products, 1));
  shape->float32_products = float32_products == 1;
  return ffi::Error::Success();
}

ffi::Error CheckMask(const Shape& s, const Mask& m) {
  const Axis batch{"mask_batch", s.mask_batch}, q_len{"q_len", s.q_len}, kv_len{"kv_len", s.kv_len};
  PACKAX_TRY(ExpectAttribute("segment_check", m.segment_check, 3));
  PACKAX_TRY(Expect("q_lo", m.q_lo, ffi::DataType::S32, {batch, q_len}));
  PACKAX_TRY(Expect("q_hi", m.q_hi, ffi::DataType::S32, {batch, q_len}));
  if (m.segment_check >= 1) {
    PACKAX_TRY(Expect("q_ids", m.q_ids, ffi::DataType::S32, {batch, q_len}));
    PACKAX_TRY(Expect("kv_ids", m.kv_ids, ffi::DataType::S32, {batch, kv_len}));
  }
  if (m.segment_check == 3) {
    PACKAX_TRY(Expect("q_pos", m.q_pos, ffi::DataType::S32, {batch, {"limits", 2}, q_len}));
  } else if (m.segment_check == 2) {
    PACKAX_TRY(Expect("q_pos", m.q_pos, ffi::DataType::S32, {batch, q_len}));
  }
  if (m.segment_check >= 2) {
    PACKAX_TRY(Expect("kv_pos", m.kv_pos, ffi::DataType::S32, {batch, kv_len}));
  }
  PACKAX_TRY(Expect("q_blocks", m.q_blocks, ffi::DataType::S32,
                    {batch, {"bounds", 5}, {"ceil(q_len/64)", s.q_blocks()}}));
  return Expect("q_order", m.q_order, ffi::DataType::S32,
                {batch, {"ceil(q_len/128)", s.q_tiles()}});
}

ffi::Error CheckMaskOfKeys(const Shape& s, const ffi::AnyBuffer& kv_blocks,
                           const ffi::AnyBuffer& kv_order) {
  const Axis mask_batch{"mask_batch", s.mask_batch};
  PACKAX_TRY(Expect("kv_blocks", kv_blocks, ffi::DataType::S32,
                    {mask_batch, {"bounds", 4}, {"ceil(kv_len/64)", s.kv_blocks()}}));
  return Expect("kv_order", kv_order, ffi::DataType::S32,
                {mask_batch, {"ceil(kv_len/128)", s.kv_tiles()}});
}

ffi::Error CheckScale(float scale) {
  PACKAX_CHECK(std::isfinite(scale) && scale > 0, kInvalidArgument)
      << "attribute scale is " << scale << ", expected a finite number above 0";
  return ffi::Error::Success();
}

ffi::Error ExpectRows(const char* name, const ffi::AnyBuffer& buffer, const Shape& s, Axis dim) {
  return Expect(name, buffer, s.dtype,
                {{"batch", s.batch}, {"q_len", s.q_len}, {"heads", s.row_heads}, dim});
}

ffi::Error ExpectKeys(const char* name, const ffi::AnyBuffer& buffer, const Shape& s, Axis dim) {
  return Expect(name, buffer, s.dtype,
                {{"batch", s.batch}, {"kv_len", s.kv_len}, {"kv_heads", s.kv_heads}, dim});
}

ffi::Error ExpectSums(const char* name, const ffi::AnyBuffer& buffer, const Shape& s) {
  return Expect(name, buffer, ffi::DataType::F32,
                {{"batch", s.batch}, {"heads", s.heads}, {"q_len", s.q_len}});
}

ffi::Error ExpectLse(const ffi::AnyBuffer& lse, const Shape& s, bool in_two) {
  if (!in_two) return ExpectSums("lse", lse, s);
  return Expect("lse", lse, ffi::DataType::F32,
                {{"batch", s.batch}, {"heads", s.heads}, {"q_len", s.q_len}, {"numbers", 2}});
}

Grid QueryGrid(const Shape& s, int block) {
  return {Product({s.heads, s.batch, s.q_tiles(), kTile / block})};
}

Grid KeyGrid(const Shape& s, int block) {
  return {Product({s.kv_heads, s.batch, s.kv_tiles(), kTile / block})};
}

TensorView KeysOf(const char* name, const ffi::AnyBuffer& buffer, const Shape& s) {
  const auto sizes = buffer.dimensions();
  const int64_t row = sizes[2] * sizes[3];
  return {name, buffer.untyped_data(), s.element(), sizes[0], sizes[1], row, row};
}

TensorView RowsOf(const char* name, const ffi::AnyBuffer& buffer, const Shape& s) {
  const auto sizes = buffer.dimensions();
  const int64_t dim = sizes[3];
  return {name,     FirstHead(buffer, s), s.element(),      sizes[0],
          sizes[1], s.heads * dim,        s.row_heads * dim};
}

void* FirstHead(const ffi::AnyBuffer& buffer, const Shape& s) {
  if (s.first_head == 0) return buffer.untyped_data();
  const size_t bytes = ffi::ByteWidth(buffer.element_type());
  return static_cast<char*>(buffer.untyped_data()) + s.first_head * buffer.dimensions()[3] * bytes;
}

ffi::Error CheckBefore(const char* name, const ffi::AnyBuffer& before,
                       const ffi::AnyBuffer& result) {
  if (Absent(before)) return ffi::Error::Success();
  PACKAX_CHECK(before.untyped_data() == result.untyped_data() && !Absent(result), kInvalidArgument)
      << name << "_before is at " << before.untyped_data() << " and " << name << " at "
      << result.untyped_data() << ", expected one place for both";
  return ffi::Error::Success();
}

}  // namespace packax
