// packax_backward_v1, and packax_backward_heads_v1 for some of the heads: check the buffers, find
// the kernels, fill their arguments, launch them in order.
//
// Sizes come from the buffers; attributes hold only what no buffer says.

#include "launch/backward_sm90.h"

namespace packax {
namespace {

struct PortableBackward {
  Ready<BackwardDeltaArgs> sums;
  Ready<BackwardDkdvArgs> keys;
  Ready<BackwardDqArgs> rows;
};

// The workspace begins with delta, (batch, heads, q_len) float32.
ffi::Error LaunchBackward(const PortableBackward& kernels, Stream stream, const BackwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  const auto& [sums, keys, rows] = kernels;
  PACKAX_TRY(Launch(sums, stream, Grid{Product({CeilDiv(s.q_len, sums.block()), s.heads, s.batch})},
                    BackwardDeltaArgs{
                        .out = FirstHead(c.out, s),
                        .dout = FirstHead(c.dout, s),
                        .dlse = c.dlse.untyped_data(),
                        .delta = c.workspace.untyped_data(),
                        .q_lo = m.q_lo.untyped_data(),
                        .q_hi = m.q_hi.untyped_data(),
                        .has_dlse = c.has_dlse,
                        .batch = s.batch,
                        .mask_batch = s.mask_batch,
                        .q_len = s.q_len,
                        .heads = s.heads,
                        .row_heads = s.row_heads,
                    }));
  if (c.want_dkv) {
    PACKAX_TRY(Launch(keys, stream, KeyGrid(s, keys.block()),
                      BackwardDkdvArgs{
                          .query = FirstHead(c.query, s),
                          .key = c.key.untyped_data(),
                          .value = c.value.untyped_data(),
                          .dout = FirstHead(c.dout, s),
                          .lse = c.lse.untyped_data(),
                          .delta = c.workspace.untyped_data(),
                          .dk = c.dk.untyped_data(),
                          .dv = c.dv.untyped_data(),
                          PACKAX_MASK_ROWS(m),
                          .kv_blocks = c.kv_blocks.untyped_data(),
                          .kv_order = c.kv_order.untyped_data(),
                          .scale = c.scale,
                          .element_test = m.element_test,
                          PACKAX_SIZES_OF_ROWS(s),
                      }));
  }
  if (!c.want_dq) return ffi::Error::Success();
  return Launch(rows, stream, QueryGrid(s, rows.block()),
                BackwardDqArgs{
                    .query = FirstHead(c.query, s),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .dout = FirstHead(c.dout, s),
                    .lse = c.lse.untyped_data(),
                    .delta = c.workspace.untyped_data(),
                    .dq = FirstHead(c.dq, s),
                    PACKAX_MASK_ROWS(m),
                    .q_order = m.q_order.untyped_data(),
                    .scale = c.scale,
                    .element_test = m.element_test,
                    PACKAX_SIZES_OF_ROWS(s),
                });
}

ffi::Error Run(const std::optional<SomeHeads>& some, Stream stream, ffi::AnyBuffer query,
               ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::AnyBuffer out, ffi::AnyBuffer lse,
               ffi::AnyBuffer dout, ffi::AnyBuffer dlse, ffi::AnyBuffer q_lo, ffi::AnyBuffer q_hi,
               ffi::AnyBuffer q_ids, ffi::AnyBuffer kv_ids, ffi::AnyBuffer q_pos,
               ffi::AnyBuffer kv_pos, ffi::AnyBuffer q_blocks, ffi::AnyBuffer q_order,
               ffi::AnyBuffer kv_blocks, ffi::AnyBuffer kv_order, ffi::Result<ffi::AnyBuffer> dq,
               ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
               ffi::Result<ffi::AnyBuffer> workspace, float scale, int32_t element_test,
               int32_t has_dlse, int32_t wanted) {
  Shape s;
  PACKAX_TRY(ReadShape(query, key, value, q_lo, &s, false, some));
  const Mask mask{q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, element_test};
  PACKAX_TRY(CheckMask(s, mask));
  PACKAX_TRY(CheckMaskOfKeys(s, kv_blocks, kv_order));
  const Axis qk_dim{"qk_dim", s.qk_dim}, v_dim{"v_dim", s.v_dim};
  PACKAX_TRY(ExpectRows("out", out, s, v_dim));
  PACKAX_TRY(ExpectSums("lse", lse, s));
  PACKAX_TRY(ExpectRows("dout", dout, s, v_dim));
  PACKAX_TRY(ExpectAttribute("has_dlse", has_dlse, 1));
  if (has_dlse == 1) PACKAX_TRY(ExpectSums("dlse", dlse, s));
  PACKAX_TRY(CheckWorkspace(*workspace, s));
  const bool fused = Sm90Workspace(s).holds_sum(*workspace);
  // Bit 0: dq, bit 1: dk and dv. What no kernel writes has no elements.
  PACKAX_TRY(ExpectAttribute("wanted", wanted, 3));
  const bool want_dq = (wanted & 1) != 0, want_dkv = (wanted & 2) != 0;
  if (want_dq) {
    PACKAX_TRY(ExpectRows("dq", *dq, s, qk_dim));
    PACKAX_TRY(CheckSomeHeads("dq", some, *dq));
  }
  if (want_dkv || fused) {
    PACKAX_TRY(ExpectKeys("dk", *dk, s, qk_dim));
    PACKAX_TRY(ExpectKeys("dv", *dv, s, v_dim));
  }
  PACKAX_TRY(CheckScale(scale));
  if (s.batch == 0) return ffi::Error::Success();

  const BackwardCall call{s,          mask,  query,     key,      value,   out, lse,
                          dout,       dlse,  kv_blocks, kv_order, *dq,     *dk, *dv,
                          *workspace, scale, has_dlse,  want_dq,  want_dkv};
  // All kernels before the first launch: a missing one must not leave half a backward behind.
  Device* device;
  PACKAX_TRY(CurrentDevice(&device));
  bool on_sm90;
  PACKAX_TRY(BackwardOnSm90(device, stream, call, &on_sm90));
  if (on_sm90) return ffi::Error::Success();
  PortableBackward portable;
  PACKAX_TRY(Prepare(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &portable.sums));
  PACKAX_TRY(Prepare(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &portable.keys));
  PACKAX_TRY(Prepare(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &portable.rows));
  return stream ? LaunchBackward(portable, stream, call) : ffi::Error::Success();
}

constexpr auto Backward = [](Stream stream, auto... operands) {
  return Run(std::nullopt, stream, operands...);
};

constexpr auto BackwardHeads = [](Stream stream, ffi::AnyBuffer dq_before, int32_t first_head,
                                  int32_t heads, int32_t begins, auto... operands) {
  return Run(SomeHeads{first_head, heads, begins, dq_before}, stream, operands...);
};

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
      .template Arg<ffi::AnyBuffer>()  // q_pos: like q_lo; (mask_batch, 2, q_len) at 3
      .template Arg<ffi::AnyBuffer>()  // kv_pos: like kv_ids
      .template Arg<ffi::AnyBuffer>()  // q_blocks: (mask_batch, 5, ceil(q_len/64)) int32
      .template Arg<ffi::AnyBuffer>()  // q_order: (mask_batch, ceil(q_len/128)) int32
      .template Arg<ffi::AnyBuffer>()  // kv_blocks: (mask_batch, 4, ceil(kv_len/64)) int32
      .template Arg<ffi::AnyBuffer>()  // kv_order: (mask_batch, ceil(kv_len/128)) int32
      .template Ret<ffi::AnyBuffer>()  // dq: like query
      .template Ret<ffi::AnyBuffer>()  // dk: like key
      .template Ret<ffi::AnyBuffer>()  // dv: like value
      .template Ret<ffi::AnyBuffer>()  // workspace: (elements) float32
      .template Attr<float>("scale")
      .template Attr<int32_t>("element_test")
      .template Attr<int32_t>("has_dlse")
      .template Attr<int32_t>("wanted");
}

template <typename Binding>
auto BackwardHeadsSignature(Binding&& binding) {
  return BackwardSignature(std::forward<Binding>(binding)
                               .template Arg<ffi::AnyBuffer>()  // dq_before: dq, if not begins
                               .template Attr<int32_t>("first_head")
                               .template Attr<int32_t>("heads")
                               .template Attr<int32_t>("begins"));
}

}  // namespace
}  // namespace packax

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_backward_initialize, (packax::Initialize<packax::Target::kBackward, packax::Backward>()),
    packax::BackwardSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_backward_execute, (packax::Execute<packax::Target::kBackward, packax::Backward>()),
    packax::BackwardSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_backward_heads_initialize,
    (packax::Initialize<packax::Target::kBackwardHeads, packax::BackwardHeads>()),
    packax::BackwardHeadsSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_backward_heads_execute,
    (packax::Execute<packax::Target::kBackwardHeads, packax::BackwardHeads>()),
    packax::BackwardHeadsSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
