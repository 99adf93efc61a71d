#include <algorithm>
#include <bit>

#include "launch/decode_shares.h"
#include "launch/rows.h"

namespace packax {
namespace {

// --- Decoding: partial sums of every share of the keys, then one kernel that merges them.

using D = DecodeOperands;

Grid Shares(const D& o, int64_t block) {
  int64_t all = o.shares == 0 ? Product({o.batch, o.splits}) : int64_t{o.shares} + o.batch;
  int64_t tiles = CeilDiv(o.rows(), block);
  if (o.tile_rows > 0) {
    all = o.room;
    if (o.has_tall != 0 && TakesSmallDecodeTile(block)) tiles = 1;  // the other items are tall
  }
  return {Product({tiles, o.kv_heads, all})};
}

// With chunks elsewhere, programs take turns at the listed tokens.
constexpr int64_t kTurns = 256;

Grid DecodedRows(const D& o, int64_t) {
  const int64_t tokens = o.chunks_elsewhere != 0 ? std::min<int64_t>(o.q_len, kTurns) : o.q_len;
  return {Product({o.batch, tokens, o.heads})};
}

Grid ChunkTiles(const D& o, int64_t) { return {Product({o.chunk_tiles, o.heads})}; }

template <typename Args>
constexpr Steps<D> Decode() {
  return {Use<Args, D>(Shares), Use<DecodeCombineArgs, D>(DecodedRows)};
}

template <typename Tall, typename Small>
constexpr Steps<D> DecodeBoth() {
  return {Use<Tall, D>(Shares), Use<Small, D>(Shares), Use<DecodeCombineArgs, D>(DecodedRows)};
}

template <typename Args>
constexpr Steps<D> WithChunks() {
  return {Use<Args, D>(ChunkTiles, nullptr, &D::counter), Use<DecodeTallArgs, D>(Shares),
          Use<DecodeArgs, D>(Shares), Use<DecodeCombineArgs, D>(DecodedRows)};
}

enum class CacheOf { k16Bits, kFp8, kFp8Pages };  // k16Bits: float32, too

template <CacheOf cache>
bool Takes(const D& o, const Device&) {
  if (cache == CacheOf::k16Bits) return !o.fp8;
  return o.fp8 && (o.page_size > 0) == (cache == CacheOf::kFp8Pages);
}

template <CacheOf cache>
bool TakesTallTile(const D& o, const Device& device) {
  return Takes<cache>(o, device) && o.tile_rows == 0 && !TakesSmallDecodeTile(o.rows());
}

// Packed rows, some of which may be of sequences with few rows. Their cache is paged.
template <CacheOf cache>
bool TakesBoth(const D& o, const Device& device) {
  return Takes<cache>(o, device) && o.tile_rows > 0 && !TakesSmallDecodeTile(o.rows());
}

// Pages that csrc/kernels/sm90/ragged.py takes: those that consist of the rows of a TMA copy, or
// one for each sequence. A kernel that copies single rows takes any size, and counts the rows of
// the cache in 31 bits.
template <int32_t rows>
bool TakesPages(const D& o) {
  if (rows == 1) return int64_t{o.pages} * o.page_size <= kMaxInt32;
  const bool power_of_two = std::has_single_bit(static_cast<uint32_t>(o.page_size));
  return o.table_width == 1 || (power_of_two && o.page_size >= rows);
}

// Whether the list of work has chunks that it takes. The scale is positive.
template <int32_t rows>
bool TakesChunks(const D& o, const Device& device) {
  return o.chunk_tiles > 0 && TakesBoth<CacheOf::k16Bits>(o, device) && o.soft_cap == 0 &&
         o.scale > 1e-30F && (o.dtype == Dtype::kBf16 || o.dtype == Dtype::kF16) &&
         TakesPages<rows>(o);
}

// There is no `decode_tall` for the largest head dims and TF32, and no `decode_tall_fp8` for most
// GPUs. Large groups then take several tiles of the smaller kernels.
constexpr Row<D> kDecode[] = {
    {TakesBoth<CacheOf::kFp8Pages>, Gpus::kSome, Dims::kCovering,
     DecodeBoth<DecodeTallFp8PagesArgs, DecodeFp8PagesArgs>()},
    {TakesChunks<64>, Gpus::kSome, Dims::kCovering, WithChunks<RaggedSm90LargePagesArgs>()},
    {TakesChunks<16>, Gpus::kSome, Dims::kCovering, WithChunks<RaggedSm90Args>()},
    {TakesChunks<1>, Gpus::kSome, Dims::kCovering, WithChunks<RaggedSm90SmallPagesArgs>()},
    {TakesBoth<CacheOf::k16Bits>, Gpus::kSome, Dims::kCovering,
     DecodeBoth<DecodeTallArgs, DecodeArgs>()},
    {TakesTallTile<CacheOf::kFp8>, Gpus::kSome, Dims::kCovering, Decode<DecodeTallFp8Args>()},
    {Takes<CacheOf::kFp8>, Gpus::kAll, Dims::kCovering, Decode<DecodeFp8Args>()},
    {TakesTallTile<CacheOf::kFp8Pages>, Gpus::kSome, Dims::kCovering,
     Decode<DecodeTallFp8PagesArgs>()},
    {Takes<CacheOf::kFp8Pages>, Gpus::kAll, Dims::kCovering, Decode<DecodeFp8PagesArgs>()},
    {TakesTallTile<CacheOf::k16Bits>, Gpus::kSome, Dims::kCovering, Decode<DecodeTallArgs>()},
    {Takes<CacheOf::k16Bits>, Gpus::kAll, Dims::kCovering, Decode<DecodeArgs>()},
};

}  // namespace

std::span<const Row<D>> RowsOf(const D&) { return kDecode; }

PACKAX_CHOOSE(DecodeOperands)

ffi::Error RunDecode(Stream stream, DecodeOperands o) {
  Device* device;
  Selected<D> selected;
  PACKAX_TRY(Select(o, &device, &selected));
  if (o.tile_rows > 0) {  // the shares are in `work`
    o.has_tall = selected.row->steps[2].list != nullptr ? 1 : 0;
    o.chunks_elsewhere = selected.row->steps[3].list != nullptr ? 1 : 0;
    return Run(stream, o, selected);
  }
  const int64_t most = std::min(o.room, selected.block(1));  // the most that decode_combine merges
  ChooseDecodeShares(*device, CeilDiv(o.rows(), selected.block(0)), most, &o);
  return Run(stream, o, selected);
}

}  // namespace packax
