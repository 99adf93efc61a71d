#include "launch/backward_sm80.h"

#include "launch/backward_sm90.h"

namespace packax {

ffi::Error BackwardOnSm80(Device* device, Stream stream, const BackwardCall& c, bool* found) {
  *found = false;
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  const Sm90Workspace w(s);
  const Sections at(c, w);
  const bool fits = c.algorithm == Algorithm::kSm90Fused && w.fits_int32();
  if (!fits || !c.plain() || !c.needs_dkv) return ffi::Error::Success();
  std::optional<Ready<BackwardPrepareArgs>> prepare;
  std::optional<Ready<BackwardSm80Args>> gradients;
  std::optional<Ready<BackwardFinishSm80Args>> finish;
  PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &prepare));
  PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &gradients));
  PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &finish));
  *found = prepare && gradients && finish;
  if (!*found) return ffi::Error::Success();

  const Grid grid = KeyGrid(s, gradients->block());
  PACKAX_TRY(CheckGrid(gradients->kernel, grid));
  PACKAX_TRY(LaunchPrepare(*prepare, stream, c, true));
  PACKAX_TRY(Launch(*gradients, stream, grid,
                    BackwardSm80Args{
                        .query = FirstHead(c.query, s),
                        .key = c.key.untyped_data(),
                        .value = c.value.untyped_data(),
                        .dout = FirstHead(c.dout, s),
                        .lse2 = at.lse2,
                        .delta = at.delta,
                        .lo = at.lo,
                        .hi = at.hi,
                        .dq_sum = at.dq_sum,
                        .dk = c.dk.untyped_data(),
                        .dv = c.dv.untyped_data(),
                        PACKAX_MASK_ELEMENTS(m),
                        .kv_blocks = c.kv_blocks.untyped_data(),
                        .kv_order = c.kv_order.untyped_data(),
                        .scale = c.scores.scale,
                        .segment_check = m.segment_check,
                        PACKAX_SIZES_OF_ROWS(s),
                    }));
  if (!c.needs_dq) return ffi::Error::Success();
  return Launch(*finish, stream, Grid{w.rows / finish->block()},
                BackwardFinishSm80Args{
                    .dq_sum = at.dq_sum,
                    .dq = FirstHead(c.dq, s),
                    .scale = c.scores.scale,
                    .q_len = s.q_len,
                    .heads = s.heads,
                    .row_heads = s.row_heads,
                });
}

}  // namespace packax
