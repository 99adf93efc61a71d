// packax_forward_v1, and packax_forward_heads_v1 for some of the heads: check the buffers, find the
// kernel, fill its arguments, launch.
//
// Sizes come from the buffers; attributes hold only what no buffer says.

#include "launch/forward_sm90.h"

namespace packax {
namespace {

ffi::Error LaunchForward(const Ready<ForwardArgs>& forward, Stream stream, const ForwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(forward, stream, QueryGrid(s, forward.block()),
                ForwardArgs{
                    .query = FirstHead(c.query, s),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .out = FirstHead(c.out, s),
                    .lse = c.lse.untyped_data(),
                    PACKAX_MASK_ROWS(m),
                    .q_order = m.q_order.untyped_data(),
                    .scale = c.scale,
                    .element_test = m.element_test,
                    PACKAX_SIZES_OF_ROWS(s),
                });
}

ffi::Error Run(const std::optional<SomeHeads>& some, Stream stream, ffi::AnyBuffer query,
               ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::AnyBuffer q_lo, ffi::AnyBuffer q_hi,
               ffi::AnyBuffer q_ids, ffi::AnyBuffer kv_ids, ffi::AnyBuffer q_pos,
               ffi::AnyBuffer kv_pos, ffi::AnyBuffer q_blocks, ffi::AnyBuffer q_order,
               ffi::AnyBuffer q_order_192, ffi::Result<ffi::AnyBuffer> out,
               ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> counter, float scale,
               int32_t element_test) {
  Shape s;
  PACKAX_TRY(ReadShape(query, key, value, q_lo, &s, false, some));
  const Mask mask{q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, element_test};
  PACKAX_TRY(CheckMask(s, mask));
  PACKAX_TRY(CheckOrder192(s, q_order_192));
  PACKAX_TRY(ExpectRows("out", *out, s, {"v_dim", s.v_dim}));
  PACKAX_TRY(CheckSomeHeads("out", some, *out));
  PACKAX_TRY(ExpectSums("lse", *lse, s));
  PACKAX_TRY(CheckCounter(*counter));
  PACKAX_TRY(CheckScale(scale));
  if (s.batch == 0) return ffi::Error::Success();

  const ForwardCall call{s, mask, query, key, value, q_order_192, *out, *lse, *counter, scale};
  Device* device;
  bool on_sm90;
  PACKAX_TRY(CurrentDevice(&device));
  PACKAX_TRY(ForwardOnSm90(device, stream, call, &on_sm90));
  if (on_sm90) return ffi::Error::Success();
  Ready<ForwardArgs> forward;
  PACKAX_TRY(Prepare(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &forward));
  return stream ? LaunchForward(forward, stream, call) : ffi::Error::Success();
}

constexpr auto Forward = [](Stream stream, auto... operands) {
  return Run(std::nullopt, stream, operands...);
};

constexpr auto ForwardHeads = [](Stream stream, ffi::AnyBuffer out_before, int32_t first_head,
                                 int32_t heads, int32_t begins, auto... operands) {
  return Run(SomeHeads{first_head, heads, begins, out_before}, stream, operands...);
};

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
      .template Arg<ffi::AnyBuffer>()  // q_pos: like q_lo; (mask_batch, 2, q_len) at 3
      .template Arg<ffi::AnyBuffer>()  // kv_pos: like kv_ids
      .template Arg<ffi::AnyBuffer>()  // q_blocks: (mask_batch, 5, ceil(q_len/64)) int32
      .template Arg<ffi::AnyBuffer>()  // q_order: (mask_batch, ceil(q_len/128)) int32
      .template Arg<ffi::AnyBuffer>()  // q_order_192: (mask_batch, ceil(q_len/192)) int32
      .template Ret<ffi::AnyBuffer>()  // out: (batch, q_len, heads, v_dim)
      .template Ret<ffi::AnyBuffer>()  // lse: (batch, heads, q_len) float32
      .template Ret<ffi::AnyBuffer>()  // counter: (1,) int32; workspace
      .template Attr<float>("scale")
      .template Attr<int32_t>("element_test");
}

template <typename Binding>
auto ForwardHeadsSignature(Binding&& binding) {
  return ForwardSignature(std::forward<Binding>(binding)
                              .template Arg<ffi::AnyBuffer>()  // out_before: out, if not begins
                              .template Attr<int32_t>("first_head")
                              .template Attr<int32_t>("heads")
                              .template Attr<int32_t>("begins"));
}

}  // namespace
}  // namespace packax

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_forward_initialize, (packax::Initialize<packax::Target::kForward, packax::Forward>()),
    packax::ForwardSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_forward_execute, (packax::Execute<packax::Target::kForward, packax::Forward>()),
    packax::ForwardSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_forward_heads_initialize,
    (packax::Initialize<packax::Target::kForwardHeads, packax::ForwardHeads>()),
    packax::ForwardHeadsSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_forward_heads_execute,
    (packax::Execute<packax::Target::kForwardHeads, packax::ForwardHeads>()),
    packax::ForwardHeadsSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
