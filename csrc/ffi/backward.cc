// packax_backward_v1: checks the buffers, then runs the kernels of the call.
//
// Sizes come from the buffers; attributes hold only what cannot be derived from the buffers.

#include "ffi/attention.h"
#include "launch/select.h"

namespace packax {
namespace {

ffi::Error ReadAlgorithm(std::string_view name, Algorithm* algorithm) {
  for (int i = 0; i < 3; ++i) {
    if (name == kAlgorithmNames[i]) {
      *algorithm = static_cast<Algorithm>(i);
      return ffi::Error::Success();
    }
  }
  return ErrorBuilder(ffi::ErrorCode::kInvalidArgument)
         << "attribute algorithm is \"" << name
         << "\", expected \"portable\", \"sm90_separate\" or \"sm90_fused\"";
}

// The mask arrays that only dK and dV need.
ffi::Error ReadMaskOfKeys(const BackwardBuffers& b, BackwardOperands* o) {
  const Axis mask_batch{"mask_batch", o->mask_batch};
  PACKAX_TRY(Expect("kv_blocks", b.kv_blocks, ffi::DataType::S32,
                    {mask_batch, {"bounds", 4}, {"ceil(kv_len/64)", CeilDiv(o->kv_len, kBlock)}}));
  PACKAX_TRY(Expect("kv_order", b.kv_order, ffi::DataType::S32,
                    {mask_batch, {"ceil(kv_len/128)", o->kv_tiles()}}));
  if (o->block_mask_heads > 0) {
    PACKAX_TRY(Expect("kv_block_lists", b.kv_block_lists, ffi::DataType::S32,
                      {mask_batch,
                       {"block_mask_heads", o->block_mask_heads},
                       {"ceil(kv_len/128)", o->kv_tiles()},
                       {"2+ceil(q_len/64)", 2 + CeilDiv(o->q_len, kBlock)}}));
  }
  return ffi::Error::Success();
}

// Splits the workspace into sections of 4-byte elements, each aligned to 256 bytes: delta and lse2
// (batch, heads, padded) float32, lo and hi (mask_batch, padded) int32, with a bias also top (like
// delta), then the sum of dQ (batch, heads, padded, columns) float32, or the counter of the
// separate kernels, in 64 elements if the sums of the bias gradient follow it, any number of them.
// The portable kernels use only delta, with q_len rows per head.
ffi::Error ReadWorkspace(const ffi::AnyBuffer& workspace, BackwardOperands* o) {
  const int64_t rows = o->padded_rows();
  const int64_t mask_rows = Product({o->mask_batch, kBlock, CeilDiv(o->q_len, kBlock)});
  const int64_t top_rows = o->bias_kind != 0 ? rows : 0;
  const int64_t sections = Sum({rows, rows, mask_rows, mask_rows, top_rows});
  PACKAX_TRY(ExpectRank("workspace", workspace, 1, "(elements)"));
  const int64_t elements = workspace.dimensions()[0];
  // The lowering chose the number of columns, those of the kernels.
  if (rows > 0) o->dq_columns = std::max<int64_t>(o->qk_dim, (elements - sections) / rows);
  const BackwardWorkspace size = o->workspace();
  const int64_t needed =
      Sum({Product({size.of_row, rows}), Product({size.of_mask_row, mask_rows}), size.others});
  PACKAX_TRY(Expect("workspace", workspace, ffi::DataType::F32, {{"elements", elements}}));
  // The lowering chose the number of sums.
  const int64_t sum = Product({o->bias.batch, o->bias.length, o->bias.columns});
  const int64_t rest = elements - Sum({sections, kCounterSize});
  if (o->algorithm == Algorithm::kSm90Separate && sum > 0 && rest > 0 && rest % sum == 0) {
    PACKAX_TRY(ToInt32("sums of dbias in workspace", rest / sum, 1, kMaxInt32, &o->dbias_parts));
  }
  PACKAX_CHECK(elements == needed || o->dbias_parts > 0, kInvalidArgument)
      << "workspace has " << elements << " elements, expected " << needed << " for algorithm \""
      << Name(o->algorithm) << "\"";
  auto* next = static_cast<float*>(workspace.untyped_data());
  const auto line = [](const char* name, const void* data, TensorMapElement element, int64_t n) {
    return TensorView{name, data, element, 1, 1, 1, n, n};
  };
  o->delta = line("delta", next, TensorMapElement::kF32, rows);
  if (o->algorithm == Algorithm::kPortable || rows > kMaxInt32) return ffi::Error::Success();
  o->lse2 = line("lse2", next += rows, TensorMapElement::kF32, rows);
  o->lo = line("lo", next += rows, TensorMapElement::kI32, mask_rows);
  o->hi = line("hi", next += mask_rows, TensorMapElement::kI32, mask_rows);
  o->top = line("top", next += mask_rows, TensorMapElement::kF32, top_rows);
  o->dq_sum = o->counter = next + top_rows;
  o->dbias_sums = next + top_rows + kCounterSize;
  return ffi::Error::Success();
}

// needs_grad: bit 0 for dq, bit 1 for dk and dv. Results that no kernel writes are absent. Fused
// kernels always write dk and dv, and the kernel for dq also writes score_grads.
ffi::Error ReadGradients(BackwardBuffers& b, BackwardOperands* o) {
  const Axis qk_dim{"qk_dim", o->qk_dim}, v_dim{"v_dim", o->v_dim};
  PACKAX_TRY(ExpectAttribute("needs_grad", b.needs_grad, 3));
  o->row_stats = !Absent(*b.score_grads);
  o->has_score_grads = o->row_stats ? 1 : 0;
  o->needs_dq = (b.needs_grad & 1) != 0 || o->row_stats;
  o->needs_dkv = (b.needs_grad & 2) != 0;
  o->needs_dbias = !Absent(*b.dbias);
  if (o->needs_dq) PACKAX_TRY(ExpectRows("dq", *b.dq, *o, qk_dim));
  PACKAX_TRY(CheckInit("dq", b.init, *b.dq));
  if (o->needs_dkv || o->algorithm == Algorithm::kSm90Fused) {
    PACKAX_TRY(ExpectKeys("dk", *b.dk, *o, qk_dim));
    PACKAX_TRY(ExpectKeys("dv", *b.dv, *o, v_dim));
  }
  if (o->row_stats) {
    PACKAX_TRY(
        Expect("score_grads", *b.score_grads, ffi::DataType::F32,
               {{"batch", o->batch}, {"heads", o->heads}, {"params", 2}, {"q_len", o->q_len}}));
  }
  if (!Absent(*b.row_delta)) PACKAX_TRY(ExpectSums("row_delta", *b.row_delta, *o));
  if (o->needs_dbias) {
    PACKAX_CHECK(!Absent(b.bias), kInvalidArgument) << "dbias is there, but bias is absent";
    const auto sizes = b.bias.dimensions();
    PACKAX_TRY(Expect(
        "dbias", *b.dbias, b.bias.element_type(),
        {{"batch", sizes[0]}, {"heads", sizes[1]}, {"q_len", sizes[2]}, {"kv_len", sizes[3]}}));
  }
  if (o->needs_dq) o->dq = RowsOf("dq", *b.dq, *o, o->qk_dim);
  o->dk = KeysOf("dk", *b.dk, *o, o->qk_dim);
  o->dv = KeysOf("dv", *b.dv, *o, o->v_dim);
  o->dbias = o->bias;
  o->dbias.name = "dbias";
  o->dbias.data = b.dbias->untyped_data();
  return ffi::Error::Success();
}

ffi::Error CheckBackward(Stream stream, BackwardBuffers b) {
  BackwardOperands o = {};
  PACKAX_TRY(ReadAttention(b, &o));
  PACKAX_TRY(ReadMaskOfKeys(b, &o));
  PACKAX_TRY(ExpectRows("out", b.out, o, {"v_dim", o.v_dim}));
  PACKAX_TRY(ExpectLse(b.lse, o));
  PACKAX_TRY(ExpectRows("dout", b.dout, o, {"v_dim", o.v_dim}));
  o.has_dlse = Absent(b.dlse) ? 0 : 1;
  if (o.has_dlse != 0) PACKAX_TRY(ExpectSums("dlse", b.dlse, o));
  PACKAX_TRY(ReadAlgorithm(b.algorithm, &o.algorithm));
  PACKAX_TRY(ReadWorkspace(*b.workspace, &o));
  PACKAX_TRY(ReadGradients(b, &o));
  if (o.batch == 0) return ffi::Error::Success();

  Read(b, &o);
  if (Absent(*b.row_delta)) o.row_delta = nullptr;
  o.out = RowsOf("out", b.out, o, o.v_dim);
  o.dout = RowsOf("dout", b.dout, o, o.v_dim);
  return RunBackward(stream, o);
}

}  // namespace
}  // namespace packax

PACKAX_DEFINE_TARGET(backward, Backward, CheckBackward);
