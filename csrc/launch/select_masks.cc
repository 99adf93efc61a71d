#include <algorithm>

#include "launch/rows.h"

namespace packax {
namespace {

// --- Masks: three small kernels each. The batch is the grid's y axis.

template <typename Operands>
Grid Keys(const Operands& o, int64_t block) {
  return {CeilDiv(o.kv_len, block), o.batch};
}

constexpr Row<DocumentsOperands> kDocuments[] = {
    {Always,
     Gpus::kAll,
     Dims::kExact,
     {Use<DocumentsInitArgs, DocumentsOperands>(Keys),
      Use<DocumentsRunsArgs, DocumentsOperands>(Keys),
      Use<DocumentsRowsArgs, DocumentsOperands>([](const DocumentsOperands& o, int64_t block) {
        return Grid{CeilDiv(o.q_len, block), o.batch};
      })}},
};

Grid Blocks(const BlocksOperands& o, int64_t length, int64_t unit, int64_t block) {
  return {CeilDiv(CeilDiv(length, unit), block), o.batch};
}

constexpr Row<BlocksOperands> kBlocks[] = {
    {Always,
     Gpus::kAll,
     Dims::kExact,
     {Use<BlocksRowsArgs, BlocksOperands>(
          [](const BlocksOperands& o, int64_t block) { return Blocks(o, o.q_len, kBlock, block); }),
      Use<BlocksKeysArgs, BlocksOperands>([](const BlocksOperands& o, int64_t block) {
        return Blocks(o, o.kv_len, kBlock, block);
      }),
      Use<BlocksOrderArgs, BlocksOperands>([](const BlocksOperands& o, int64_t block) {
        return Blocks(o, std::max(o.q_len, o.kv_len), kTile, block);
      })}},
};

}  // namespace

std::span<const Row<DocumentsOperands>> RowsOf(const DocumentsOperands&) { return kDocuments; }
std::span<const Row<BlocksOperands>> RowsOf(const BlocksOperands&) { return kBlocks; }

PACKAX_CHOOSE(DocumentsOperands)
PACKAX_CHOOSE(BlocksOperands)

ffi::Error RunDocuments(Stream stream, const DocumentsOperands& o) {
  return SelectAndRun(stream, o);
}

ffi::Error RunBlocks(Stream stream, const BlocksOperands& o) { return SelectAndRun(stream, o); }

}  // namespace packax
