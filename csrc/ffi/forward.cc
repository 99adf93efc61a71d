// packax_forward_v1 and _v2: check the buffers, find the kernel, fill its arguments, launch.
//
// Sizes come from the buffers; attributes hold only what no buffer says.

#include "launch/forward_sm90.h"
#include "launch/portable.h"

namespace packax {
namespace {

// In the order of ForwardSignature.
struct ForwardOperands {
  ffi::AnyBuffer query, key, value;
  ffi::AnyBuffer q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, q_order_192;
  ffi::AnyBuffer block_mask, q_block_lists, scales, slopes, q_bias_pos, kv_bias_pos, out_before;
  ffi::Result<ffi::AnyBuffer> out, lse, row_max, counter;
  float scale, soft_cap;
  int32_t segment_check, q_block, kv_block, bias_of_indices, float32_products, first_head, heads;
};

struct ForwardBiasOperands {
  BiasOperands added;
  ForwardOperands forward;
};

ffi::Error RunForward(Stream stream, ForwardOperands o, const BiasOperands* added) {
  std::optional<AttentionCall> attention;
  PACKAX_TRY(ReadAttention(o, o.q_block_lists, added, &attention));
  const Shape& s = attention->shape;
  PACKAX_TRY(Expect("q_order_192", o.q_order_192, ffi::DataType::S32,
                    {{"mask_batch", s.mask_batch}, {"ceil(q_len/192)", s.q_tiles_192()}}));
  PACKAX_TRY(ExpectRows("out", *o.out, s, {"v_dim", s.v_dim}));
  PACKAX_TRY(CheckBefore("out", o.out_before, *o.out));
  PACKAX_TRY(ExpectLse(*o.lse, s, attention->bias.any()));
  const bool needs_row_max = !Absent(*o.row_max);
  if (needs_row_max) PACKAX_TRY(ExpectSums("row_max", *o.row_max, s));
  PACKAX_TRY(Expect("counter", *o.counter, ffi::DataType::S32, {{"words", 1}}));
  if (s.batch == 0) return ffi::Error::Success();

  const ForwardCall call{*attention, o.query, o.key,      o.value,    o.q_order_192,
                         *o.out,     *o.lse,  *o.row_max, *o.counter, needs_row_max};
  Device* device;
  PACKAX_TRY(CurrentDevice(&device));
  bool found;
  PACKAX_TRY(ForwardOnSm90(device, stream, call, &found));
  return found ? ffi::Error::Success() : ForwardPortable(device, stream, call);
}

constexpr auto Forward = [](Stream stream, const auto&... operands) {
  return RunForward(stream, ForwardOperands{operands...}, nullptr);
};

constexpr auto ForwardBias = [](Stream stream, const auto&... operands) {
  const ForwardBiasOperands o{operands...};
  return RunForward(stream, o.forward, &o.added);
};

template <typename Binding>
auto ForwardSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // query: (batch, q_len, row_heads, qk_dim)
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
      .template Arg<ffi::AnyBuffer>()  // block_mask: (1 or mask_batch, 1 or heads, rows of blocks,
                                       //   words) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // q_block_lists: (mask_batch, heads of block_mask,
                                       //   ceil(q_len/128), 2 + ceil(kv_len/64)) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // scales: (1 or batch) float32; or absent
      .template Arg<ffi::AnyBuffer>()  // slopes: (1 or batch, heads) float32; or absent
      .template Arg<ffi::AnyBuffer>()  // q_bias_pos: (1 or batch, q_len) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // kv_bias_pos: (1 or batch, kv_len) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // out_before: out, of the same memory; or absent
      .template Ret<ffi::AnyBuffer>()  // out: (batch, q_len, row_heads, v_dim)
      .template Ret<ffi::AnyBuffer>()  // lse: (batch, heads, q_len) float32; with a bias or
                                       //   dropout (batch, heads, q_len, 2)
      .template Ret<ffi::AnyBuffer>()  // row_max: (batch, heads, q_len) float32; or absent
      .template Ret<ffi::AnyBuffer>()  // counter: (1,) int32; workspace
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<int32_t>("segment_check")
      .template Attr<int32_t>("q_block")
      .template Attr<int32_t>("kv_block")
      .template Attr<int32_t>("bias_of_indices")
      .template Attr<int32_t>("float32_products")
      .template Attr<int32_t>("first_head")
      .template Attr<int32_t>("heads");
}

template <typename Binding>
auto ForwardBiasSignature(Binding&& binding) {
  return ForwardSignature(
      std::forward<Binding>(binding)
          .template Arg<ffi::AnyBuffer>()  // bias: (1 or batch, 1 or heads, 1 or q_len, kv_len), of
                                           //   query's type or float32; or absent
          .template Arg<ffi::AnyBuffer>()  // dropout_streams: (batch, heads, 4) uint32; or absent
          .template Arg<ffi::AnyBuffer>()  // dropout_rows: (1 or batch, q_len) int32; or absent
          .template Attr<int64_t>("dropout_threshold"));
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
    packax_forward_v2_initialize,
    (packax::Initialize<packax::Target::kForwardBias, packax::ForwardBias>()),
    packax::ForwardBiasSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_forward_v2_execute,
    (packax::Execute<packax::Target::kForwardBias, packax::ForwardBias>()),
    packax::ForwardBiasSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
