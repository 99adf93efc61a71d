// What the forward's handlers (forward.cc, general.cc) and the launches of its kernels for Hopper
// share.

#pragma once

#include "ffi/block_lists.h"
#include "ffi/shape.h"

namespace packax {

struct ForwardCall {
  Shape shape;
  Mask mask;
  ffi::AnyBuffer query, key, value, q_order_192, out, lse, counter;
  float scale;
  float soft_cap = 0;                                   // 0: none
  std::optional<BlockMap> map = std::nullopt;           // never with a soft cap
  std::optional<ffi::AnyBuffer> slopes = std::nullopt;  // of ALiBi, (1, heads); never with either
};

// The kernel of Hopper for this call, with a soft cap, a map, slopes or none of them. `*found` says
// whether this device has it; in the initialize stage nothing is launched.
ffi::Error ForwardOnSm90(Device* device, Stream stream, const ForwardCall& c, bool* found);

// The order of tiles of 192 rows, (mask_batch, ceil(q_len/192)).
ffi::Error CheckOrder192(const Shape& s, const ffi::AnyBuffer& q_order_192);

// From which programs draw tiles: one int32.
ffi::Error CheckCounter(const ffi::AnyBuffer& counter);

}  // namespace packax
