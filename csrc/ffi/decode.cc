// packax_decode_v1: a few new rows of every sequence over its cache. Checks the buffers, and
// launches (launch/decode.h).

#include "launch/decode.h"

#include <cmath>

namespace packax {
namespace {

constexpr int64_t kMaxRows = 16;  // new rows of a sequence

// In the order of DecodeSignature.
struct DecodeOperands {
  ffi::AnyBuffer query, key, value, q_lo, q_hi, block_table, sinks;
  ffi::Result<ffi::AnyBuffer> out, lse, partial, sums;
  float scale, soft_cap;
  int32_t float32_products;
};

ffi::Error ReadQuery(const ffi::AnyBuffer& query, const ffi::AnyBuffer& value, DecodeShape* s) {
  PACKAX_TRY(ExpectRank("query", query, 4, "(batch, q_len, heads, qk_dim)"));
  s->dtype = query.element_type();
  PACKAX_CHECK(s->dtype == ffi::DataType::BF16 || s->dtype == ffi::DataType::F16 ||
                   s->dtype == ffi::DataType::F32,
               kInvalidArgument)
      << "query is " << DtypeText(s->dtype) << ", expected bfloat16, float16 or float32";
  PACKAX_TRY(ToInt32("batch (query axis 0)", query.dimensions()[0], 0, kMaxInt32, &s->batch));
  PACKAX_TRY(ToInt32("q_len (query axis 1)", query.dimensions()[1], 1, kMaxRows, &s->q_len));
  PACKAX_TRY(ToInt32("heads (query axis 2)", query.dimensions()[2], 1, kMaxHeads, &s->heads));
  PACKAX_TRY(ToInt32("qk_dim (query axis 3)", query.dimensions()[3], 1, kMaxInt32, &s->qk_dim));
  PACKAX_TRY(ToInt32("v_dim (value axis 3)", value.dimensions()[3], 1, kMaxInt32, &s->v_dim));
  return ffi::Error::Success();
}

ffi::Error ReadCache(const ffi::AnyBuffer& key, const ffi::AnyBuffer& value,
                     const ffi::AnyBuffer& block_table, bool paged, DecodeShape* s) {
  const auto key_sizes = key.dimensions();
  PACKAX_TRY(ToInt32("kv_heads (key axis 2)", key_sizes[2], 1, kMaxHeads, &s->kv_heads));
  PACKAX_CHECK(s->heads % s->kv_heads == 0, kInvalidArgument)
      << "query has " << s->heads << " heads, expected a multiple of the " << s->kv_heads
      << " heads of key and value";
  Axis first{"batch", s->batch}, second{"kv_len", key_sizes[1]};
  s->pages = s->page_size = s->table_width = 0;
  if (!paged) {
    PACKAX_TRY(ToInt32("kv_len (key axis 1)", key_sizes[1], 1, kMaxLength, &s->kv_len));
  } else {
    PACKAX_TRY(ExpectRank("block_table", block_table, 2, "(batch, table_width)"));
    const int64_t width = block_table.dimensions()[1];
    PACKAX_TRY(ToInt32("pages (key axis 0)", key_sizes[0], 1, kMaxInt32, &s->pages));
    PACKAX_TRY(ToInt32("page_size (key axis 1)", key_sizes[1], 1, kMaxLength, &s->page_size));
    PACKAX_TRY(ToInt32("table_width (block_table axis 1)", width, 1, kMaxLength, &s->table_width));
    PACKAX_TRY(ToInt32("table_width * page_size", width * s->page_size, 1, kMaxLength, &s->kv_len));
    PACKAX_TRY(Expect("block_table", block_table, ffi::DataType::S32,
                      {{"batch", s->batch}, {"table_width", width}}));
    first = {"pages", s->pages};
    second = {"page_size", s->page_size};
  }
  const Axis kv_heads{"kv_heads", s->kv_heads};
  PACKAX_TRY(Expect("key", key, s->dtype, {first, second, kv_heads, {"qk_dim", s->qk_dim}}));
  return Expect("value", value, s->dtype, {first, second, kv_heads, {"v_dim", s->v_dim}});
}

ffi::Error CheckRest(const DecodeCall& c, DecodeShape* s) {
  const Axis batch{"batch", s->batch}, q_len{"q_len", s->q_len}, heads{"heads", s->heads};
  const Axis v_dim{"v_dim", s->v_dim};
  PACKAX_TRY(Expect("q_lo", c.q_lo, ffi::DataType::S32, {batch, q_len}));
  PACKAX_TRY(Expect("q_hi", c.q_hi, ffi::DataType::S32, {batch, q_len}));
  s->sink_batch = 1;
  if (c.has_sinks) {
    PACKAX_TRY(ExpectRank("sinks", c.sinks, 2, "(1 or batch, heads)"));
    if (c.sinks.dimensions()[0] != 1) s->sink_batch = s->batch;
    PACKAX_TRY(
        Expect("sinks", c.sinks, ffi::DataType::F32, {{"1 or batch", s->sink_batch}, heads}));
  }
  PACKAX_TRY(Expect("out", c.out, s->dtype, {batch, q_len, heads, v_dim}));
  PACKAX_TRY(Expect("lse", c.lse, ffi::DataType::F32, {batch, heads, q_len}));
  PACKAX_TRY(ExpectRank("partial", c.partial, 5, "(splits, batch, q_len, heads, v_dim)"));
  PACKAX_TRY(ToInt32("splits (partial axis 0)", c.partial.dimensions()[0], 1, kMaxInt32, &s->room));
  const Axis splits{"splits", s->room};
  PACKAX_TRY(
      Expect("partial", c.partial, ffi::DataType::F32, {splits, batch, q_len, heads, v_dim}));
  PACKAX_TRY(Expect("sums", c.sums, ffi::DataType::F32, {splits, batch, q_len, heads}));
  PACKAX_CHECK(std::isfinite(c.scale), kInvalidArgument)
      << "attribute scale is " << c.scale << ", expected a finite number";
  PACKAX_CHECK(std::isfinite(c.soft_cap) && c.soft_cap >= 0, kInvalidArgument)
      << "attribute soft_cap is " << c.soft_cap << ", expected a finite number, 0 for none";
  return ffi::Error::Success();
}

ffi::Error RunDecode(Stream stream, DecodeOperands o) {
  DecodeCall c{{},     o.query, o.key,      o.value, o.q_lo,  o.q_hi,     o.block_table,   o.sinks,
               *o.out, *o.lse,  *o.partial, *o.sums, o.scale, o.soft_cap, !Absent(o.sinks)};
  DecodeShape& s = c.shape;
  const bool paged = !Absent(o.block_table);
  PACKAX_TRY(ExpectAttribute("float32_products", o.float32_products, 1));
  s.float32_products = o.float32_products == 1;
  PACKAX_TRY(ExpectRank(
      "key", o.key, 4,
      paged ? "(pages, page_size, kv_heads, qk_dim)" : "(batch, kv_len, kv_heads, qk_dim)"));
  PACKAX_TRY(ExpectRank(
      "value", o.value, 4,
      paged ? "(pages, page_size, kv_heads, v_dim)" : "(batch, kv_len, kv_heads, v_dim)"));
  PACKAX_TRY(ReadQuery(o.query, o.value, &s));
  PACKAX_TRY(ReadCache(o.key, o.value, o.block_table, paged, &s));
  PACKAX_TRY(CheckRest(c, &s));
  PACKAX_CHECK(s.qk_dim % 8 == 0 && s.v_dim % 8 == 0, kUnimplemented)
      << "no decode kernel for head dims " << s.qk_dim << "x" << s.v_dim
      << " (query and key x value), which must be multiples of 8";
  if (s.batch == 0) return ffi::Error::Success();

  Device* device;
  PACKAX_TRY(CurrentDevice(&device));
  return LaunchDecode(device, stream, c);
}

constexpr auto Decode = [](Stream stream, const auto&... operands) {
  return RunDecode(stream, DecodeOperands{operands...});
};

template <typename Binding>
auto DecodeSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // query: (batch, q_len, heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // key: (batch, kv_len, kv_heads, qk_dim), or in pages
                                       //   (pages, page_size, kv_heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // value: likewise, with v_dim
      .template Arg<ffi::AnyBuffer>()  // q_lo: (batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_hi: like q_lo
      .template Arg<ffi::AnyBuffer>()  // block_table: (batch, table_width) int32; absent
                                       //   where the cache is not paged
      .template Arg<ffi::AnyBuffer>()  // sinks: (1 or batch, heads) float32; or absent
      .template Ret<ffi::AnyBuffer>()  // out: (batch, q_len, heads, v_dim)
      .template Ret<ffi::AnyBuffer>()  // lse: (batch, heads, q_len) float32
      .template Ret<ffi::AnyBuffer>()  // partial: (splits, batch, q_len, heads, v_dim) float32;
                                       //   workspace
      .template Ret<ffi::AnyBuffer>()  // sums: (splits, batch, q_len, heads) float32; workspace
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<int32_t>("float32_products");
}

}  // namespace
}  // namespace packax

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_decode_initialize, (packax::Initialize<packax::Target::kDecode, packax::Decode>()),
    packax::DecodeSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_decode_execute, (packax::Execute<packax::Target::kDecode, packax::Decode>()),
    packax::DecodeSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
