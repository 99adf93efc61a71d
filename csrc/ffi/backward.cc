// packax_backward_v1 and _v2: check the buffers, find the kernels, fill their arguments, launch
// them in order.
//
// Sizes come from the buffers; attributes hold only what no buffer says.

#include "launch/backward_sm80.h"
#include "launch/backward_sm90.h"
#include "launch/portable.h"

namespace packax {
namespace {

// In the order of BackwardSignature.
struct BackwardOperands {
  ffi::AnyBuffer query, key, value, out, lse, dout, dlse;
  ffi::AnyBuffer q_lo, q_hi, q_ids, kv_ids, q_pos, kv_pos, q_blocks, q_order, kv_blocks, kv_order;
  ffi::AnyBuffer block_mask, q_block_lists, kv_block_lists;
  ffi::AnyBuffer scales, slopes, q_bias_pos, kv_bias_pos, dq_before;
  ffi::Result<ffi::AnyBuffer> dq, dk, dv, score_grads, workspace;
  std::string_view algorithm;
  float scale, soft_cap;
  int32_t segment_check, q_block, kv_block, bias_of_indices, float32_products, needs_grad;
  int32_t first_head, heads;
};

struct BackwardBiasOperands {
  BiasOperands added;
  ffi::Result<ffi::AnyBuffer> dbias;
  BackwardOperands backward;
};

constexpr const char* kAlgorithms[] = {"portable", "sm90_separate", "sm90_fused"};

ffi::Error ReadAlgorithm(std::string_view name, Algorithm* algorithm) {
  for (int i = 0; i < 3; ++i) {
    if (name == kAlgorithms[i]) {
      *algorithm = static_cast<Algorithm>(i);
      return ffi::Error::Success();
    }
  }
  return ErrorBuilder(ffi::ErrorCode::kInvalidArgument)
         << "attribute algorithm is \"" << name
         << "\", expected \"portable\", \"sm90_separate\" or \"sm90_fused\"";
}

ffi::Error CheckWorkspace(const ffi::AnyBuffer& workspace, Algorithm algorithm, const Shape& s) {
  PACKAX_TRY(ExpectRank("workspace", workspace, 1, "(elements)"));
  const int64_t elements = workspace.dimensions()[0], needed = WorkspaceSize(algorithm, s);
  PACKAX_TRY(Expect("workspace", workspace, ffi::DataType::F32, {{"elements", elements}}));
  PACKAX_CHECK(elements == needed, kInvalidArgument)
      << "workspace has " << elements << " elements, expected " << needed << " for algorithm \""
      << kAlgorithms[static_cast<int>(algorithm)] << "\"";
  return ffi::Error::Success();
}

// `added` and `dbias`: null in calls of the first version.
ffi::Error RunBackward(Stream stream, BackwardOperands o, const BiasOperands* added,
                       const ffi::AnyBuffer* dbias) {
  std::optional<AttentionCall> attention;
  PACKAX_TRY(ReadAttention(o, o.kv_block_lists, added, &attention));
  const Shape& s = attention->shape;
  PACKAX_TRY(CheckMaskOfKeys(s, o.kv_blocks, o.kv_order));
  PACKAX_TRY(CheckListsOfKeys(s, attention->block_mask));
  const Axis qk_dim{"qk_dim", s.qk_dim}, v_dim{"v_dim", s.v_dim};
  PACKAX_TRY(ExpectRows("out", o.out, s, v_dim));
  PACKAX_TRY(ExpectLse(o.lse, s, attention->bias.any()));
  PACKAX_TRY(ExpectRows("dout", o.dout, s, v_dim));
  const bool has_dlse = !Absent(o.dlse);
  if (has_dlse) PACKAX_TRY(ExpectSums("dlse", o.dlse, s));
  Algorithm algorithm;
  PACKAX_TRY(ReadAlgorithm(o.algorithm, &algorithm));
  PACKAX_TRY(CheckWorkspace(*o.workspace, algorithm, s));
  // Bit 0: dq, bit 1: dk and dv. What no kernel writes is absent. One kernel of Hopper writes dk
  // and dv whether they are needed or not, and the one of dq the gradients of score parameters.
  PACKAX_TRY(ExpectAttribute("needs_grad", o.needs_grad, 3));
  const bool needs_score_grads = !Absent(*o.score_grads);
  const bool needs_dq = (o.needs_grad & 1) != 0 || needs_score_grads;
  const bool needs_dkv = (o.needs_grad & 2) != 0;
  if (needs_dq) PACKAX_TRY(ExpectRows("dq", *o.dq, s, qk_dim));
  PACKAX_TRY(CheckBefore("dq", o.dq_before, *o.dq));
  if (needs_dkv || algorithm == Algorithm::kSm90Fused) {
    PACKAX_TRY(ExpectKeys("dk", *o.dk, s, qk_dim));
    PACKAX_TRY(ExpectKeys("dv", *o.dv, s, v_dim));
  }
  if (needs_score_grads) {
    PACKAX_TRY(Expect("score_grads", *o.score_grads, ffi::DataType::F32,
                      {{"batch", s.batch}, {"heads", s.heads}, {"params", 2}, {"q_len", s.q_len}}));
  }
  const bool needs_dbias = dbias != nullptr && !Absent(*dbias);
  if (needs_dbias) PACKAX_TRY(CheckBiasGradient(added->bias, *dbias));
  if (s.batch == 0) return ffi::Error::Success();

  const BackwardCall call{*attention,
                          o.query,
                          o.key,
                          o.value,
                          o.out,
                          o.lse,
                          o.dout,
                          o.dlse,
                          o.kv_blocks,
                          o.kv_order,
                          *o.dq,
                          *o.dk,
                          *o.dv,
                          *o.score_grads,
                          *o.workspace,
                          algorithm,
                          has_dlse,
                          needs_dq,
                          needs_dkv,
                          needs_score_grads,
                          needs_dbias ? dbias->untyped_data() : nullptr};
  Device* device;
  PACKAX_TRY(CurrentDevice(&device));
  bool found;
  PACKAX_TRY(BackwardOnSm90(device, stream, call, &found));
  if (!found) PACKAX_TRY(BackwardOnSm80(device, stream, call, &found));
  return found ? ffi::Error::Success() : BackwardPortable(device, stream, call);
}

constexpr auto Backward = [](Stream stream, const auto&... operands) {
  return RunBackward(stream, BackwardOperands{operands...}, nullptr, nullptr);
};

constexpr auto BackwardBias = [](Stream stream, const auto&... operands) {
  BackwardBiasOperands o{operands...};
  return RunBackward(stream, o.backward, &o.added, &*o.dbias);
};

template <typename Binding>
auto BackwardSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // query: (batch, q_len, row_heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // key: (batch, kv_len, kv_heads, qk_dim)
      .template Arg<ffi::AnyBuffer>()  // value: (batch, kv_len, kv_heads, v_dim)
      .template Arg<ffi::AnyBuffer>()  // out: (batch, q_len, row_heads, v_dim)
      .template Arg<ffi::AnyBuffer>()  // lse: (batch, heads, q_len) float32; with a bias or
                                       //   dropout (batch, heads, q_len, 2)
      .template Arg<ffi::AnyBuffer>()  // dout: like out
      .template Arg<ffi::AnyBuffer>()  // dlse: (batch, heads, q_len) float32; or absent
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
      .template Arg<ffi::AnyBuffer>()  // block_mask: as packax_forward_v1; or absent
      .template Arg<ffi::AnyBuffer>()  // q_block_lists: likewise
      .template Arg<ffi::AnyBuffer>()  // kv_block_lists: (mask_batch, heads of block_mask,
                                       //   ceil(kv_len/128), 2 + ceil(q_len/64)) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // scales: (1 or batch) float32; or absent
      .template Arg<ffi::AnyBuffer>()  // slopes: (1 or batch, heads) float32; or absent
      .template Arg<ffi::AnyBuffer>()  // q_bias_pos: (1 or batch, q_len) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // kv_bias_pos: (1 or batch, kv_len) int32; or absent
      .template Arg<ffi::AnyBuffer>()  // dq_before: dq, of the same memory; or absent
      .template Ret<ffi::AnyBuffer>()  // dq: like query; absent where nothing writes it
      .template Ret<ffi::AnyBuffer>()  // dk: like key; likewise
      .template Ret<ffi::AnyBuffer>()  // dv: like value; likewise
      .template Ret<ffi::AnyBuffer>()  // score_grads: (batch, heads, 2, q_len) float32; or absent
      .template Ret<ffi::AnyBuffer>()  // workspace: (elements) float32, as the algorithm needs
      .template Attr<std::string_view>("algorithm")
      .template Attr<float>("scale")
      .template Attr<float>("soft_cap")
      .template Attr<int32_t>("segment_check")
      .template Attr<int32_t>("q_block")
      .template Attr<int32_t>("kv_block")
      .template Attr<int32_t>("bias_of_indices")
      .template Attr<int32_t>("float32_products")
      .template Attr<int32_t>("needs_grad")
      .template Attr<int32_t>("first_head")
      .template Attr<int32_t>("heads");
}

template <typename Binding>
auto BackwardBiasSignature(Binding&& binding) {
  return BackwardSignature(
      std::forward<Binding>(binding)
          .template Arg<ffi::AnyBuffer>()  // bias: as packax_forward_v2; or absent
          .template Arg<ffi::AnyBuffer>()  // dropout_streams: likewise
          .template Arg<ffi::AnyBuffer>()  // dropout_rows: likewise
          .template Attr<int64_t>("dropout_threshold")
          .template Ret<ffi::AnyBuffer>());  // dbias: like bias; absent where nobody asks for it
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
    packax_backward_v2_initialize,
    (packax::Initialize<packax::Target::kBackwardBias, packax::BackwardBias>()),
    packax::BackwardBiasSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_backward_v2_execute,
    (packax::Execute<packax::Target::kBackwardBias, packax::BackwardBias>()),
    packax::BackwardBiasSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
