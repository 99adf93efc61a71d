#include <algorithm>
#include <bit>
#include <cmath>

#include "launch/rows.h"

namespace packax {
namespace {

// --- Attention: options and grids of both passes.

constexpr float kLargestCap = 1024;     // up to which tanh may err by 4e-7 (common/soft_cap.py)
constexpr int64_t kElementsAtOnce = 8;  // 16 bytes of a 16-bit dtype

// Whether the call has exactly these options, with values that their dedicated kernels support
// (sm90, and sm80 for a soft cap).
template <uint32_t options>
bool Only(const AttentionOperands& o) {
  if (o.options() != options) return false;
  if (options == kSoftCap) return o.soft_cap <= kLargestCap && std::isfinite(o.scale / o.soft_cap);
  // The kernels locate blocks by shifts.
  return options != kBlockMask || (std::has_single_bit(static_cast<uint32_t>(o.q_block)) &&
                                   std::has_single_bit(static_cast<uint32_t>(o.kv_block)));
}

// Whether plain kernels support the call. Float32 has only fallback kernels.
bool IsPlain(const AttentionOperands& o) {
  return o.options() == 0 && o.dtype != Dtype::kF32 && o.dtype != Dtype::kTf32;
}

// Whether the bias is not broadcast along the axis (bits of `bias_axes`).
bool HasAxis(const AttentionOperands& o, int axis) { return (o.bias_axes >> axis & 1) != 0; }

// Whether the only option is a bias with rows aligned to 16 bytes, in the query's dtype or (kind 2)
// in float32 for queries of 16 bits.
bool OnlyBias(const AttentionOperands& o, int kind = 1) {
  const bool wide = o.dtype == Dtype::kF32 || o.dtype == Dtype::kTf32;
  return o.options() == kBias && o.bias_kind == kind && (kind != 2 || !wide) && o.kv_len > 0 &&
         o.kv_len % (kElementsAtOnce / kind) == 0 && o.heads == o.row_heads;
}

// Also requires a bias row for every query row: the kernels read the bias by tensor maps.
bool OnlyBiasOfRows(const AttentionOperands& o, int kind) {
  return OnlyBias(o, kind) && (o.q_len == 1 || HasAxis(o, 2));
}

ffi::Error CheckAllHeads(const AttentionOperands& o, Dims dims) {
  PACKAX_CHECK(dims != Dims::kCovering || o.heads == o.row_heads, kUnimplemented)
      << "attributes first_head and heads are " << o.first_head << " and " << o.heads
      << ", but the fallback kernels take all of the query's " << o.row_heads;
  return ffi::Error::Success();
}

// A program computes a tile of rows, or part of one, in the order that the mask stores.
template <typename Operands>
Grid QueryTiles(const Operands& o, int64_t block) {
  return {Product({o.heads, o.batch, o.q_tiles(), kTile / block})};
}

template <typename Operands>
Grid KeyTiles(const Operands& o, int64_t block) {
  return {Product({o.kv_heads, o.batch, o.kv_tiles(), kTile / block})};
}

// A program computes `block` rows; any number is possible.
template <typename Operands>
Grid Rows(const Operands& o, int64_t block) {
  return {Product({CeilDiv(o.q_len, block), o.heads, o.batch})};
}

// --- The forward.

using F = ForwardOperands;

// If there are fewer tiles of 192 rows than multiprocessors, the longest tile determines the time,
// and smaller tiles finish sooner. Counts all heads of the query, so that a call for some heads
// uses the same kernel as a call for all. Tiles of 128 rows also serve a length that tiles of 192
// would round up by an eighth more.
bool LowOccupancy(const F& o, const Device& device) {
  const int64_t tiles = CeilDiv(o.q_len, kTile192);
  return Product({o.row_heads, o.batch, tiles}) < device.multiprocessors ||
         8 * kTile192 * tiles > 9 * kTile * CeilDiv(o.q_len, kTile);
}

// More than 256 value columns are computed in parts (csrc/kernels/sm90/fwd.py).
Grid RowsOfParts(const F& o, int64_t block) {
  return {Product({CeilDiv(o.q_len, block), o.heads, o.batch, CeilDiv(o.v_dim, 256)})};
}

template <typename Args>
constexpr Steps<F> Persistent() {
  return {Use<Args, F>(RowsOfParts, nullptr, &F::counter)};
}

// Tiles of few steps: their time is that of finding, loading and storing them
// (csrc/kernels/sm90/row_producer.py). Three programs fit on a multiprocessor.
constexpr int32_t kShortKeys = 1024;
constexpr int32_t kShortRowKeys = 1024;  // that a row attends to, in a window

// Above head dim 64, plain calls have a counter again up to this many keys: their programs, one on
// a multiprocessor, end at very different times (docs/experiments.md).
constexpr int32_t kCountedKeys = 512;

bool HasFewSteps(const F& o) {
  const bool few = o.row_keys > 0 && o.row_keys <= kShortRowKeys;
  return few || o.kv_len <= kShortKeys;
}

bool IsShort(const F& o, const Device&) { return o.options() == 0 && HasFewSteps(o); }

// Whether clearing a counter of tiles would take longer than it saves.
bool TakesTurns(const F& o, const Selected<F>& selected, const Device& device) {
  const Step<F>& step = selected.row->steps[0];
  const int64_t programs = int64_t{step.resident} * device.multiprocessors;
  const bool counts = o.options() == 0 && o.qk_dim > 64 && o.kv_len <= kCountedKeys;
  return step.grid(o, selected.block(0)).x <= programs || (HasFewSteps(o) && !counts);
}

constexpr Steps<F> Short() {
  auto steps = Persistent<ForwardSm90ShortArgs>();
  steps[0].resident = 3;
  return steps;
}

// Packed documents may be short or long, which only the mask's data says.
bool HasDocuments(const F& o, const Device&) { return o.options() == 0 && o.mask_mode != kNoCheck; }

// The kernel for few keys and that for many, of which one finds nothing to do.
constexpr Steps<F> ByLength() { return {Short()[0], Persistent<ForwardSm90Args>()[0]}; }

template <typename Args>
constexpr Steps<F> OneTile() {
  return {Use<Args, F>(QueryTiles)};
}

template <uint32_t options>
bool HasOnly(const F& o, const Device&) {
  return Only<options>(o);
}

constexpr Row<F> kForward[] = {
    {HasOnly<kBlockMask>, Gpus::kSome, Dims::kClipped, Persistent<ForwardSm90BlockListsArgs>()},
    {HasOnly<kAlibi>, Gpus::kSome, Dims::kClipped, Persistent<ForwardSm90AlibiArgs>()},
    {HasOnly<kRowStats>, Gpus::kSome, Dims::kClipped, Persistent<ForwardSm90MaxLogitsArgs>()},
    {HasOnly<kSoftCap>, Gpus::kSome, Dims::kClipped, Persistent<ForwardSm90SoftCapArgs>()},
    {HasOnly<kDropout>, Gpus::kSome, Dims::kClipped, Persistent<ForwardSm90DropoutArgs>()},
    {[](const F& o, const Device&) { return OnlyBiasOfRows(o, 1); }, Gpus::kSome, Dims::kClipped,
     Persistent<ForwardSm90BiasArgs>()},
    {[](const F& o, const Device&) { return OnlyBiasOfRows(o, 2); }, Gpus::kSome, Dims::kClipped,
     Persistent<ForwardSm90Float32BiasArgs>()},
    {IsShort, Gpus::kSome, Dims::kClipped, Short()},
    {[](const F& o, const Device& device) { return IsPlain(o) && LowOccupancy(o, device); },
     Gpus::kSome, Dims::kClipped, Persistent<ForwardSm90LowOccupancyArgs>()},
    {HasDocuments, Gpus::kSome, Dims::kClipped, ByLength()},
    {HasOnly<0>, Gpus::kSome, Dims::kClipped, Persistent<ForwardSm90Args>()},
    {HasOnly<kSoftCap>, Gpus::kSome, Dims::kExact, OneTile<ForwardSm80SoftCapArgs>()},
    {[](const F& o, const Device&) { return IsPlain(o); }, Gpus::kAll, Dims::kExact,
     OneTile<ForwardArgs>()},
    {[](const F& o, const Device&) { return OnlyBias(o); }, Gpus::kSome, Dims::kCovering,
     OneTile<ForwardBiasAloneArgs>()},
    {[](const F& o, const Device&) { return !o.lse_in_two(); }, Gpus::kAll, Dims::kCovering,
     OneTile<ForwardFallbackArgs>()},
    {[](const F& o, const Device&) { return o.lse_in_two(); }, Gpus::kAll, Dims::kCovering,
     OneTile<ForwardBiasArgs>()},
};

// --- The backward.

using B = BackwardOperands;

bool NeedsDkv(const B& o) { return o.needs_dkv; }
bool NeedsDq(const B& o) { return o.needs_dq; }
bool NeedsDbias(const B& o) { return o.needs_dbias; }

Grid PaddedRows(const B& o, int64_t block) { return {o.padded_rows() / block}; }

// A program computes a square tile of the bias gradient.
Grid BiasTiles(const B& o, int64_t block) {
  const auto along = [&](int axis, int64_t size) { return HasAxis(o, axis) ? size : 1; };
  return {Product({o.batch / o.bias_group(), along(1, o.heads), CeilDiv(along(2, o.q_len), block),
                   CeilDiv(o.kv_len, block)})};
}

// A program walks through a part of the batch rows of a tile of 2 * block rows and `block` keys
// (csrc/kernels/sm90/shared_dbias.py).
Grid SharedTiles(const B& o, int64_t block) {
  return {Product(
      {o.dbias_parts, o.bias.batch, CeilDiv(o.q_len, 2 * block), CeilDiv(o.kv_len, block)})};
}

Grid DbiasElements(const B& o, int64_t block) {
  return {CeilDiv(Product({o.bias.batch, o.bias.length, o.bias.columns}), block)};
}

// Whether the bias gradient is the gradient of the logits, since no axis is broadcast. The kernel
// for dK and dV then writes it, and dQ is its product with the keys.
bool DkvWritesDbias(const B& o, const Device&) {
  const auto full = [&](int axis, int64_t size) { return size == 1 || HasAxis(o, axis); };
  return OnlyBias(o) && o.needs_dbias && o.needs_dkv && o.bias_group() == 1 && full(1, o.heads) &&
         full(2, o.q_len);
}

// Whether the Hopper kernels with a bias take the call.
template <int kind>
bool BiasOnSm90(const B& o, const Device&) {
  return o.algorithm >= Algorithm::kSm90Separate && o.padded_rows() <= kMaxInt32 &&
         OnlyBiasOfRows(o, kind);
}

template <int kind>
bool DbiasOnSm90(const B& o, const Device& device) {
  return BiasOnSm90<kind>(o, device) && o.needs_dbias && o.dbias_parts > 0;
}

template <int kind>
bool NoDbiasOnSm90(const B& o, const Device& device) {
  return BiasOnSm90<kind>(o, device) && !o.needs_dbias;
}

// One kernel for all gradients. It accumulates dQ in float32 in no fixed order; dK and dV do not
// depend on the order.
template <typename Gradients, typename Postprocess = BackwardPostprocessArgs,
          typename Preprocess = BackwardPreprocessArgs>
constexpr Steps<B> Fused() {
  return {Use<Preprocess, B>(PaddedRows), Use<Gradients, B>(KeyTiles),
          Use<Postprocess, B>(PaddedRows, NeedsDq)};
}

// One kernel for dK and dV and one for dQ, without accumulation in memory: deterministic, and only
// for gradients that are needed. Also used where there is no fused kernel.
template <typename Dkdv, typename Dq, typename Preprocess = BackwardPreprocessArgs>
constexpr Steps<B> Separate() {
  return {Use<Preprocess, B>(PaddedRows), Use<Dkdv, B>(KeyTiles, NeedsDkv),
          Use<Dq, B>(Rows, NeedsDq, &B::counter)};
}

// A program computes half of the columns of dK and dV for a tile of keys
// (csrc/kernels/sm90/bwd.py).
Grid KeyTilesOfParts(const B& o, int64_t block) {
  return {Product({o.kv_heads, o.batch, o.kv_tiles(), kTile / block, 2})};
}

// Like Separate(), for head dim 512. A program of the dQ kernel computes part of a tile.
constexpr Steps<B> Parts() {
  return {Use<BackwardPreprocessArgs, B>(PaddedRows),
          Use<BackwardDkdvSm90PartsArgs, B>(KeyTilesOfParts, NeedsDkv),
          Use<BackwardDqSm90PartsArgs, B>(QueryTiles, NeedsDq)};
}

template <typename Delta, typename Dkdv, typename Dq>
constexpr Steps<B> Portable() {
  return {Use<Delta, B>(Rows), Use<Dkdv, B>(KeyTiles, NeedsDkv), Use<Dq, B>(QueryTiles, NeedsDq)};
}

template <typename Dkdv, typename Dq, typename Dbias>
constexpr Steps<B> WithDbias() {
  auto steps = Portable<BackwardDeltaFallbackArgs, Dkdv, Dq>();
  steps[3] = Use<Dbias, B>(BiasTiles, NeedsDbias);
  return steps;
}

// For kernels that count rows in 32 bits and elements of dq_sum in 64.
template <uint32_t options, Algorithm algorithm>
bool HasOnly(const B& o, const Device&) {
  return o.algorithm >= algorithm && o.padded_rows() <= kMaxInt32 && Only<options>(o);
}

// Two programs of 64 keys then share a multiprocessor, because one of 128 keys would spend about
// half of its time on its start and its end (docs/experiments.md).
constexpr int32_t kFewRows = 512;

bool HasFewRows(const B& o, const Device& device) {
  return o.q_len <= kFewRows && o.kv_len > kTile && o.kv_len <= kFewRows &&
         HasOnly<0, Algorithm::kSm90Fused>(o, device);
}

// A program computes both tiles of keys of a head if so many heads fill the GPU. They are in the
// order of tiles_are_near (csrc/kernels/common/kv_ranges.py).
constexpr int64_t kLeastPairs = 256;

bool HasPairs(const B& o, const Device& device) {
  return o.kv_tiles() == 2 && Product({o.batch, o.kv_heads}) >= kLeastPairs &&
         HasOnly<0, Algorithm::kSm90Fused>(o, device);
}

Grid Heads(const B& o, int64_t) { return {Product({o.kv_heads, o.batch})}; }

constexpr Steps<B> Pairs() {
  auto steps = Fused<BackwardSm90PairsArgs>();
  steps[1] = Use<BackwardSm90PairsArgs, B>(Heads);
  return steps;
}

template <uint32_t options>
bool OnSm80(const B& o, const Device& device) {
  return o.needs_dkv && HasOnly<options, Algorithm::kSm90Fused>(o, device);
}

// For DkvWritesDbias(): a Hopper kernel for dK, dV and the bias gradient, then dQ as the product of
// that gradient with the keys.
constexpr Steps<B> SeparateWithDbias() {
  return {Use<BackwardPreprocessDbiasArgs, B>(PaddedRows),
          Use<BackwardDkdvSm90DbiasArgs, B>(KeyTiles),
          Use<BackwardDqOfDbiasAloneArgs, B>(QueryTiles, NeedsDq)};
}

template <typename Dkdv, typename Dq>
constexpr Steps<B> SeparateWithBias() {
  return Separate<Dkdv, Dq, BackwardPreprocessDbiasArgs>();
}

// With the gradient of a bias that batch rows share.
template <typename Dkdv, typename Dq, typename Dbias>
constexpr Steps<B> SeparateWithSharedDbias() {
  auto steps = SeparateWithBias<Dkdv, Dq>();
  steps[3] = Use<Dbias, B>(SharedTiles);
  steps[4] = Use<BackwardSumDbiasArgs, B>(DbiasElements);
  return steps;
}

constexpr auto kSeparate = Algorithm::kSm90Separate, kFused = Algorithm::kSm90Fused;

constexpr Row<B> kBackward[] = {
    {HasOnly<kBlockMask, kSeparate>, Gpus::kSome, Dims::kClipped,
     Separate<BackwardDkdvSm90BlockListsArgs, BackwardDqSm90BlockListsArgs>()},
    {HasOnly<kAlibi, kFused>, Gpus::kSome, Dims::kClipped, Fused<BackwardSm90AlibiArgs>(), true},
    {HasOnly<kSoftCap, kFused>, Gpus::kSome, Dims::kClipped, Fused<BackwardSm90SoftCapArgs>(),
     true},
    {HasOnly<kSoftCap, kSeparate>, Gpus::kSome, Dims::kClipped,
     Separate<BackwardDkdvSm90SoftCapArgs, BackwardDqSm90SoftCapArgs>()},
    {HasOnly<kDropout, kFused>, Gpus::kSome, Dims::kClipped,
     Fused<BackwardSm90DropoutArgs, BackwardPostprocessArgs, BackwardPreprocessDropoutArgs>(),
     true},
    {HasOnly<kDropout, kSeparate>, Gpus::kSome, Dims::kClipped,
     Separate<BackwardDkdvSm90DropoutArgs, BackwardDqSm90DropoutArgs,
              BackwardPreprocessDropoutArgs>()},
    {HasFewRows, Gpus::kSome, Dims::kClipped, Fused<BackwardSm90ShortArgs>(), true},
    {HasPairs, Gpus::kSome, Dims::kClipped, Pairs(), true, 2 * kTile},
    {HasOnly<0, kFused>, Gpus::kSome, Dims::kClipped, Fused<BackwardSm90Args>(), true, kTile},
    {HasOnly<0, kSeparate>, Gpus::kSome, Dims::kClipped,
     Separate<BackwardDkdvSm90Args, BackwardDqSm90Args>()},
    {HasOnly<0, kSeparate>, Gpus::kSome, Dims::kClipped, Parts()},
    {OnSm80<0>, Gpus::kSome, Dims::kExact, Fused<BackwardSm80Args, BackwardPostprocessSm80Args>(),
     true},
    {OnSm80<kSoftCap>, Gpus::kSome, Dims::kExact,
     Fused<BackwardSm80SoftCapArgs, BackwardPostprocessSm80Args>(), true},
    {[](const B& o, const Device&) { return IsPlain(o); }, Gpus::kAll, Dims::kExact,
     Portable<BackwardDeltaArgs, BackwardDkdvArgs, BackwardDqArgs>()},
    {[](const B& o, const Device& device) {
       return o.algorithm >= kSeparate && o.padded_rows() <= kMaxInt32 && DkvWritesDbias(o, device);
     },
     Gpus::kSome, Dims::kClipped, SeparateWithDbias()},
    {DbiasOnSm90<1>, Gpus::kSome, Dims::kClipped,
     SeparateWithSharedDbias<BackwardDkdvSm90BiasArgs, BackwardDqSm90BiasArgs,
                             BackwardSharedDbiasArgs>()},
    {DbiasOnSm90<2>, Gpus::kSome, Dims::kClipped,
     SeparateWithSharedDbias<BackwardDkdvSm90Float32BiasArgs, BackwardDqSm90Float32BiasArgs,
                             BackwardSharedFloat32DbiasArgs>()},
    {NoDbiasOnSm90<1>, Gpus::kSome, Dims::kClipped,
     SeparateWithBias<BackwardDkdvSm90BiasArgs, BackwardDqSm90BiasArgs>()},
    {NoDbiasOnSm90<2>, Gpus::kSome, Dims::kClipped,
     SeparateWithBias<BackwardDkdvSm90Float32BiasArgs, BackwardDqSm90Float32BiasArgs>()},
    {DkvWritesDbias, Gpus::kSome, Dims::kCovering,
     Portable<BackwardDeltaFallbackArgs, BackwardDkdvDbiasAloneArgs, BackwardDqOfDbiasAloneArgs>()},
    {[](const B& o, const Device&) { return OnlyBias(o); }, Gpus::kSome, Dims::kCovering,
     WithDbias<BackwardDkdvBiasAloneArgs, BackwardDqBiasAloneArgs, BackwardDbiasAloneArgs>()},
    {[](const B& o, const Device&) { return !o.lse_in_two(); }, Gpus::kAll, Dims::kCovering,
     Portable<BackwardDeltaFallbackArgs, BackwardDkdvFallbackArgs, BackwardDqFallbackArgs>()},
    {[](const B& o, const Device&) { return o.lse_in_two(); }, Gpus::kAll, Dims::kCovering,
     WithDbias<BackwardDkdvBiasArgs, BackwardDqBiasArgs, BackwardDbiasArgs>()},
};

// --- The tangent of the forward.

using T = TangentOperands;

// Plain, with the tangents of query, key and value.
bool HasAllTangents(const T& o, const Device&) {
  return IsPlain(o) && o.has_tq != 0 && o.has_tk != 0 && o.has_tv != 0;
}

constexpr Row<T> kTangent[] = {
    {HasAllTangents, Gpus::kSome, Dims::kClipped, {Use<ForwardTangentSm90Args, T>(QueryTiles)}},
    {HasAllTangents, Gpus::kSome, Dims::kExact, {Use<ForwardTangentArgs, T>(QueryTiles)}},
    {Always, Gpus::kAll, Dims::kCovering, {Use<ForwardTangentFallbackArgs, T>(QueryTiles)}},
};

}  // namespace

std::span<const Row<F>> RowsOf(const F&) { return kForward; }
std::span<const Row<B>> RowsOf(const B&) { return kBackward; }
std::span<const Row<T>> RowsOf(const T&) { return kTangent; }

PACKAX_CHOOSE(ForwardOperands)
PACKAX_CHOOSE(BackwardOperands)
PACKAX_CHOOSE(TangentOperands)

ffi::Error RunForward(Stream stream, ForwardOperands o) {
  Device* device;
  Selected<F> selected;
  PACKAX_TRY(Select(o, &device, &selected));
  PACKAX_TRY(CheckAllHeads(o, selected.row->dims));
  if (TakesTurns(o, selected, *device)) o.counter = nullptr;
  const bool by_length = selected.row->steps[1].list != nullptr;
  std::array<F, 2> each = {o, o};
  for (int i = 0; i <= int{by_length}; ++i) {
    // The tile size determines the order; emit.py rejects other tile sizes.
    if (selected.block(i) == kTile192) each[i].q_order = o.q_order_192;
    if (by_length) each[i].choice = i + 1;
  }
  return Run<F>(stream, std::span(each).first(1 + by_length), selected);
}

ffi::Error RunBackward(Stream stream, BackwardOperands o) {
  Device* device;
  Selected<B> selected;
  PACKAX_TRY(Select(o, &device, &selected));
  PACKAX_TRY(CheckAllHeads(o, selected.row->dims));
  const Row<B>& row = *selected.row;
  o.clear_dq = !row.sums_dq ? 0 : o.kv_len > row.copied_keys ? 1 : 2;
  return Run(stream, o, selected);
}

ffi::Error RunTangent(Stream stream, const TangentOperands& o) { return SelectAndRun(stream, o); }

}  // namespace packax
