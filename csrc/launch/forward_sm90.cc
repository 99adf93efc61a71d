// The forward's kernels for Hopper: tensor maps, the order of tiles, how many programs.

#include "launch/forward_sm90.h"

namespace packax {
namespace {

constexpr int64_t kMaxPrograms = 4096;  // more multiprocessors than any GPU has

// Members of `Args{...}` that all of them begin with, as those of attention.h. Maps are filled in
// later.
#define PACKAX_FORWARD_TILES(c, order)                                           \
  .query = {}, .key = {}, .value = {}, .out = {}, .lse = (c).lse.untyped_data(), \
  PACKAX_MASK_ROWS((c).mask), .q_order = (order), .counter = (c).counter.untyped_data()

template <typename Args>  // without an option
void Fill(const ForwardCall& c, const void* q_order, Args* args) {
  *args = {
      PACKAX_FORWARD_TILES(c, q_order),
      .scale = c.scale,
      .element_test = c.mask.element_test,
      PACKAX_SIZES(c.shape),
  };
}

void Fill(const ForwardCall& c, const void* q_order, ForwardSm90SoftCapArgs* args) {
  *args = {
      PACKAX_FORWARD_TILES(c, q_order),    .scale = c.scale,      .soft_cap = c.soft_cap,
      .element_test = c.mask.element_test, PACKAX_SIZES(c.shape),
  };
}

void Fill(const ForwardCall& c, const void* q_order, ForwardSm90BlockListsArgs* args) {
  const Shape& s = c.shape;
  *args = {
      PACKAX_FORWARD_TILES(c, q_order),           .map_bits = c.map->bits.untyped_data(),
      .q_entries = c.map->entries.untyped_data(), .scale = c.scale,
      .element_test = c.mask.element_test,        PACKAX_MAPPED_SIZES(s, *c.map),
  };
}

void Fill(const ForwardCall& c, const void* q_order, ForwardSm90AlibiArgs* args) {
  *args = {
      PACKAX_FORWARD_TILES(c, q_order),
      .slopes = c.slopes->untyped_data(),
      .scale = c.scale,
      .element_test = c.mask.element_test,
      PACKAX_SIZES(c.shape),
  };
}

template <typename Args>
ffi::Error LaunchForward(const Ready<Args>& forward, Stream stream, const ForwardCall& c) {
  const Shape& s = c.shape;
  // A tile is an entry of an order; emit.py refuses any block but these two.
  const int block = forward.block();
  const ffi::AnyBuffer& q_order = block == kTile192 ? c.q_order_192 : c.mask.q_order;
  Args args;
  Fill(c, q_order.untyped_data(), &args);
  PACKAX_TRY(Encode(forward, Args::kQuery, RowsOf("query", c.query, s), &args.query));
  PACKAX_TRY(Encode(forward, Args::kKey, KeysOf("key", c.key, s), &args.key));
  PACKAX_TRY(Encode(forward, Args::kValue, KeysOf("value", c.value, s), &args.value));
  PACKAX_TRY(Encode(forward, Args::kOut, RowsOf("out", c.out, s), &args.out));
  // One program per multiprocessor; they draw further tiles from the counter.
  const int64_t tiles = Product({s.heads, s.batch, CeilDiv(s.q_len, block)});
  PACKAX_CHECK(tiles <= kMaxInt32 - kMaxPrograms, kInvalidArgument)
      << "batch * heads * ceil(q_len/" << block << ") is " << tiles << ", a GPU takes "
      << kMaxInt32 - kMaxPrograms << " at most; split the batch";
  const int64_t programs = forward.kernel.device->multiprocessors;
  PACKAX_TRY(Clear(*forward.kernel.device, *stream, c.counter.untyped_data()));
  return Launch(forward, stream, Grid{tiles < programs ? tiles : programs}, args);
}

template <typename Args>
ffi::Error RunIfFound(Device* device, Stream stream, const ForwardCall& c, bool* found) {
  std::optional<Ready<Args>> forward;
  const Shape& s = c.shape;
  PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &forward));
  *found = forward.has_value();
  return *found && stream ? LaunchForward(*forward, stream, c) : ffi::Error::Success();
}

// Where not every multiprocessor has a tile of 192 rows, the longest one decides: shorter ones end
// sooner. All heads of the rows count, so that a call for some of them takes the kernel of all.
bool IsFew(const Shape& s, const Device& device) {
  return Product({s.row_heads, s.batch, s.q_tiles_192()}) < device.multiprocessors;
}

}  // namespace

ffi::Error ForwardOnSm90(Device* device, Stream stream, const ForwardCall& c, bool* found) {
  if (c.map) return RunIfFound<ForwardSm90BlockListsArgs>(device, stream, c, found);
  if (c.slopes) return RunIfFound<ForwardSm90AlibiArgs>(device, stream, c, found);
  if (c.soft_cap > 0) return RunIfFound<ForwardSm90SoftCapArgs>(device, stream, c, found);
  if (IsFew(c.shape, *device)) {
    PACKAX_TRY(RunIfFound<ForwardSm90LowOccupancyArgs>(device, stream, c, found));
    if (*found) return ffi::Error::Success();
  }
  return RunIfFound<ForwardSm90Args>(device, stream, c, found);
}

ffi::Error CheckOrder192(const Shape& s, const ffi::AnyBuffer& q_order_192) {
  return Expect("q_order_192", q_order_192, ffi::DataType::S32,
                {{"mask_batch", s.mask_batch}, {"ceil(q_len/192)", s.q_tiles_192()}});
}

ffi::Error CheckCounter(const ffi::AnyBuffer& counter) {
  return Expect("counter", counter, ffi::DataType::S32, {{"words", 1}});
}

}  // namespace packax
