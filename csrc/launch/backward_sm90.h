// The backward's kernels for Hopper, and the workspace of all algorithms.

#pragma once

#include "launch/calls.h"

namespace packax {

// The sections of the workspace, from its start, in elements of 4 bytes. All begin at multiples of
// 256 bytes. The portable kernels have delta alone, of q_len rows a head. The separate ones have a
// counter in the place of the fused one's sum.
struct Sm90Workspace {
  explicit Sm90Workspace(const Shape& s)
      : rows(s.padded_rows()), mask_rows(Product({s.mask_batch, s.padded()})) {}

  // The kernels count rows of all heads in 32 bits, cells of dq_sum in 64.
  bool fits_int32() const { return rows <= kMaxInt32; }
  int64_t delta() const { return 0; }                  // (batch, heads, padded) float32
  int64_t lse2() const { return rows; }                // likewise
  int64_t lo() const { return lse2() + rows; }         // (mask_batch, padded) int32
  int64_t hi() const { return lo() + mask_rows; }      // likewise
  int64_t dq_sum() const { return hi() + mask_rows; }  // (batch, heads, padded, qk_dim) float32
  int64_t counter() const { return dq_sum(); }         // (1) int32

  int64_t rows, mask_rows;
};

struct Sections {
  Sections(const BackwardCall& c, const Sm90Workspace& w)
      : Sections(static_cast<float*>(c.workspace.untyped_data()), w) {}
  Sections(float* start, const Sm90Workspace& w)
      : delta(start + w.delta()),
        lse2(start + w.lse2()),
        lo(start + w.lo()),
        hi(start + w.hi()),
        dq_sum(start + w.dq_sum()),
        counter(start + w.counter()) {}

  float *delta, *lse2, *lo, *hi, *dq_sum, *counter;
};

// Row statistics into the workspace, and with `clear_dq` zeros into dq_sum.
ffi::Error LaunchPrepare(const Ready<BackwardPrepareArgs>& prepare, Stream stream,
                         const BackwardCall& c, bool clear_dq);

// Elements, for that algorithm and those before it.
int64_t WorkspaceSize(Algorithm algorithm, const Shape& s);

// The kernels of Hopper for this call, with one option or none: the call's algorithm, or the
// separate one where there is no fused kernel. `*found` says whether this device has them; in the
// initialize stage sizes are checked and nothing is launched.
ffi::Error BackwardOnSm90(Device* device, Stream stream, const BackwardCall& c, bool* found);

}  // namespace packax
