// packax_forward_tangent_v1: checks the buffers, then runs the kernel of the call.
//
// Sizes come from the buffers; attributes hold only what cannot be derived from the buffers.

#include "ffi/attention.h"
#include "launch/select.h"

namespace packax {
namespace {

// In the order of TangentSignature.
struct TangentBuffers : AttentionBuffers {
  ffi::AnyBuffer out, lse, tq, tk, tv;
  ffi::Result<ffi::AnyBuffer> tout, tlse;
};

ffi::Error CheckTangent(Stream stream, TangentBuffers b) {
  TangentOperands o = {};
  PACKAX_TRY(ReadAttention(b, &o));
  PACKAX_CHECK(!o.lse_in_two(), kUnimplemented)
      << "bias or dropout_threshold is given, there are kernels without both";
  PACKAX_CHECK(o.heads == o.row_heads, kUnimplemented)
      << "attributes first_head and heads are " << o.first_head << " and " << o.heads
      << ", there are kernels for all of the query's " << o.row_heads;
  const Axis qk_dim{"qk_dim", o.qk_dim}, v_dim{"v_dim", o.v_dim};
  PACKAX_TRY(ExpectRows("out", b.out, o, v_dim));
  PACKAX_TRY(ExpectLse(b.lse, o));
  o.has_tq = Absent(b.tq) ? 0 : 1;
  o.has_tk = Absent(b.tk) ? 0 : 1;
  o.has_tv = Absent(b.tv) ? 0 : 1;
  if (o.has_tq != 0) PACKAX_TRY(ExpectRows("tq", b.tq, o, qk_dim));
  if (o.has_tk != 0) PACKAX_TRY(ExpectKeys("tk", b.tk, o, qk_dim));
  if (o.has_tv != 0) PACKAX_TRY(ExpectKeys("tv", b.tv, o, v_dim));
  PACKAX_TRY(ExpectRows("tout", *b.tout, o, v_dim));
  PACKAX_TRY(ExpectSums("tlse", *b.tlse, o));
  if (o.batch == 0) return ffi::Error::Success();

  o.out = RowsOf("out", b.out, o, o.v_dim);
  o.lse = b.lse.untyped_data();
  o.tq = b.tq.untyped_data();
  o.tk = b.tk.untyped_data();
  o.tv = b.tv.untyped_data();
  o.tout = b.tout->untyped_data();
  o.tlse = b.tlse->untyped_data();
  return RunTangent(stream, o);
}

constexpr auto Tangent = [](Stream stream, const auto&... buffers) {
  return CheckTangent(stream, {buffers...});
};

template <typename Binding>
auto TangentSignature(Binding&& binding) {
  return AttentionSignature(std::forward<Binding>(binding))
      .template Arg<ffi::AnyBuffer>()   // out: (batch, q_len, heads, v_dim)
      .template Arg<ffi::AnyBuffer>()   // lse: (batch, heads, q_len) float32
      .template Arg<ffi::AnyBuffer>()   // tq: like query; or absent
      .template Arg<ffi::AnyBuffer>()   // tk: like key; or absent
      .template Arg<ffi::AnyBuffer>()   // tv: like value; or absent
      .template Ret<ffi::AnyBuffer>()   // tout: like out
      .template Ret<ffi::AnyBuffer>();  // tlse: like lse
}

}  // namespace
}  // namespace packax

PACKAX_DEFINE_TARGET(forward_tangent, kForwardTangent, packax::Tangent, packax::TangentSignature);
