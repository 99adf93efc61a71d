// packax_documents_v1 computes row ranges from ids, packax_blocks_v1 block bounds from row ranges,
// once per step.
//
// Each launches three small kernels one after another on XLA's stream; they pass data on in the
// results and the workspace. docs/internals/mask_format.md describes what they compute.

#include <bit>

#include "ffi/checks.h"
#include "ffi/stages.h"
#include "launch/select.h"

namespace packax {
namespace {

constexpr int64_t kMinTableSize = 1024;
// Keeps five tables with two slots per key below 2^31 elements; for more keys, Python uses XLA.
constexpr int64_t kMaxTableKeys = int64_t{1} << 27;
// Keys per entry of the workspace's last section.
constexpr int64_t kWorkspaceChunk = 1024;

ffi::Error Documents(Stream stream, ffi::AnyBuffer q_ids, ffi::AnyBuffer kv_ids,
                     ffi::AnyBuffer q_pos, ffi::AnyBuffer kv_pos, ffi::Result<ffi::AnyBuffer> lo,
                     ffi::Result<ffi::AnyBuffer> hi, ffi::Result<ffi::AnyBuffer> segment_checked,
                     ffi::Result<ffi::AnyBuffer> workspace, int32_t compare_positions) {
  DocumentsOperands o = {};
  PACKAX_TRY(ExpectRank("q_ids", q_ids, 2, "(mask_batch, q_len)"));
  PACKAX_TRY(ExpectRank("kv_ids", kv_ids, 2, "(mask_batch, kv_len)"));
  PACKAX_TRY(ToInt32("mask_batch (q_ids axis 0)", q_ids.dimensions()[0], 0, kMaxInt32, &o.batch));
  PACKAX_TRY(ToInt32("q_len (q_ids axis 1)", q_ids.dimensions()[1], 1, kMaxLength, &o.q_len));
  PACKAX_TRY(
      ToInt32("kv_len (kv_ids axis 1)", kv_ids.dimensions()[1], 1, kMaxTableKeys, &o.kv_len));

  // A power of two, at least two slots per key.
  const int64_t slots = 2 * static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(o.kv_len)));
  const auto table_size = static_cast<int32_t>(slots > kMinTableSize ? slots : kMinTableSize);
  const int64_t words = 5 * int64_t{table_size} + o.kv_len + CeilDiv(o.kv_len, kWorkspaceChunk);

  PACKAX_TRY(ExpectAttribute("compare_positions", compare_positions, 2));
  const Axis batch{"mask_batch", o.batch}, q{"q_len", o.q_len}, kv{"kv_len", o.kv_len};
  const ffi::DataType s32 = ffi::DataType::S32;
  PACKAX_TRY(Expect("q_ids", q_ids, s32, {batch, q}));
  PACKAX_TRY(Expect("kv_ids", kv_ids, s32, {batch, kv}));
  if (compare_positions == 2) {
    PACKAX_TRY(Expect("q_pos", q_pos, s32, {batch, {"limits", 2}, q}));
  } else {
    PACKAX_TRY(Expect("q_pos", q_pos, s32, {batch, q}));
  }
  PACKAX_TRY(Expect("kv_pos", kv_pos, s32, {batch, kv}));
  PACKAX_TRY(Expect("lo", *lo, s32, {batch, q}));
  PACKAX_TRY(Expect("hi", *hi, s32, {batch, q}));
  PACKAX_TRY(Expect("segment_checked", *segment_checked, s32, {batch, q}));
  PACKAX_TRY(Expect("workspace", *workspace, s32, {batch, {"words", words}}));
  if (o.batch == 0) return ffi::Error::Success();

  o.q_ids = q_ids.untyped_data();
  o.kv_ids = kv_ids.untyped_data();
  o.q_pos = q_pos.untyped_data();
  o.kv_pos = kv_pos.untyped_data();
  o.workspace = workspace->untyped_data();
  o.lo = lo->untyped_data();
  o.hi = hi->untyped_data();
  o.segment_checked = segment_checked->untyped_data();
  o.compare_positions = compare_positions;
  o.table_size = table_size;
  o.table_shift = 32 - std::countr_zero(static_cast<uint32_t>(table_size));
  o.search_steps = static_cast<int32_t>(std::bit_width(static_cast<uint32_t>(o.kv_len)));
  return RunDocuments(stream, o);
}

ffi::Error Blocks(Stream stream, ffi::AnyBuffer kv_start, ffi::AnyBuffer kv_end,
                  ffi::AnyBuffer segment_checked, ffi::Result<ffi::AnyBuffer> q_blocks,
                  ffi::Result<ffi::AnyBuffer> kv_blocks, ffi::Result<ffi::AnyBuffer> q_order,
                  ffi::Result<ffi::AnyBuffer> q_order_192, ffi::Result<ffi::AnyBuffer> kv_order,
                  int64_t kv_len) {
  BlocksOperands o = {};
  PACKAX_TRY(ExpectRank("kv_start", kv_start, 2, "(mask_batch, q_len)"));
  PACKAX_TRY(
      ToInt32("mask_batch (kv_start axis 0)", kv_start.dimensions()[0], 0, kMaxInt32, &o.batch));
  PACKAX_TRY(ToInt32("q_len (kv_start axis 1)", kv_start.dimensions()[1], 1, kMaxLength, &o.q_len));
  PACKAX_TRY(ToInt32("attribute kv_len", kv_len, 1, kMaxLength, &o.kv_len));

  const int64_t q_count = CeilDiv(o.q_len, kBlock), kv_count = CeilDiv(o.kv_len, kBlock);
  const int64_t q_tiles = CeilDiv(o.q_len, kTile), kv_tiles = CeilDiv(o.kv_len, kTile);
  const Axis batch{"mask_batch", o.batch}, q{"q_len", o.q_len};
  const ffi::DataType s32 = ffi::DataType::S32;
  PACKAX_TRY(Expect("kv_start", kv_start, s32, {batch, q}));
  PACKAX_TRY(Expect("kv_end", kv_end, s32, {batch, q}));
  PACKAX_TRY(Expect("segment_checked", segment_checked, s32, {batch, q}));
  PACKAX_TRY(
      Expect("q_blocks", *q_blocks, s32, {batch, {"bounds", 5}, {"ceil(q_len/64)", q_count}}));
  PACKAX_TRY(
      Expect("kv_blocks", *kv_blocks, s32, {batch, {"bounds", 4}, {"ceil(kv_len/64)", kv_count}}));
  PACKAX_TRY(Expect("q_order", *q_order, s32, {batch, {"ceil(q_len/128)", q_tiles}}));
  PACKAX_TRY(Expect("q_order_192", *q_order_192, s32,
                    {batch, {"ceil(q_len/192)", CeilDiv(o.q_len, kTile192)}}));
  PACKAX_TRY(Expect("kv_order", *kv_order, s32, {batch, {"ceil(kv_len/128)", kv_tiles}}));
  if (o.batch == 0) return ffi::Error::Success();

  o.kv_start = kv_start.untyped_data();
  o.kv_end = kv_end.untyped_data();
  o.segment_checked = segment_checked.untyped_data();
  o.q_blocks = q_blocks->untyped_data();
  o.kv_blocks = kv_blocks->untyped_data();
  o.q_order = q_order->untyped_data();
  o.q_order_192 = q_order_192->untyped_data();
  o.kv_order = kv_order->untyped_data();
  return RunBlocks(stream, o);
}

template <typename Binding>
auto DocumentsSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // q_ids: (mask_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // kv_ids: (mask_batch, kv_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_pos: like q_ids, or (mask_batch, 2, q_len) if
                                       //   compare_positions is 2
      .template Arg<ffi::AnyBuffer>()  // kv_pos: like kv_ids
      .template Ret<ffi::AnyBuffer>()  // lo: like q_ids
      .template Ret<ffi::AnyBuffer>()  // hi: like q_ids
      .template Ret<ffi::AnyBuffer>()  // segment_checked: like q_ids
      .template Ret<ffi::AnyBuffer>()  // workspace: (mask_batch, words) int32
      .template Attr<int32_t>("compare_positions");
}

template <typename Binding>
auto BlocksSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // kv_start: (mask_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // kv_end: like kv_start
      .template Arg<ffi::AnyBuffer>()  // segment_checked: like kv_start
      .template Ret<ffi::AnyBuffer>()  // q_blocks: (mask_batch, 5, ceil(q_len/64)) int32
      .template Ret<ffi::AnyBuffer>()  // kv_blocks: (mask_batch, 4, ceil(kv_len/64)) int32
      .template Ret<ffi::AnyBuffer>()  // q_order: (mask_batch, ceil(q_len/128)) int32
      .template Ret<ffi::AnyBuffer>()  // q_order_192: (mask_batch, ceil(q_len/192)) int32
      .template Ret<ffi::AnyBuffer>()  // kv_order: (mask_batch, ceil(kv_len/128)) int32
      .template Attr<int64_t>("kv_len");
}

}  // namespace
}  // namespace packax

PACKAX_DEFINE_TARGET(documents, kDocuments, packax::Documents, packax::DocumentsSignature);
PACKAX_DEFINE_TARGET(blocks, kBlocks, packax::Blocks, packax::BlocksSignature);
