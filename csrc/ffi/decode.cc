// packax_decode_v1: a few new rows of every sequence over its cache, the keys split over the GPU.
//
// Two kernels: `decode` leaves float32 sums of every share of the keys in the workspace,
// `decode_combine` merges them. How many shares is chosen here, of those that the workspace holds;
// which sequences have them, the programs may work out on the device.
// A kernel is compiled for head dims of its own and serves all multiples of 8 up to them.

#include <cmath>

#include "ffi/shape.h"

namespace packax {
namespace {

constexpr int64_t kMaxRows = 16;           // new rows of a sequence
constexpr int64_t kFewRows = 16;           // of a group, in one tile of `decode` (table.py)
constexpr int64_t kShare = 128;            // keys: below, a program costs more than its keys
constexpr int64_t kBalancedShare = 1024;   // keys: splitting that far is free, if rows are few
constexpr int64_t kMostDealt = 64;         // sequences, as many as a program of `decode` looks at
constexpr int64_t kPerMultiprocessor = 2;  // programs, for which the tiles leave shared memory
constexpr double kGoodEnough = 0.95;       // of the best share of time in which all have work

struct DecodeShape {
  ffi::DataType dtype;
  bool exact;  // products of float32 operands; otherwise TF32
  int32_t batch, q_len, heads, kv_heads, qk_dim, v_dim;
  int32_t kv_len;                         // keys that a sequence has room for
  int32_t pages, page_size, table_width;  // 0 and unused where the cache is not paged
  int32_t sink_batch, room;               // room: shares that the workspace holds

  int64_t rows() const { return int64_t{q_len} * (heads / kv_heads); }
  Dtype kernel_dtype() const {
    if (dtype == ffi::DataType::F32) return exact ? Dtype::kF32 : Dtype::kTf32;
    return dtype == ffi::DataType::BF16 ? Dtype::kBf16 : Dtype::kF16;
  }
  // Merging multiplies nothing: one kernel for both precisions.
  Dtype merged_dtype() const { return dtype == ffi::DataType::F32 ? Dtype::kF32 : kernel_dtype(); }
};

struct DecodeCall {
  DecodeShape shape;
  ffi::AnyBuffer query, key, value, q_lo, q_hi, block_table, sinks, out, lse, partial, sums;
  float scale, soft_cap;
  int32_t has_sinks;
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
                     const ffi::AnyBuffer& block_table, int32_t paged, DecodeShape* s) {
  const auto key_sizes = key.dimensions();
  PACKAX_TRY(ToInt32("kv_heads (key axis 2)", key_sizes[2], 1, kMaxHeads, &s->kv_heads));
  PACKAX_CHECK(s->heads % s->kv_heads == 0, kInvalidArgument)
      << "query has " << s->heads << " heads, expected a multiple of the " << s->kv_heads
      << " heads of key and value";
  Axis first{"batch", s->batch}, second{"kv_len", key_sizes[1]};
  s->pages = s->page_size = s->table_width = 0;
  if (paged == 0) {
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
  PACKAX_TRY(ExpectAttribute("has_sinks", c.has_sinks, 1));
  s->sink_batch = 1;
  if (c.has_sinks == 1) {
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

// The smallest compiled pair of head dims that has room for these, or these themselves, of which
// Prepare() then says that there is no kernel.
void RoomyDims(const Device& device, const DecodeShape& s, int64_t* qk_dim, int64_t* v_dim) {
  const Variant* best = nullptr;
  for (const Variant& v : Variants()) {
    if (v.kernel != Kernel::kDecode || v.dtype != s.kernel_dtype()) continue;
    if (v.cc / 10 != device.cc / 10 || v.cc > device.cc) continue;
    if (v.qk_dim < s.qk_dim || v.v_dim < s.v_dim) continue;
    if (best == nullptr || v.qk_dim + v.v_dim < best->qk_dim + best->v_dim) best = &v;
  }
  *qk_dim = best == nullptr ? s.qk_dim : best->qk_dim;
  *v_dim = best == nullptr ? s.v_dim : best->v_dim;
}

struct Shares {
  int64_t splits;  // of one sequence, at most
  int64_t dealt;   // of all sequences together, to be dealt out by length; 0: all have `splits`
};

// As few shares as keep the multiprocessors almost as busy as any number does. Lengths are known on
// the device only. Where one long sequence among others would pay for more shares, the programs
// work out there which they are of: as many on average, of about the same length. That costs each a
// look at all ranges, so not if there is one sequence or too many: then as many shares as let a
// long one fill the GPU, as long as the sums that they leave are little beside the keys.
Shares ChooseShares(const Device& device, const DecodeShape& s, int64_t tiles, int64_t most) {
  const int64_t at_once = kPerMultiprocessor * device.multiprocessors;
  const int64_t programs = Product({tiles, s.kv_heads, s.batch});
  const int64_t least_share = CeilDiv(s.kv_len, kShare);
  if (most > least_share) most = least_share;
  const auto busy = [&](int64_t splits) {
    const int64_t all = Product({programs, splits});
    return static_cast<double>(all) / static_cast<double>(at_once) /
           static_cast<double>(CeilDiv(all, at_once));
  };
  double best = 0;
  for (int64_t n = 1; n <= most; ++n) best = std::fmax(best, busy(n));
  int64_t splits = 1;
  while (splits < most && busy(splits) < kGoodEnough * best) ++splits;
  int64_t cheap = s.kv_len / (kBalancedShare + 64 * s.rows());
  if (cheap > most) cheap = most;
  if (cheap > 1 && s.batch > 1 && s.batch <= kMostDealt) return {most, splits * s.batch};
  const int64_t alone = CeilDiv(at_once, Product({tiles, s.kv_heads}));
  const int64_t balanced = alone < cheap ? alone : cheap;
  return {splits < balanced ? balanced : splits, 0};
}

template <typename Args>
ffi::Error LaunchShares(const Ready<Args>& decode, Stream stream, const DecodeCall& c,
                        int64_t tiles, const Shares& shares) {
  const DecodeShape& s = c.shape;
  const int64_t places = shares.dealt == 0 ? s.batch * shares.splits : shares.dealt + s.batch;
  return Launch(decode, stream, Grid{Product({tiles, s.kv_heads, places})},
                Args{
                    .query = c.query.untyped_data(),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .q_lo = c.q_lo.untyped_data(),
                    .q_hi = c.q_hi.untyped_data(),
                    .block_table = c.block_table.untyped_data(),
                    .partial = c.partial.untyped_data(),
                    .sums = c.sums.untyped_data(),
                    .scale = c.scale,
                    .soft_cap = c.soft_cap,
                    .batch = s.batch,
                    .q_len = s.q_len,
                    .kv_len = s.kv_len,
                    .pages = s.pages,
                    .page_size = s.page_size,
                    .table_width = s.table_width,
                    .heads = s.heads,
                    .kv_heads = s.kv_heads,
                    .qk_eighths = s.qk_dim / 8,
                    .v_eighths = s.v_dim / 8,
                    .splits = static_cast<int32_t>(shares.splits),
                    .shares = static_cast<int32_t>(shares.dealt),
                });
}

// `Args`: of `decode` or of `decode_tall`, which have the same arguments.
template <typename Args>
ffi::Error Run(Device* device, Stream stream, const DecodeCall& c) {
  const DecodeShape& s = c.shape;
  int64_t qk_dim, v_dim;
  RoomyDims(*device, s, &qk_dim, &v_dim);
  Ready<Args> decode;
  Ready<DecodeCombineArgs> combine;
  PACKAX_TRY(Prepare(device, s.kernel_dtype(), qk_dim, v_dim, &decode));
  PACKAX_TRY(Prepare(device, s.merged_dtype(), qk_dim, v_dim, &combine));
  if (!stream) return ffi::Error::Success();

  const int64_t tiles = CeilDiv(s.rows(), decode.block());
  const int64_t most = s.room < combine.block() ? s.room : combine.block();
  const Shares shares = ChooseShares(*device, s, tiles, most);
  PACKAX_TRY(LaunchShares(decode, stream, c, tiles, shares));
  return Launch(combine, stream, Grid{Product({s.batch, s.q_len, s.heads})},
                DecodeCombineArgs{
                    .partial = c.partial.untyped_data(),
                    .sums = c.sums.untyped_data(),
                    .sinks = c.sinks.untyped_data(),
                    .q_lo = c.q_lo.untyped_data(),
                    .q_hi = c.q_hi.untyped_data(),
                    .out = c.out.untyped_data(),
                    .lse = c.lse.untyped_data(),
                    .has_sinks = c.has_sinks,
                    .batch = s.batch,
                    .sink_batch = s.sink_batch,
                    .q_len = s.q_len,
                    .kv_len = s.kv_len,
                    .heads = s.heads,
                    .v_eighths = s.v_dim / 8,
                    .splits = static_cast<int32_t>(shares.splits),
                });
}

ffi::Error Decode(Stream stream, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                  ffi::AnyBuffer q_lo, ffi::AnyBuffer q_hi, ffi::AnyBuffer block_table,
                  ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> partial,
                  ffi::Result<ffi::AnyBuffer> sums, float scale, float soft_cap, int32_t paged,
                  int32_t has_sinks, int32_t exact) {
  DecodeCall c{{},   query, key,      value, q_lo,  q_hi,     block_table, sinks,
               *out, *lse,  *partial, *sums, scale, soft_cap, has_sinks};
  DecodeShape& s = c.shape;
  PACKAX_TRY(ExpectAttribute("paged", paged, 1));
  PACKAX_TRY(ExpectAttribute("exact", exact, 1));
  s.exact = exact == 1;
  PACKAX_TRY(ExpectRank(
      "key", key, 4,
      paged ? "(pages, page_size, kv_heads, qk_dim)" : "(batch, kv_len, kv_heads, qk_dim)"));
  PACKAX_TRY(ExpectRank(
      "value", value, 4,
      paged ? "(pages, page_size, kv_heads, v_dim)" : "(batch, kv_len, kv_heads, v_dim)"));
  PACKAX_TRY(ReadQuery(query, value, &s));
  PACKAX_TRY(ReadCache(key, value, block_table, paged, &s));
  PACKAX_TRY(CheckRest(c, &s));
  PACKAX_CHECK(s.qk_dim % 8 == 0 && s.v_dim % 8 == 0, kUnimplemented)
      << "no decode kernel for head dims " << s.qk_dim << "x" << s.v_dim
      << " (query and key x value), which must be multiples of 8";
  if (s.batch == 0) return ffi::Error::Success();

  Device* device;
  PACKAX_TRY(CurrentDevice(&device));
  return s.rows() <= kFewRows ? Run<DecodeArgs>(device, stream, c)
                              : Run<DecodeTallArgs>(device, stream, c);
}

template <typename Binding>
auto DecodeSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // query: (batch, q_len, heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // key: (batch, kv_len, kv_heads, qk_dim), or in pages
                                       //   (pages, page_size, kv_heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // value: likewise, with v_dim
      .template Arg<ffi::AnyBuffer>()  // q_lo: (batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_hi: like q_lo
      .template Arg<ffi::AnyBuffer>()  // block_table: (batch, table_width) int32; read if paged
      .template Arg<ffi::AnyBuffer>()  // sinks: (1 or batch, heads) float32; read if has_sinks
      .template Ret<ffi::AnyBuffer>()  // out: (batch, q_len, heads, v_dim)
      .template Ret<ffi::AnyBuffer>()  // lse: (batch, heads, q_len) float32
      .template Ret<ffi::AnyBuffer>()  // partial: (splits, batch, q_len, heads, v_dim) float32;
                                       //   workspace
      .template Ret<ffi::AnyBuffer>()  // sums: (splits, batch, q_len, heads) float32; workspace
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<int32_t>("paged")
      .template Attr<int32_t>("has_sinks")
      .template Attr<int32_t>("exact");
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
