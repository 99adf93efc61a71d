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

ffi::Error CheckDocuments(Stream stream, DocumentsBuffers b) {
  DocumentsOperands o = {};
  PACKAX_TRY(ExpectRank("q_ids", b.q_ids, 2, "(mask_batch, q_len)"));
  PACKAX_TRY(ExpectRank("kv_ids", b.kv_ids, 2, "(mask_batch, kv_len)"));
  PACKAX_TRY(ToInt32("mask_batch (q_ids axis 0)", b.q_ids.dimensions()[0], 0, kMaxInt32, &o.batch));
  PACKAX_TRY(ToInt32("q_len (q_ids axis 1)", b.q_ids.dimensions()[1], 1, kMaxLength, &o.q_len));
  PACKAX_TRY(ToInt32("kv_len (kv_ids axis 1)", b.kv_ids.dimensions()[1], 1, o.kMaxKeys, &o.kv_len));

  PACKAX_TRY(ExpectAttribute("compare_positions", b.compare_positions, 2));
  const Axis batch{"mask_batch", o.batch}, q{"q_len", o.q_len}, kv{"kv_len", o.kv_len};
  const ffi::DataType s32 = ffi::DataType::S32;
  PACKAX_TRY(Expect("q_ids", b.q_ids, s32, {batch, q}));
  PACKAX_TRY(Expect("kv_ids", b.kv_ids, s32, {batch, kv}));
  if (b.compare_positions == 2) {
    PACKAX_TRY(Expect("q_pos", b.q_pos, s32, {batch, {"limits", 2}, q}));
  } else {
    PACKAX_TRY(Expect("q_pos", b.q_pos, s32, {batch, q}));
  }
  PACKAX_TRY(Expect("kv_pos", b.kv_pos, s32, {batch, kv}));
  PACKAX_TRY(Expect("lo", *b.lo, s32, {batch, q}));
  PACKAX_TRY(Expect("hi", *b.hi, s32, {batch, q}));
  PACKAX_TRY(Expect("segment_checked", *b.segment_checked, s32, {batch, q}));
  PACKAX_TRY(Expect("workspace", *b.workspace, s32, {batch, {"words", o.words()}}));
  if (o.batch == 0) return ffi::Error::Success();

  Read(b, &o);
  o.table_size = static_cast<int32_t>(o.slots());
  o.table_shift = 32 - std::countr_zero(static_cast<uint32_t>(o.table_size));
  o.search_steps = static_cast<int32_t>(std::bit_width(static_cast<uint32_t>(o.kv_len)));
  return RunDocuments(stream, o);
}

ffi::Error CheckBlocks(Stream stream, BlocksBuffers b) {
  BlocksOperands o = {};
  PACKAX_TRY(ExpectRank("kv_start", b.kv_start, 2, "(mask_batch, q_len)"));
  PACKAX_TRY(
      ToInt32("mask_batch (kv_start axis 0)", b.kv_start.dimensions()[0], 0, kMaxInt32, &o.batch));
  PACKAX_TRY(
      ToInt32("q_len (kv_start axis 1)", b.kv_start.dimensions()[1], 1, kMaxLength, &o.q_len));
  PACKAX_TRY(ToInt32("attribute kv_len", b.kv_len, 1, kMaxLength, &o.kv_len));

  const int64_t q_count = CeilDiv(o.q_len, kBlock), kv_count = CeilDiv(o.kv_len, kBlock);
  const int64_t q_tiles = CeilDiv(o.q_len, kTile), kv_tiles = CeilDiv(o.kv_len, kTile);
  const Axis batch{"mask_batch", o.batch}, q{"q_len", o.q_len};
  const ffi::DataType s32 = ffi::DataType::S32;
  PACKAX_TRY(Expect("kv_start", b.kv_start, s32, {batch, q}));
  PACKAX_TRY(Expect("kv_end", b.kv_end, s32, {batch, q}));
  PACKAX_TRY(Expect("segment_checked", b.segment_checked, s32, {batch, q}));
  PACKAX_TRY(
      Expect("q_blocks", *b.q_blocks, s32, {batch, {"bounds", 5}, {"ceil(q_len/64)", q_count}}));
  PACKAX_TRY(Expect("kv_blocks", *b.kv_blocks, s32,
                    {batch, {"bounds", 4}, {"ceil(kv_len/64)", kv_count}}));
  PACKAX_TRY(Expect("q_order", *b.q_order, s32, {batch, {"ceil(q_len/128)", q_tiles}}));
  PACKAX_TRY(Expect("q_order_192", *b.q_order_192, s32,
                    {batch, {"ceil(q_len/192)", CeilDiv(o.q_len, kTile192)}}));
  PACKAX_TRY(Expect("kv_order", *b.kv_order, s32, {batch, {"ceil(kv_len/128)", kv_tiles}}));
  if (o.batch == 0) return ffi::Error::Success();

  Read(b, &o);
  return RunBlocks(stream, o);
}

}  // namespace
}  // namespace packax

PACKAX_DEFINE_TARGET(documents, Documents, CheckDocuments);
PACKAX_DEFINE_TARGET(blocks, Blocks, CheckBlocks);
