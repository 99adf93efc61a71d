// What the backward's handler (backward.cc) and the launches of its kernels for Hopper share.

#pragma once

#include "ffi/block_lists.h"
#include "ffi/shape.h"

namespace packax {

struct BackwardCall {
  Shape shape;
  Mask mask;
  ffi::AnyBuffer query, key, value, out, lse, dout, dlse, kv_blocks, kv_order, dq, dk, dv;
  ffi::AnyBuffer workspace;
  float scale;
  int32_t has_dlse;
  bool want_dq, want_dkv;
  float soft_cap = 0;                                   // 0: none
  std::optional<BlockMap> map = std::nullopt;           // never with a soft cap
  std::optional<ffi::AnyBuffer> slopes = std::nullopt;  // of ALiBi, (1, heads); never with either
};

// The sections of the workspace for Hopper. All begin at multiples of 256 bytes from its start.
// Which kernels may run is how large it is: those that add to dQ need all of it, those that make dQ
// and dK, dV apart have a counter in the place of the sum, the portable ones take whatever there
// is.
struct Sm90Workspace {
  explicit Sm90Workspace(const Shape& s)
      : rows(s.padded_rows()), mask_rows(Product({s.mask_batch, s.padded()})), qk_dim(s.qk_dim) {}

  // The kernels count rows of all heads in 32 bits, cells of dq_sum in 64.
  bool fits_int32() const { return rows <= kMaxInt32; }
  int64_t delta() const { return 0; }                  // (batch, heads, padded) float32
  int64_t lse2() const { return rows; }                // likewise
  int64_t lo() const { return lse2() + rows; }         // (mask_batch, padded) int32
  int64_t hi() const { return lo() + mask_rows; }      // likewise
  int64_t dq_sum() const { return hi() + mask_rows; }  // (batch, heads, padded, qk_dim) float32
  int64_t counter() const { return dq_sum(); }         // (1) int32
  int64_t size() const { return dq_sum() + rows * qk_dim; }
  int64_t apart_size() const { return counter() + 1; }
  bool holds_sum(const ffi::AnyBuffer& workspace) const {
    return fits_int32() && workspace.dimensions()[0] >= size();
  }

  int64_t rows, mask_rows, qk_dim;
};

// At least what the portable kernels need. How large it is beyond that is how the lowering says
// which kernels of Hopper may run.
ffi::Error CheckWorkspace(const ffi::AnyBuffer& workspace, const Shape& s);

// Kernels of Hopper for this call, with a soft cap, a map, slopes or none of them: one for all
// gradients, which adds dQ up in any order, or, in a smaller workspace or without that one, one for
// dK and dV and one for dQ, whose sums have one order. `*found` says whether this device has them;
// in the initialize stage nothing is launched.
ffi::Error BackwardOnSm90(Device* device, Stream stream, const BackwardCall& c, bool* found);

}  // namespace packax
