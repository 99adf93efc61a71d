// Checks of sizes, masks and score options for both passes.
//
// Masks arrive in the format of docs/internals/mask_format.md: nothing here depends on the
// expression from which a mask was built.

#include "ffi/attention.h"

#include <algorithm>
#include <cmath>

namespace packax {
namespace {

constexpr int64_t kTwoTo32 = int64_t{1} << 32;
constexpr int64_t kMostKeys = int64_t{1} << 24;  // offsets in 128 rows of a bias fit in 32 bits
constexpr int64_t kMostRowsOfBias = (int64_t{1} << 28) - 1;  // above three bits of bias_axes
constexpr ffi::DataType kS32 = ffi::DataType::S32, kF32 = ffi::DataType::F32;

TensorMapElement ElementOf(ffi::DataType dtype) {
  if (dtype == ffi::DataType::F32) return TensorMapElement::kF32;
  return dtype == ffi::DataType::BF16 ? TensorMapElement::kBf16 : TensorMapElement::kF16;
}

ffi::Error ReadSizes(const AttentionBuffers& b, AttentionOperands* o) {
  const ffi::AnyBuffer &query = b.query, &key = b.key, &value = b.value;
  PACKAX_TRY(ExpectRank("query", query, 4, "(batch, q_len, heads, qk_dim)"));
  PACKAX_TRY(ExpectRank("key", key, 4, "(batch, kv_len, kv_heads, qk_dim)"));
  PACKAX_TRY(ExpectRank("value", value, 4, "(batch, kv_len, kv_heads, v_dim)"));
  PACKAX_TRY(ExpectRank("kv_start", b.kv_start, 2, "(mask_batch, q_len)"));
  PACKAX_TRY(ReadDtype(query, b.float32_products == 1, &o->dtype));
  PACKAX_TRY(ToInt32("batch (query axis 0)", query.dimensions()[0], 0, kMaxInt32, &o->batch));
  PACKAX_TRY(ToInt32("q_len (query axis 1)", query.dimensions()[1], 1, kMaxLength, &o->q_len));
  PACKAX_TRY(ToInt32("heads (query axis 2)", query.dimensions()[2], 1, kMaxHeads, &o->row_heads));
  o->heads = b.first_head == 0 && b.heads == 0 ? o->row_heads : b.heads;
  PACKAX_CHECK(o->heads >= 1 && o->first_head >= 0 && o->first_head <= o->row_heads - o->heads,
               kInvalidArgument)
      << "attributes first_head and heads are " << o->first_head << " and " << o->heads
      << ", expected some of the query's " << o->row_heads;
  PACKAX_TRY(ToInt32("qk_dim (query axis 3)", query.dimensions()[3], 1, kMaxInt32, &o->qk_dim));
  PACKAX_TRY(ToInt32("kv_len (key axis 1)", key.dimensions()[1], 1, kMaxLength, &o->kv_len));
  PACKAX_TRY(ToInt32("kv_heads (key axis 2)", key.dimensions()[2], 1, kMaxHeads, &o->kv_heads));
  PACKAX_TRY(ToInt32("v_dim (value axis 3)", value.dimensions()[3], 1, kMaxInt32, &o->v_dim));
  PACKAX_TRY(CheckRowSize(o->row_heads, std::max(o->qk_dim, o->v_dim)));
  PACKAX_CHECK(o->heads % o->kv_heads == 0, kInvalidArgument)
      << (o->heads == o->row_heads ? "query has " : "attribute heads is ") << o->heads
      << (o->heads == o->row_heads ? " heads" : "") << ", expected a multiple of the "
      << o->kv_heads << " heads of key and value";
  PACKAX_TRY(ReadBatch("kv_start", b.kv_start, o->batch, &o->mask_batch));
  const Axis batch{"batch", o->batch}, kv_len{"kv_len", o->kv_len};
  const Axis kv_heads{"kv_heads", o->kv_heads};
  const ffi::DataType dtype = query.element_type();
  PACKAX_TRY(Expect("key", key, dtype, {batch, kv_len, kv_heads, {"qk_dim", o->qk_dim}}));
  PACKAX_TRY(Expect("value", value, dtype, {batch, kv_len, kv_heads, {"v_dim", o->v_dim}}));
  PACKAX_TRY(ExpectAttribute("float32_products", b.float32_products, 1));
  o->query = RowsOf("query", query, *o, o->qk_dim);
  o->key = KeysOf("key", key, *o, o->qk_dim);
  o->value = KeysOf("value", value, *o, o->v_dim);
  return ffi::Error::Success();
}

ffi::Error ReadMask(const AttentionBuffers& b, AttentionOperands* o) {
  const Axis batch{"mask_batch", o->mask_batch};
  const Axis q_len{"q_len", o->q_len}, kv_len{"kv_len", o->kv_len};
  PACKAX_TRY(ExpectAttribute("mask_mode", b.mask_mode, kBothLimits));
  PACKAX_TRY(Expect("kv_start", b.kv_start, kS32, {batch, q_len}));
  PACKAX_TRY(Expect("kv_end", b.kv_end, kS32, {batch, q_len}));
  if (b.mask_mode >= kIds) {
    PACKAX_TRY(Expect("q_ids", b.q_ids, kS32, {batch, q_len}));
    PACKAX_TRY(Expect("kv_ids", b.kv_ids, kS32, {batch, kv_len}));
  }
  if (b.mask_mode == kBothLimits) {
    PACKAX_TRY(Expect("q_pos", b.q_pos, kS32, {batch, {"limits", 2}, q_len}));
  } else if (b.mask_mode == kUpperLimit) {
    PACKAX_TRY(Expect("q_pos", b.q_pos, kS32, {batch, q_len}));
  }
  if (b.mask_mode >= kUpperLimit) PACKAX_TRY(Expect("kv_pos", b.kv_pos, kS32, {batch, kv_len}));
  PACKAX_TRY(Expect("q_blocks", b.q_blocks, kS32,
                    {batch, {"bounds", 5}, {"ceil(q_len/64)", CeilDiv(o->q_len, kBlock)}}));
  PACKAX_TRY(Expect("q_order", b.q_order, kS32, {batch, {"ceil(q_len/128)", o->q_tiles()}}));
  return ffi::Error::Success();
}

ffi::Error ReadScores(const AttentionBuffers& b, AttentionOperands* o) {
  for (const auto& [name, dim] : {std::pair{"qk_dim", o->qk_dim}, std::pair{"v_dim", o->v_dim}}) {
    PACKAX_CHECK(dim % o->multiple() == 0, kUnimplemented)
        << name << " is " << dim << ", there are kernels for multiples of " << o->multiple();
  }
  PACKAX_CHECK(std::isfinite(b.scale) && b.scale > 0, kInvalidArgument)
      << "attribute scale is " << b.scale << ", expected a finite number above 0";
  PACKAX_TRY(CheckSoftCap(b.soft_cap));
  if (!Absent(b.scales)) {
    PACKAX_TRY(ExpectRank("scales", b.scales, 1, "(scales_batch)"));
    PACKAX_TRY(ReadBatch("scales", b.scales, o->batch, &o->scales_batch));
    PACKAX_TRY(Expect("scales", b.scales, kF32, {{"scales_batch", o->scales_batch}}));
  }
  PACKAX_TRY(ExpectAttribute("bias_of_indices", b.bias_of_indices, 1));
  o->bias_of_indices = b.bias_of_indices == 1;
  if (Absent(b.slopes)) return ffi::Error::Success();
  PACKAX_TRY(ExpectRank("slopes", b.slopes, 2, "(bias_batch, heads)"));
  PACKAX_TRY(ReadBatch("slopes", b.slopes, o->batch, &o->bias_batch));
  const Axis batch{"bias_batch", o->bias_batch};
  PACKAX_TRY(Expect("slopes", b.slopes, kF32, {batch, {"heads", o->heads}}));
  PACKAX_TRY(Expect("q_bias_pos", b.q_bias_pos, kS32, {batch, {"q_len", o->q_len}}));
  return Expect("kv_bias_pos", b.kv_bias_pos, kS32, {batch, {"kv_len", o->kv_len}});
}

ffi::Error ReadBias(const ffi::AnyBuffer& bias, ffi::DataType dtype, AttentionOperands* o) {
  if (Absent(bias)) return ffi::Error::Success();
  PACKAX_TRY(ExpectRank("bias", bias, 4, "(groups, 1 or heads, 1 or q_len, kv_len)"));
  const int64_t groups = bias.dimensions()[0];
  PACKAX_CHECK(groups == 1 || (groups > 0 && o->batch % groups == 0), kInvalidArgument)
      << "bias has " << groups << " entries along axis 0, expected a divisor of batch, "
      << o->batch;
  const int64_t group = o->batch / groups;
  PACKAX_CHECK(group <= kMostRowsOfBias, kUnimplemented)
      << "bias has " << groups << " entries along axis 0 for " << o->batch
      << " rows, there are kernels for " << kMostRowsOfBias << " rows of each at most";
  o->bias_axes = static_cast<int32_t>(group << 3) | (groups > 1 ? 1 : 0);
  const Axis axes[] = {{"batch", groups}, {"heads", o->heads}, {"q_len", o->q_len}};
  for (int axis = 1; axis < 3; ++axis) {
    const int64_t size = bias.dimensions()[axis];
    PACKAX_CHECK(size == 1 || size == axes[axis].size, kInvalidArgument)
        << "bias has " << size << " entries along axis " << axis << ", expected 1 or "
        << axes[axis].name << ", " << axes[axis].size;
    if (size > 1) o->bias_axes |= 1 << axis;
  }
  const bool wide = bias.element_type() == kF32;
  const auto sizes = bias.dimensions();
  PACKAX_TRY(Expect(
      "bias", bias, wide ? kF32 : dtype,
      {{"batch", sizes[0]}, {"heads", sizes[1]}, {"q_len", sizes[2]}, {"kv_len", o->kv_len}}));
  PACKAX_CHECK(sizes[2] == 1 || o->kv_len <= kMostKeys, kUnimplemented)
      << "bias has rows of " << o->kv_len << " keys, there are kernels for " << kMostKeys
      << " at most";
  o->bias = {"bias",
             bias.untyped_data(),
             ElementOf(bias.element_type()),
             sizes[0] * sizes[1],
             1,
             sizes[2],
             o->kv_len,
             o->kv_len};
  o->bias_kind = wide ? 2 : 1;
  return ffi::Error::Success();
}

ffi::Error ReadDropout(const AttentionBuffers& b, AttentionOperands* o) {
  const int64_t threshold = b.dropout_threshold;
  PACKAX_CHECK(threshold >= 0 && threshold < kTwoTo32, kInvalidArgument)
      << "attribute dropout_threshold is " << threshold << ", expected 0 to " << kTwoTo32 - 1;
  if (threshold == 0) return ffi::Error::Success();
  PACKAX_TRY(Expect("dropout_streams", b.dropout_streams, ffi::DataType::U32,
                    {{"batch", o->batch}, {"heads", o->heads}, {"words", 4}}));
  PACKAX_TRY(ExpectRank("dropout_rows", b.dropout_rows, 2, "(1 or batch, q_len)"));
  PACKAX_TRY(ReadBatch("dropout_rows", b.dropout_rows, o->batch, &o->dropout_rows_batch));
  PACKAX_TRY(Expect("dropout_rows", b.dropout_rows, kS32,
                    {{"batch", o->dropout_rows_batch}, {"q_len", o->q_len}}));
  o->dropout_threshold = static_cast<int32_t>(threshold);  // modulo 2^32
  // Equals inverse_keep in python/packax/_src/ops/dropout.py.
  o->inverse_keep = static_cast<float>(
      1.0 / (1.0 - static_cast<double>(threshold) / static_cast<double>(kTwoTo32)));
  return ffi::Error::Success();
}

ffi::Error ReadBlockMask(const AttentionBuffers& b, AttentionOperands* o) {
  PACKAX_CHECK(b.q_block >= 0 && b.kv_block >= 0 && (b.q_block > 0) == (b.kv_block > 0),
               kInvalidArgument)
      << "attributes q_block and kv_block are " << b.q_block << " and " << b.kv_block
      << ", expected both above 0, or both 0 without a block mask";
  if (b.q_block == 0) return ffi::Error::Success();
  o->q_block = b.q_block;
  o->kv_block = b.kv_block;
  PACKAX_TRY(ExpectRank("block_mask", b.block_mask, 4,
                        "(block_mask_batch, block_mask_heads, rows, words)"));
  const int64_t batch = b.block_mask.dimensions()[0], heads = b.block_mask.dimensions()[1];
  PACKAX_CHECK(batch == 1 || batch == o->mask_batch, kInvalidArgument)
      << "block_mask has " << batch << " rows (axis 0), expected 1 or mask_batch, "
      << o->mask_batch;
  PACKAX_CHECK(heads == 1 || heads == o->heads, kInvalidArgument)
      << "block_mask has " << heads << " heads (axis 1), expected 1 or those of the call, "
      << o->heads;
  o->block_mask_batch = static_cast<int32_t>(batch);
  o->block_mask_heads = static_cast<int32_t>(heads);
  PACKAX_TRY(Expect("block_mask", b.block_mask, kS32,
                    {{"block_mask_batch", batch},
                     {"block_mask_heads", heads},
                     {"ceil(q_len/q_block)", CeilDiv(o->q_len, o->q_block)},
                     {"ceil(kv_len/kv_block/32)", CeilDiv(CeilDiv(o->kv_len, o->kv_block), 32)}}));
  return Expect("q_block_lists", b.q_block_lists, kS32,
                {{"mask_batch", o->mask_batch},
                 {"block_mask_heads", heads},
                 {"ceil(q_len/128)", o->q_tiles()},
                 {"2+ceil(kv_len/64)", 2 + CeilDiv(o->kv_len, kBlock)}});
}

}  // namespace

ffi::Error ReadAttention(AttentionBuffers& b, AttentionOperands* o) {
  Read(b, o);
  PACKAX_TRY(ReadSizes(b, o));
  PACKAX_TRY(ReadMask(b, o));
  PACKAX_TRY(ReadScores(b, o));
  PACKAX_TRY(ReadBias(b.bias, b.query.element_type(), o));
  PACKAX_TRY(ReadDropout(b, o));
  return ReadBlockMask(b, o);
}

TensorView RowsOf(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                  int64_t dim) {
  const int64_t skipped =
      o.first_head * dim * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  return {name,
          static_cast<const char*>(buffer.untyped_data()) + skipped,
          ElementOf(buffer.element_type()),
          o.batch,
          o.heads,
          o.q_len,
          dim,
          o.row_heads * dim};
}

TensorView KeysOf(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                  int64_t dim) {
  return {
      name, buffer.untyped_data(), ElementOf(buffer.element_type()), o.batch, o.kv_heads, o.kv_len,
      dim,  o.kv_heads * dim};
}

ffi::Error ExpectRows(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                      Axis dim) {
  return Expect(name, buffer, DataTypeOf(o.dtype),
                {{"batch", o.batch}, {"q_len", o.q_len}, {"heads", o.row_heads}, dim});
}

ffi::Error ExpectKeys(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                      Axis dim) {
  return Expect(name, buffer, DataTypeOf(o.dtype),
                {{"batch", o.batch}, {"kv_len", o.kv_len}, {"kv_heads", o.kv_heads}, dim});
}

ffi::Error ExpectSums(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o) {
  return Expect(name, buffer, kF32, {{"batch", o.batch}, {"heads", o.heads}, {"q_len", o.q_len}});
}

ffi::Error ExpectLse(const ffi::AnyBuffer& lse, const AttentionOperands& o) {
  if (!o.lse_in_two()) return ExpectSums("lse", lse, o);
  return Expect("lse", lse, kF32,
                {{"batch", o.batch}, {"heads", o.heads}, {"q_len", o.q_len}, {"numbers", 2}});
}

ffi::Error CheckInit(const char* name, const ffi::AnyBuffer& init, const ffi::AnyBuffer& result) {
  if (Absent(init)) return ffi::Error::Success();
  PACKAX_CHECK(init.untyped_data() == result.untyped_data() && !Absent(result), kInvalidArgument)
      << "init is at " << init.untyped_data() << " and " << name << " at " << result.untyped_data()
      << ", expected one place for both";
  return ffi::Error::Success();
}

}  // namespace packax
