// packax_forward_general_v1 and packax_backward_general_v1: what changes scores, maps of blocks,
// and head dims between the compiled ones. As forward.cc and backward.cc, with the fallback
// kernels.
//
// A kernel is compiled for head dims of its own and serves all multiples of 8 up to them. These
// have float32, too. A soft cap, a map or a bias of indices alone has kernels for sm_90a, where all
// else here is as in packax_forward_v1 and packax_backward_v1.

#include <cmath>

#include "launch/backward_sm90.h"
#include "launch/forward_sm90.h"

namespace packax {
namespace {

constexpr int32_t kMultiple = 8;     // of head dims: rows begin at whole 16 bytes
constexpr float kLargestCap = 1024;  // up to which tanh to 4e-7 is enough (sm90/soft_cap.py)

// Numbers and places beside the mask. A buffer that its flag says is not there is never read.
struct Extras {
  ffi::AnyBuffer scales;               // (scales_batch) float32
  ffi::AnyBuffer slopes;               // (bias_batch, heads) float32
  ffi::AnyBuffer q_places, kv_places;  // (bias_batch, q_len), (bias_batch, kv_len) int32
  float scale, soft_cap;
  int32_t scales_batch = 0, bias_batch = 0;  // 1 or batch; 0: not there
  bool of_indices = false;                   // places are indices, and scales hold only `scale`

  // One slope a head, and nothing else that an attribute or the kernel does not know itself.
  bool only_slopes() const { return of_indices && bias_batch == 1 && soft_cap == 0; }
  std::optional<ffi::AnyBuffer> slopes_if_only() const {
    return only_slopes() ? std::optional(slopes) : std::nullopt;
  }
};

// Members of `Args{...}`, as those of attention.h.
#define PACKAX_EXTRAS(e)                                                              \
  .scales = (e).scales.untyped_data(), .slopes = (e).slopes.untyped_data(),           \
  .q_places = (e).q_places.untyped_data(), .kv_places = (e).kv_places.untyped_data(), \
  .scale = (e).scale, .soft_cap = (e).soft_cap
#define PACKAX_GENERAL_SIZES(s, e, b)                                                         \
  .batch = (s).batch, .mask_batch = (s).mask_batch, .scales_batch = (e).scales_batch,         \
  .bias_batch = (e).bias_batch, .map_batch = (b).batch, .map_heads = (b).heads,               \
  .q_block = (b).q_block, .kv_block = (b).kv_block, .q_len = (s).q_len, .kv_len = (s).kv_len, \
  .heads = (s).heads, .kv_heads = (s).kv_heads, .qk_dim = (s).qk_dim, .v_dim = (s).v_dim

ffi::Error ReadBatch(const char* name, const ffi::AnyBuffer& buffer, const Shape& s,
                     int32_t* batch) {
  const int64_t rows = buffer.dimensions()[0];
  PACKAX_CHECK(rows == 1 || rows == s.batch, kInvalidArgument)
      << name << " has " << rows << " rows (axis 0), expected 1 or the batch, " << s.batch;
  *batch = static_cast<int32_t>(rows);
  return ffi::Error::Success();
}

ffi::Error ReadExtras(const Shape& s, int32_t has_scales, int32_t has_bias, Extras* e) {
  for (const auto& [name, dim] : {std::pair{"qk_dim", s.qk_dim}, std::pair{"v_dim", s.v_dim}}) {
    PACKAX_CHECK(dim % kMultiple == 0, kUnimplemented)
        << name << " is " << dim << ", there are kernels for multiples of " << kMultiple;
  }
  PACKAX_TRY(ExpectAttribute("has_scales", has_scales, 1));
  PACKAX_TRY(ExpectAttribute("has_bias", has_bias, 2));
  PACKAX_TRY(CheckScale(e->scale));
  PACKAX_CHECK(std::isfinite(e->soft_cap) && e->soft_cap >= 0, kInvalidArgument)
      << "attribute soft_cap is " << e->soft_cap << ", expected a finite number, 0 for none";
  if (has_scales == 1) {
    PACKAX_TRY(ExpectRank("scales", e->scales, 1, "(scales_batch)"));
    PACKAX_TRY(ReadBatch("scales", e->scales, s, &e->scales_batch));
    PACKAX_TRY(
        Expect("scales", e->scales, ffi::DataType::F32, {{"scales_batch", e->scales_batch}}));
  }
  e->of_indices = has_bias == 2;
  if (has_bias >= 1) {
    PACKAX_TRY(ExpectRank("slopes", e->slopes, 2, "(bias_batch, heads)"));
    PACKAX_TRY(ReadBatch("slopes", e->slopes, s, &e->bias_batch));
    const Axis batch{"bias_batch", e->bias_batch};
    PACKAX_TRY(Expect("slopes", e->slopes, ffi::DataType::F32, {batch, {"heads", s.heads}}));
    PACKAX_TRY(Expect("q_places", e->q_places, ffi::DataType::S32, {batch, {"q_len", s.q_len}}));
    PACKAX_TRY(
        Expect("kv_places", e->kv_places, ffi::DataType::S32, {batch, {"kv_len", s.kv_len}}));
  }
  return ffi::Error::Success();
}

// Whether the kernels for sm_90a can take it: a soft cap, or a map, or slopes, and nothing else.
bool OnSm90(const Extras& e, const BlockMap& b) {
  if (e.only_slopes()) return !b.there();
  if (e.scales_batch > 0 || e.bias_batch > 0) return false;
  if (e.soft_cap == 0) return b.there() && b.shifts();
  return !b.there() && e.soft_cap <= kLargestCap && std::isfinite(e.scale / e.soft_cap);
}

ffi::Error Forward(Stream stream, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                   ffi::AnyBuffer q_lo, ffi::AnyBuffer q_hi, ffi::AnyBuffer q_ids,
                   ffi::AnyBuffer kv_ids, ffi::AnyBuffer q_pos, ffi::AnyBuffer kv_pos,
                   ffi::AnyBuffer q_blocks, ffi::AnyBuffer q_order, ffi::AnyBuffer q_order_192,
                   ffi::AnyBuffer map_bits, ffi::AnyBuffer q_entries, ffi::AnyBuffer scales,
                   ffi::AnyBuffer slopes, ffi::AnyBuffer q_places, ffi::AnyBuffer kv_places,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                   ffi::Result<ffi::AnyBuffer> top, ffi::Result<ffi::AnyBuffer> counter,
                   float scale, float soft_cap, int32_t element_test, int32_t want_top,
                   int32_t has_scales, int32_t has_bias, int32_t q_block, int32_t kv_block,
                   int32_t exact) {
  Shape s;
  PACKAX_TRY(ReadShape(query, key, value, q_lo, &s, /*float32=*/true));
  PACKAX_TRY(ExpectAttribute("exact", exact, 1));
  s.exact = exact == 1;
  const Mask m{q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, element_test};
  PACKAX_TRY(CheckMask(s, m));
  Extras e{scales, slopes, q_places, kv_places, scale, soft_cap};
  PACKAX_TRY(ReadExtras(s, has_scales, has_bias, &e));
  BlockMap b{map_bits, q_entries, q_entries, q_block, kv_block};
  PACKAX_TRY(ReadBlockMap(s, &b));
  PACKAX_TRY(ExpectRows("out", *out, s, {"v_dim", s.v_dim}));
  PACKAX_TRY(ExpectSums("lse", *lse, s));
  PACKAX_TRY(ExpectAttribute("want_top", want_top, 1));
  PACKAX_TRY(ExpectSums("top", *top, s));
  PACKAX_TRY(CheckOrder192(s, q_order_192));
  PACKAX_TRY(CheckCounter(*counter));
  if (s.batch == 0) return ffi::Error::Success();

  Device* device;
  PACKAX_TRY(CurrentDevice(&device));
  if (OnSm90(e, b) && want_top == 0) {
    const ForwardCall call{s,    m,        query, key,      value,        q_order_192,       *out,
                           *lse, *counter, scale, soft_cap, b.if_there(), e.slopes_if_only()};
    bool on_sm90;
    PACKAX_TRY(ForwardOnSm90(device, stream, call, &on_sm90));
    if (on_sm90) return ffi::Error::Success();
  }
  Ready<ForwardFallbackArgs> forward;
  PACKAX_TRY(PrepareCovering(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &forward));
  if (!stream) return ffi::Error::Success();
  return Launch(forward, stream, QueryGrid(s, forward.block()),
                ForwardFallbackArgs{
                    .query = query.untyped_data(),
                    .key = key.untyped_data(),
                    .value = value.untyped_data(),
                    .out = out->untyped_data(),
                    .lse = lse->untyped_data(),
                    .top = top->untyped_data(),
                    PACKAX_MASK_ROWS(m),
                    .q_order = q_order.untyped_data(),
                    .map_bits = map_bits.untyped_data(),
                    .q_entries = q_entries.untyped_data(),
                    PACKAX_EXTRAS(e),
                    .element_test = element_test,
                    PACKAX_GENERAL_SIZES(s, e, b),
                });
}

ffi::Error Backward(Stream stream, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                    ffi::AnyBuffer out, ffi::AnyBuffer lse, ffi::AnyBuffer dout,
                    ffi::AnyBuffer dlse, ffi::AnyBuffer q_lo, ffi::AnyBuffer q_hi,
                    ffi::AnyBuffer q_ids, ffi::AnyBuffer kv_ids, ffi::AnyBuffer q_pos,
                    ffi::AnyBuffer kv_pos, ffi::AnyBuffer q_blocks, ffi::AnyBuffer q_order,
                    ffi::AnyBuffer kv_blocks, ffi::AnyBuffer kv_order, ffi::AnyBuffer map_bits,
                    ffi::AnyBuffer q_entries, ffi::AnyBuffer kv_entries, ffi::AnyBuffer scales,
                    ffi::AnyBuffer slopes, ffi::AnyBuffer q_places, ffi::AnyBuffer kv_places,
                    ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                    ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dnumbers,
                    ffi::Result<ffi::AnyBuffer> workspace, float scale, float soft_cap,
                    int32_t element_test, int32_t has_dlse, int32_t has_dnumbers,
                    int32_t has_scales, int32_t has_bias, int32_t q_block, int32_t kv_block,
                    int32_t exact, int32_t wanted) {
  Shape s;
  PACKAX_TRY(ReadShape(query, key, value, q_lo, &s, /*float32=*/true));
  PACKAX_TRY(ExpectAttribute("exact", exact, 1));
  s.exact = exact == 1;
  const Mask m{q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, element_test};
  PACKAX_TRY(CheckMask(s, m));
  PACKAX_TRY(CheckMaskOfKeys(s, kv_blocks, kv_order));
  const Axis qk_dim{"qk_dim", s.qk_dim}, v_dim{"v_dim", s.v_dim};
  Extras e{scales, slopes, q_places, kv_places, scale, soft_cap};
  PACKAX_TRY(ReadExtras(s, has_scales, has_bias, &e));
  BlockMap b{map_bits, q_entries, kv_entries, q_block, kv_block};
  PACKAX_TRY(ReadBlockMap(s, &b));
  PACKAX_TRY(CheckListsOfKeys(s, b));
  PACKAX_TRY(ExpectRows("out", out, s, v_dim));
  PACKAX_TRY(ExpectSums("lse", lse, s));
  PACKAX_TRY(ExpectRows("dout", dout, s, v_dim));
  PACKAX_TRY(ExpectAttribute("has_dlse", has_dlse, 1));
  if (has_dlse == 1) PACKAX_TRY(ExpectSums("dlse", dlse, s));
  PACKAX_TRY(ExpectAttribute("has_dnumbers", has_dnumbers, 1));
  // Bit 0: dq, bit 1: dk and dv. What no kernel writes has no elements.
  PACKAX_TRY(ExpectAttribute("wanted", wanted, 3));
  const bool want_rows = (wanted & 1) != 0 || has_dnumbers == 1, want_keys = (wanted & 2) != 0;
  PACKAX_TRY(CheckWorkspace(*workspace, s));
  const bool may_be_on_sm90 = OnSm90(e, b) && has_dnumbers == 0;
  const bool fused = may_be_on_sm90 && !b.there() && Sm90Workspace(s).holds_sum(*workspace);
  if (want_rows) PACKAX_TRY(ExpectRows("dq", *dq, s, qk_dim));
  if (want_keys || fused) {
    PACKAX_TRY(ExpectKeys("dk", *dk, s, qk_dim));
    PACKAX_TRY(ExpectKeys("dv", *dv, s, v_dim));
  }
  if (has_dnumbers == 1) {
    PACKAX_TRY(
        Expect("dnumbers", *dnumbers, ffi::DataType::F32,
               {{"batch", s.batch}, {"heads", s.heads}, {"numbers", 2}, {"q_len", s.q_len}}));
  }
  if (s.batch == 0) return ffi::Error::Success();

  // All kernels before the first launch: a missing one must not leave half a backward behind.
  Device* device;
  PACKAX_TRY(CurrentDevice(&device));
  if (may_be_on_sm90) {
    BackwardCall call{s,          m,     query,     key,       value,    out, lse,
                      dout,       dlse,  kv_blocks, kv_order,  *dq,      *dk, *dv,
                      *workspace, scale, has_dlse,  want_rows, want_keys};
    call.soft_cap = soft_cap;
    call.map = b.if_there();
    call.slopes = e.slopes_if_only();
    bool on_sm90;
    PACKAX_TRY(BackwardOnSm90(device, stream, call, &on_sm90));
    if (on_sm90) return ffi::Error::Success();
  }
  Ready<BackwardDeltaFallbackArgs> sums;
  Ready<BackwardDkdvFallbackArgs> keys;
  Ready<BackwardDqFallbackArgs> rows;
  // Of float32, one kernel serves both precisions: it has no products.
  const Dtype dtype = s.dtype == ffi::DataType::F32 ? Dtype::kF32 : s.kernel_dtype();
  PACKAX_TRY(PrepareCovering(device, dtype, s.qk_dim, s.v_dim, &sums));
  PACKAX_TRY(PrepareCovering(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &keys));
  PACKAX_TRY(PrepareCovering(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &rows));
  if (!stream) return ffi::Error::Success();
  PACKAX_TRY(Launch(sums, stream, Grid{Product({CeilDiv(s.q_len, sums.block()), s.heads, s.batch})},
                    BackwardDeltaFallbackArgs{
                        .out = out.untyped_data(),
                        .dout = dout.untyped_data(),
                        .dlse = dlse.untyped_data(),
                        .delta = workspace->untyped_data(),
                        .q_lo = q_lo.untyped_data(),
                        .q_hi = q_hi.untyped_data(),
                        .has_dlse = has_dlse,
                        .batch = s.batch,
                        .mask_batch = s.mask_batch,
                        .q_len = s.q_len,
                        .heads = s.heads,
                        .v_dim = s.v_dim,
                    }));
  if (want_keys) {
    PACKAX_TRY(Launch(keys, stream, KeyGrid(s, keys.block()),
                      BackwardDkdvFallbackArgs{
                          .query = query.untyped_data(),
                          .key = key.untyped_data(),
                          .value = value.untyped_data(),
                          .dout = dout.untyped_data(),
                          .lse = lse.untyped_data(),
                          .delta = workspace->untyped_data(),
                          .dk = dk->untyped_data(),
                          .dv = dv->untyped_data(),
                          PACKAX_MASK_ROWS(m),
                          .kv_blocks = kv_blocks.untyped_data(),
                          .kv_order = kv_order.untyped_data(),
                          .map_bits = map_bits.untyped_data(),
                          .kv_entries = kv_entries.untyped_data(),
                          PACKAX_EXTRAS(e),
                          .element_test = element_test,
                          PACKAX_GENERAL_SIZES(s, e, b),
                      }));
  }
  if (!want_rows) return ffi::Error::Success();
  return Launch(rows, stream, QueryGrid(s, rows.block()),
                BackwardDqFallbackArgs{
                    .query = query.untyped_data(),
                    .key = key.untyped_data(),
                    .value = value.untyped_data(),
                    .dout = dout.untyped_data(),
                    .lse = lse.untyped_data(),
                    .delta = workspace->untyped_data(),
                    .dq = dq->untyped_data(),
                    .dnumbers = dnumbers->untyped_data(),
                    PACKAX_MASK_ROWS(m),
                    .q_order = q_order.untyped_data(),
                    .map_bits = map_bits.untyped_data(),
                    .q_entries = q_entries.untyped_data(),
                    PACKAX_EXTRAS(e),
                    .element_test = element_test,
                    .has_dnumbers = has_dnumbers,
                    PACKAX_GENERAL_SIZES(s, e, b),
                });
}

template <typename Binding>
auto ForwardSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // query: (batch, q_len, heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // key: (batch, kv_len, kv_heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // value: (batch, kv_len, kv_heads, v_dim)
      .template Arg<ffi::AnyBuffer>()  // q_lo: (mask_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_hi: like q_lo
      .template Arg<ffi::AnyBuffer>()  // q_ids: like q_lo
      .template Arg<ffi::AnyBuffer>()  // kv_ids: (mask_batch, kv_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_pos: as packax_forward_v1
      .template Arg<ffi::AnyBuffer>()  // kv_pos: like kv_ids
      .template Arg<ffi::AnyBuffer>()  // q_blocks: (mask_batch, 5, ceil(q_len/64)) int32
      .template Arg<ffi::AnyBuffer>()  // q_order: (mask_batch, ceil(q_len/128)) int32
      .template Arg<ffi::AnyBuffer>()  // q_order_192: (mask_batch, ceil(q_len/192)) int32
      .template Arg<ffi::AnyBuffer>()  // map_bits: (map_batch, map_heads, rows, words) int32
      .template Arg<ffi::AnyBuffer>()  // q_entries: (mask_batch, map_heads, tiles, entries) int32
      .template Arg<ffi::AnyBuffer>()  // scales: (scales_batch) float32
      .template Arg<ffi::AnyBuffer>()  // slopes: (bias_batch, heads) float32
      .template Arg<ffi::AnyBuffer>()  // q_places: (bias_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // kv_places: (bias_batch, kv_len) int32
      .template Ret<ffi::AnyBuffer>()  // out: (batch, q_len, heads, v_dim)
      .template Ret<ffi::AnyBuffer>()  // lse: (batch, heads, q_len) float32
      .template Ret<ffi::AnyBuffer>()  // top: like lse
      .template Ret<ffi::AnyBuffer>()  // counter: (1,) int32; workspace
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<int32_t>("element_test")
      .template Attr<int32_t>("want_top")
      .template Attr<int32_t>("has_scales")
      .template Attr<int32_t>("has_bias")
      .template Attr<int32_t>("q_block")
      .template Attr<int32_t>("kv_block")
      .template Attr<int32_t>("exact");
}

template <typename Binding>
auto BackwardSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // query: (batch, q_len, heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // key: (batch, kv_len, kv_heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // value: (batch, kv_len, kv_heads, v_dim)
      .template Arg<ffi::AnyBuffer>()  // out: (batch, q_len, heads, v_dim)
      .template Arg<ffi::AnyBuffer>()  // lse: (batch, heads, q_len) float32
      .template Arg<ffi::AnyBuffer>()  // dout: like out
      .template Arg<ffi::AnyBuffer>()  // dlse: like lse
      .template Arg<ffi::AnyBuffer>()  // q_lo: (mask_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_hi: like q_lo
      .template Arg<ffi::AnyBuffer>()  // q_ids: like q_lo
      .template Arg<ffi::AnyBuffer>()  // kv_ids: (mask_batch, kv_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_pos: as packax_backward_v1
      .template Arg<ffi::AnyBuffer>()  // kv_pos: like kv_ids
      .template Arg<ffi::AnyBuffer>()  // q_blocks: (mask_batch, 5, ceil(q_len/64)) int32
      .template Arg<ffi::AnyBuffer>()  // q_order: (mask_batch, ceil(q_len/128)) int32
      .template Arg<ffi::AnyBuffer>()  // kv_blocks: (mask_batch, 4, ceil(kv_len/64)) int32
      .template Arg<ffi::AnyBuffer>()  // kv_order: (mask_batch, ceil(kv_len/128)) int32
      .template Arg<ffi::AnyBuffer>()  // map_bits: as packax_forward_general_v1
      .template Arg<ffi::AnyBuffer>()  // q_entries: likewise
      .template Arg<ffi::AnyBuffer>()  // kv_entries: those of tiles of keys
      .template Arg<ffi::AnyBuffer>()  // scales: (scales_batch) float32
      .template Arg<ffi::AnyBuffer>()  // slopes: (bias_batch, heads) float32
      .template Arg<ffi::AnyBuffer>()  // q_places: (bias_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // kv_places: (bias_batch, kv_len) int32
      .template Ret<ffi::AnyBuffer>()  // dq: like query
      .template Ret<ffi::AnyBuffer>()  // dk: like key
      .template Ret<ffi::AnyBuffer>()  // dv: like value
      .template Ret<ffi::AnyBuffer>()  // dnumbers: (batch, heads, 2, q_len) float32
      .template Ret<ffi::AnyBuffer>()  // workspace: (elements) float32, of backward.h
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<int32_t>("element_test")
      .template Attr<int32_t>("has_dlse")
      .template Attr<int32_t>("has_dnumbers")
      .template Attr<int32_t>("has_scales")
      .template Attr<int32_t>("has_bias")
      .template Attr<int32_t>("q_block")
      .template Attr<int32_t>("kv_block")
      .template Attr<int32_t>("exact")
      .template Attr<int32_t>("wanted");
}

}  // namespace
}  // namespace packax

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_forward_general_initialize,
    (packax::Initialize<packax::Target::kForwardGeneral, packax::Forward>()),
    packax::ForwardSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_forward_general_execute,
    (packax::Execute<packax::Target::kForwardGeneral, packax::Forward>()),
    packax::ForwardSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_backward_general_initialize,
    (packax::Initialize<packax::Target::kBackwardGeneral, packax::Backward>()),
    packax::BackwardSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_backward_general_execute,
    (packax::Execute<packax::Target::kBackwardGeneral, packax::Backward>()),
    packax::BackwardSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
