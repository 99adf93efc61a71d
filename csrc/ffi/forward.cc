// packax_forward_v1: checks the buffers, then runs the kernels of the call.
//
// Sizes come from the buffers; attributes hold only what cannot be derived from the buffers.

#include "ffi/attention.h"
#include "launch/select.h"

namespace packax {
namespace {

// In the order of ForwardSignature.
struct ForwardBuffers : AttentionBuffers {
  ffi::AnyBuffer q_order_192, out_init;
  ffi::Result<ffi::AnyBuffer> out, lse, row_max, counter;
};

ffi::Error CheckForward(Stream stream, ForwardBuffers b) {
  ForwardOperands o = {};
  PACKAX_TRY(ReadAttention(b, &o));
  PACKAX_TRY(
      Expect("q_order_192", b.q_order_192, ffi::DataType::S32,
             {{"mask_batch", o.mask_batch}, {"ceil(q_len/192)", CeilDiv(o.q_len, kTile192)}}));
  PACKAX_TRY(ExpectRows("out", *b.out, o, {"v_dim", o.v_dim}));
  PACKAX_TRY(CheckInit("out", b.out_init, *b.out));
  PACKAX_TRY(ExpectLse(*b.lse, o));
  o.row_stats = !Absent(*b.row_max);
  if (o.row_stats) PACKAX_TRY(ExpectSums("row_max", *b.row_max, o));
  PACKAX_TRY(Expect("counter", *b.counter, ffi::DataType::S32, {{"words", 1}}));
  if (o.batch == 0) return ffi::Error::Success();

  o.q_order_192 = b.q_order_192.untyped_data();
  o.out = RowsOf("out", *b.out, o, o.v_dim);
  o.lse = b.lse->untyped_data();
  o.row_max = o.row_stats ? b.row_max->untyped_data() : nullptr;
  o.counter = b.counter->untyped_data();
  return RunForward(stream, o);
}

constexpr auto Forward = [](Stream stream, const auto&... buffers) {
  return CheckForward(stream, {buffers...});
};

template <typename Binding>
auto ForwardSignature(Binding&& binding) {
  return AttentionSignature(std::forward<Binding>(binding))
      .template Arg<ffi::AnyBuffer>()   // q_order_192: (mask_batch, ceil(q_len/192)) int32
      .template Arg<ffi::AnyBuffer>()   // out_init: out, in the same memory; or absent
      .template Ret<ffi::AnyBuffer>()   // out: (batch, q_len, row_heads, v_dim)
      .template Ret<ffi::AnyBuffer>()   // lse: (batch, heads, q_len) float32; with a bias or
                                        //   dropout (batch, heads, q_len, 2)
      .template Ret<ffi::AnyBuffer>()   // row_max: (batch, heads, q_len) float32; or absent
      .template Ret<ffi::AnyBuffer>();  // counter: (1,) int32; workspace
}

}  // namespace
}  // namespace packax

PACKAX_DEFINE_TARGET(forward, kForward, packax::Forward, packax::ForwardSignature);
