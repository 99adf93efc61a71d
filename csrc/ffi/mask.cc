// packax_documents_v1 and packax_blocks_v1: ids to row ranges, row ranges to block bounds, once per
// step.
//
// Three small kernels each, launched back to back on XLA's stream; what passes between them lies in
// the results and in the workspace. What they compute is in docs/internals/mask_format.md.

#include <bit>

#include "ffi/operands.h"
#include "ffi/stages.h"

namespace packax {
namespace {

constexpr int64_t kMinTableSize = 1024;
// So that five tables of two slots per key stay below 2^31; past it Python takes XLA's twin.
constexpr int64_t kMaxTableKeys = int64_t{1} << 27;
// Keys per entry at the end of the workspace.
constexpr int64_t kWorkspaceChunk = 1024;

struct Rows {
  int32_t batch, q_len, kv_len;

  Axis batch_axis() const { return {"mask_batch", batch}; }
  Axis q_axis() const { return {"q_len", q_len}; }
  Axis kv_axis() const { return {"kv_len", kv_len}; }
};

// Grids put the batch in y.
Grid RowGrid(int64_t count, int block, const Rows& rows) {
  return {CeilDiv(count, block), rows.batch};
}

ffi::Error Documents(Stream stream, ffi::AnyBuffer q_ids, ffi::AnyBuffer kv_ids,
                     ffi::AnyBuffer q_pos, ffi::AnyBuffer kv_pos, ffi::Result<ffi::AnyBuffer> lo,
                     ffi::Result<ffi::AnyBuffer> hi, ffi::Result<ffi::AnyBuffer> segment_checked,
                     ffi::Result<ffi::AnyBuffer> workspace, int32_t compare_positions) {
  Rows r;
  PACKAX_TRY(ExpectRank("q_ids", q_ids, 2, "(mask_batch, q_len)"));
  PACKAX_TRY(ExpectRank("kv_ids", kv_ids, 2, "(mask_batch, kv_len)"));
  PACKAX_TRY(ToInt32("mask_batch (q_ids axis 0)", q_ids.dimensions()[0], 0, kMaxInt32, &r.batch));
  PACKAX_TRY(ToInt32("q_len (q_ids axis 1)", q_ids.dimensions()[1], 1, kMaxLength, &r.q_len));
  PACKAX_TRY(
      ToInt32("kv_len (kv_ids axis 1)", kv_ids.dimensions()[1], 1, kMaxTableKeys, &r.kv_len));

  // Two slots per key at least, a power of two.
  const int64_t slots = 2 * static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(r.kv_len)));
  const auto table_size = static_cast<int32_t>(slots > kMinTableSize ? slots : kMinTableSize);
  const int32_t table_shift = 32 - std::countr_zero(static_cast<uint32_t>(table_size));
  const auto search_steps = static_cast<int32_t>(std::bit_width(static_cast<uint32_t>(r.kv_len)));
  const int64_t words = 5 * int64_t{table_size} + r.kv_len + CeilDiv(r.kv_len, kWorkspaceChunk);

  PACKAX_TRY(ExpectAttribute("compare_positions", compare_positions, 2));
  const ffi::DataType s32 = ffi::DataType::S32;
  PACKAX_TRY(Expect("q_ids", q_ids, s32, {r.batch_axis(), r.q_axis()}));
  PACKAX_TRY(Expect("kv_ids", kv_ids, s32, {r.batch_axis(), r.kv_axis()}));
  if (compare_positions == 2) {
    PACKAX_TRY(Expect("q_pos", q_pos, s32, {r.batch_axis(), {"limits", 2}, r.q_axis()}));
  } else {
    PACKAX_TRY(Expect("q_pos", q_pos, s32, {r.batch_axis(), r.q_axis()}));
  }
  PACKAX_TRY(Expect("kv_pos", kv_pos, s32, {r.batch_axis(), r.kv_axis()}));
  PACKAX_TRY(Expect("lo", *lo, s32, {r.batch_axis(), r.q_axis()}));
  PACKAX_TRY(Expect("hi", *hi, s32, {r.batch_axis(), r.q_axis()}));
  PACKAX_TRY(Expect("segment_checked", *segment_checked, s32, {r.batch_axis(), r.q_axis()}));
  PACKAX_TRY(Expect("workspace", *workspace, s32, {r.batch_axis(), {"words", words}}));
  if (r.batch == 0) return ffi::Error::Success();

  Device* device;
  Ready<DocumentsInitArgs> init;
  Ready<DocumentsRunsArgs> runs;
  Ready<DocumentsRowsArgs> rows;
  PACKAX_TRY(CurrentDevice(&device));
  PACKAX_TRY(Prepare(device, Dtype::kAny, 0, 0, &init));
  PACKAX_TRY(Prepare(device, Dtype::kAny, 0, 0, &runs));
  PACKAX_TRY(Prepare(device, Dtype::kAny, 0, 0, &rows));

  PACKAX_TRY(Launch(init, stream, RowGrid(r.kv_len, init.block(), r),
                    DocumentsInitArgs{
                        .kv_ids = kv_ids.untyped_data(),
                        .workspace = workspace->untyped_data(),
                        .kv_len = r.kv_len,
                        .table_size = table_size,
                    }));
  PACKAX_TRY(Launch(runs, stream, RowGrid(r.kv_len, runs.block(), r),
                    DocumentsRunsArgs{
                        .kv_ids = kv_ids.untyped_data(),
                        .kv_pos = kv_pos.untyped_data(),
                        .workspace = workspace->untyped_data(),
                        .compare_positions = compare_positions,
                        .kv_len = r.kv_len,
                        .table_size = table_size,
                        .table_shift = table_shift,
                    }));
  return Launch(rows, stream, RowGrid(r.q_len, rows.block(), r),
                DocumentsRowsArgs{
                    .q_ids = q_ids.untyped_data(),
                    .kv_ids = kv_ids.untyped_data(),
                    .q_pos = q_pos.untyped_data(),
                    .kv_pos = kv_pos.untyped_data(),
                    .workspace = workspace->untyped_data(),
                    .lo = lo->untyped_data(),
                    .hi = hi->untyped_data(),
                    .segment_checked = segment_checked->untyped_data(),
                    .compare_positions = compare_positions,
                    .q_len = r.q_len,
                    .kv_len = r.kv_len,
                    .table_size = table_size,
                    .table_shift = table_shift,
                    .search_steps = search_steps,
                });
}

ffi::Error Blocks(Stream stream, ffi::AnyBuffer q_lo, ffi::AnyBuffer q_hi,
                  ffi::AnyBuffer segment_checked, ffi::Result<ffi::AnyBuffer> q_blocks,
                  ffi::Result<ffi::AnyBuffer> kv_blocks, ffi::Result<ffi::AnyBuffer> q_order,
                  ffi::Result<ffi::AnyBuffer> q_order_192, ffi::Result<ffi::AnyBuffer> kv_order,
                  int64_t kv_len) {
  Rows r;
  PACKAX_TRY(ExpectRank("q_lo", q_lo, 2, "(mask_batch, q_len)"));
  PACKAX_TRY(ToInt32("mask_batch (q_lo axis 0)", q_lo.dimensions()[0], 0, kMaxInt32, &r.batch));
  PACKAX_TRY(ToInt32("q_len (q_lo axis 1)", q_lo.dimensions()[1], 1, kMaxLength, &r.q_len));
  PACKAX_TRY(ToInt32("attribute kv_len", kv_len, 1, kMaxLength, &r.kv_len));

  const int64_t q_count = CeilDiv(r.q_len, 64), kv_count = CeilDiv(r.kv_len, 64);
  const int64_t q_tiles = CeilDiv(r.q_len, 128), kv_tiles = CeilDiv(r.kv_len, 128);
  const ffi::DataType s32 = ffi::DataType::S32;
  PACKAX_TRY(Expect("q_lo", q_lo, s32, {r.batch_axis(), r.q_axis()}));
  PACKAX_TRY(Expect("q_hi", q_hi, s32, {r.batch_axis(), r.q_axis()}));
  PACKAX_TRY(Expect("segment_checked", segment_checked, s32, {r.batch_axis(), r.q_axis()}));
  PACKAX_TRY(Expect("q_blocks", *q_blocks, s32,
                    {r.batch_axis(), {"bounds", 5}, {"ceil(q_len/64)", q_count}}));
  PACKAX_TRY(Expect("kv_blocks", *kv_blocks, s32,
                    {r.batch_axis(), {"bounds", 4}, {"ceil(kv_len/64)", kv_count}}));
  PACKAX_TRY(Expect("q_order", *q_order, s32, {r.batch_axis(), {"ceil(q_len/128)", q_tiles}}));
  PACKAX_TRY(Expect("q_order_192", *q_order_192, s32,
                    {r.batch_axis(), {"ceil(q_len/192)", CeilDiv(r.q_len, 192)}}));
  PACKAX_TRY(Expect("kv_order", *kv_order, s32, {r.batch_axis(), {"ceil(kv_len/128)", kv_tiles}}));
  if (r.batch == 0) return ffi::Error::Success();

  Device* device;
  Ready<BlocksRowsArgs> rows;
  Ready<BlocksKeysArgs> keys;
  Ready<BlocksOrderArgs> order;
  PACKAX_TRY(CurrentDevice(&device));
  PACKAX_TRY(Prepare(device, Dtype::kAny, 0, 0, &rows));
  PACKAX_TRY(Prepare(device, Dtype::kAny, 0, 0, &keys));
  PACKAX_TRY(Prepare(device, Dtype::kAny, 0, 0, &order));

  PACKAX_TRY(Launch(rows, stream, RowGrid(q_count, rows.block(), r),
                    BlocksRowsArgs{
                        .q_lo = q_lo.untyped_data(),
                        .q_hi = q_hi.untyped_data(),
                        .segment_checked = segment_checked.untyped_data(),
                        .q_blocks = q_blocks->untyped_data(),
                        .q_len = r.q_len,
                    }));
  PACKAX_TRY(Launch(keys, stream, RowGrid(kv_count, keys.block(), r),
                    BlocksKeysArgs{
                        .q_blocks = q_blocks->untyped_data(),
                        .kv_blocks = kv_blocks->untyped_data(),
                        .q_len = r.q_len,
                        .kv_len = r.kv_len,
                    }));
  return Launch(order, stream, RowGrid(q_tiles > kv_tiles ? q_tiles : kv_tiles, order.block(), r),
                BlocksOrderArgs{
                    .q_blocks = q_blocks->untyped_data(),
                    .kv_blocks = kv_blocks->untyped_data(),
                    .q_order = q_order->untyped_data(),
                    .q_order_192 = q_order_192->untyped_data(),
                    .kv_order = kv_order->untyped_data(),
                    .q_len = r.q_len,
                    .kv_len = r.kv_len,
                });
}

template <typename Binding>
auto DocumentsSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // q_ids: (mask_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // kv_ids: (mask_batch, kv_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_pos: like q_ids; (mask_batch, 2, q_len) at 2
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
      .template Arg<ffi::AnyBuffer>()  // q_lo: (mask_batch, q_len) int32
      .template Arg<ffi::AnyBuffer>()  // q_hi: like q_lo
      .template Arg<ffi::AnyBuffer>()  // segment_checked: like q_lo
      .template Ret<ffi::AnyBuffer>()  // q_blocks: (mask_batch, 5, ceil(q_len/64)) int32
      .template Ret<ffi::AnyBuffer>()  // kv_blocks: (mask_batch, 4, ceil(kv_len/64)) int32
      .template Ret<ffi::AnyBuffer>()  // q_order: (mask_batch, ceil(q_len/128)) int32
      .template Ret<ffi::AnyBuffer>()  // q_order_192: (mask_batch, ceil(q_len/192)) int32
      .template Ret<ffi::AnyBuffer>()  // kv_order: (mask_batch, ceil(kv_len/128)) int32
      .template Attr<int64_t>("kv_len");
}

}  // namespace
}  // namespace packax

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_documents_initialize,
    (packax::Initialize<packax::Target::kDocuments, packax::Documents>()),
    packax::DocumentsSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_documents_execute, (packax::Execute<packax::Target::kDocuments, packax::Documents>()),
    packax::DocumentsSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_blocks_initialize, (packax::Initialize<packax::Target::kBlocks, packax::Blocks>()),
    packax::BlocksSignature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    packax_blocks_execute, (packax::Execute<packax::Target::kBlocks, packax::Blocks>()),
    packax::BlocksSignature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()),
    {xla::ffi::Traits::kCmdBufferCompatible});
