// Tensor maps, the order of tiles, and which of the kernels runs.

#include "launch/forward_sm90.h"

#include "launch/heuristics.h"

namespace packax {
namespace {

constexpr int64_t kMaxPrograms = 4096;  // more multiprocessors than any GPU has

// Members of `Args{...}` that all of them begin with, as those of shape.h. Maps are filled in
// later.
#define PACKAX_FORWARD_TILES(c, order)                                           \
  .query = {}, .key = {}, .value = {}, .out = {}, .lse = (c).lse.untyped_data(), \
  PACKAX_MASK_ROWS((c).mask), .q_order = (order), .counter = (c).counter.untyped_data()

template <typename Args>  // without an option
void Fill(const ForwardCall& c, const void* q_order, Args* args) {
  *args = {
      PACKAX_FORWARD_TILES(c, q_order),
      .scale = c.scores.scale,
      .segment_check = c.mask.segment_check,
      PACKAX_SIZES(c.shape),
  };
}

void Fill(const ForwardCall& c, const void* q_order, ForwardSm90SoftCapArgs* args) {
  *args = {
      PACKAX_FORWARD_TILES(c, q_order),      .scale = c.scores.scale, .soft_cap = c.scores.soft_cap,
      .segment_check = c.mask.segment_check, PACKAX_SIZES(c.shape),
  };
}

void Fill(const ForwardCall& c, const void* q_order, ForwardSm90BlockListsArgs* args) {
  const Shape& s = c.shape;
  *args = {
      PACKAX_FORWARD_TILES(c, q_order),
      .block_mask = c.block_mask.bits.untyped_data(),
      .q_block_lists = c.block_mask.q_lists.untyped_data(),
      .scale = c.scores.scale,
      .segment_check = c.mask.segment_check,
      PACKAX_BLOCK_MASK_SIZES(s, c.block_mask),
  };
}

void Fill(const ForwardCall& c, const void* q_order, ForwardSm90AlibiArgs* args) {
  *args = {
      PACKAX_FORWARD_TILES(c, q_order),
      .slopes = c.scores.slopes.untyped_data(),
      .scale = c.scores.scale,
      .segment_check = c.mask.segment_check,
      PACKAX_SIZES(c.shape),
  };
}

template <typename Args>
ffi::Error LaunchForward(const Ready<Args>& forward, Stream stream, const ForwardCall& c) {
  const Shape& s = c.shape;
  // A tile is an entry of an order; emit.py refuses any block but these two.
  const int block = forward.block();
  // Programs count tiles in 32 bits, and each draws one more than there are.
  const int64_t tiles = Product({s.heads, s.batch, CeilDiv(s.q_len, block)});
  PACKAX_CHECK(tiles <= kMaxInt32 - kMaxPrograms, kInvalidArgument)
      << "batch * heads * ceil(q_len/" << block << ") is " << tiles << ", a GPU takes "
      << kMaxInt32 - kMaxPrograms << " at most; split the batch";
  const ffi::AnyBuffer& q_order = block == kTile192 ? c.q_order_192 : c.mask.q_order;
  Args args;
  Fill(c, q_order.untyped_data(), &args);
  PACKAX_TRY(Encode(forward, stream, Args::kQuery, RowsOf("query", c.query, s), &args.query));
  PACKAX_TRY(Encode(forward, stream, Args::kKey, KeysOf("key", c.key, s), &args.key));
  PACKAX_TRY(Encode(forward, stream, Args::kValue, KeysOf("value", c.value, s), &args.value));
  PACKAX_TRY(Encode(forward, stream, Args::kOut, RowsOf("out", c.out, s), &args.out));
  if (!stream) return ffi::Error::Success();
  const Device& device = *forward.kernel.device;
  PACKAX_TRY(Clear(device, *stream, c.counter.untyped_data()));
  return Launch(forward, stream, Grid{PersistentPrograms(tiles, device)}, args);
}

template <typename Args>
ffi::Error RunIfFound(Device* device, Stream stream, const ForwardCall& c, bool* found) {
  std::optional<Ready<Args>> forward;
  const Shape& s = c.shape;
  PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &forward));
  *found = forward.has_value();
  return *found ? LaunchForward(*forward, stream, c) : ffi::Error::Success();
}

}  // namespace

ffi::Error ForwardOnSm90(Device* device, Stream stream, const ForwardCall& c, bool* found) {
  *found = false;
  if (c.needs_row_max || !TakesSm90(c)) return ffi::Error::Success();
  if (c.block_mask.there()) return RunIfFound<ForwardSm90BlockListsArgs>(device, stream, c, found);
  if (c.scores.only_slopes()) return RunIfFound<ForwardSm90AlibiArgs>(device, stream, c, found);
  if (c.scores.soft_cap > 0) return RunIfFound<ForwardSm90SoftCapArgs>(device, stream, c, found);
  if (LowOccupancy(c.shape, *device)) {
    PACKAX_TRY(RunIfFound<ForwardSm90LowOccupancyArgs>(device, stream, c, found));
    if (*found) return ffi::Error::Success();
  }
  return RunIfFound<ForwardSm90Args>(device, stream, c, found);
}

}  // namespace packax
