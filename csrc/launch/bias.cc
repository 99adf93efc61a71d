// The kernels with a bias that is an array and with dropout, for head dims of at least the call's.

#include "launch/bias.h"

#include "launch/bias_alone.h"
#include "launch/portable.h"

namespace packax {
namespace {

ffi::Error LaunchForward(const Ready<ForwardBiasArgs>& forward, Stream stream,
                         const ForwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(forward, stream, QueryGrid(s, forward.block()),
                ForwardBiasArgs{
                    .query = c.query.untyped_data(),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .out = c.out.untyped_data(),
                    .lse = c.lse.untyped_data(),
                    // Of no elements where nobody asks for it: the kernel must not write there.
                    .row_max = c.needs_row_max ? c.row_max.untyped_data() : nullptr,
                    PACKAX_MASK_ROWS(m),
                    .q_order = m.q_order.untyped_data(),
                    .block_mask = c.block_mask.bits.untyped_data(),
                    .q_block_lists = c.block_mask.q_lists.untyped_data(),
                    PACKAX_BIAS_PARAMS(c.scores, c.bias),
                    .segment_check = m.segment_check,
                    PACKAX_BIAS_NUMBERS(c.bias),
                    PACKAX_FALLBACK_SIZES(s, c.scores, c.block_mask),
                });
}

ffi::Error LaunchDkdv(const Ready<BackwardDkdvBiasArgs>& dkdv, Stream stream,
                      const BackwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(dkdv, stream, KeyGrid(s, dkdv.block()),
                BackwardDkdvBiasArgs{
                    .query = c.query.untyped_data(),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .dout = c.dout.untyped_data(),
                    .lse = c.lse.untyped_data(),
                    .delta = c.workspace.untyped_data(),
                    .dk = c.dk.untyped_data(),
                    .dv = c.dv.untyped_data(),
                    PACKAX_MASK_ROWS(m),
                    .kv_blocks = c.kv_blocks.untyped_data(),
                    .kv_order = c.kv_order.untyped_data(),
                    .block_mask = c.block_mask.bits.untyped_data(),
                    .kv_block_lists = c.block_mask.kv_lists.untyped_data(),
                    PACKAX_BIAS_PARAMS(c.scores, c.bias),
                    .segment_check = m.segment_check,
                    PACKAX_BIAS_NUMBERS(c.bias),
                    PACKAX_FALLBACK_SIZES(s, c.scores, c.block_mask),
                });
}

ffi::Error LaunchDq(const Ready<BackwardDqBiasArgs>& dq, Stream stream, const BackwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(dq, stream, QueryGrid(s, dq.block()),
                BackwardDqBiasArgs{
                    .query = c.query.untyped_data(),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .dout = c.dout.untyped_data(),
                    .lse = c.lse.untyped_data(),
                    .delta = c.workspace.untyped_data(),
                    .dq = c.dq.untyped_data(),
                    .score_grads = c.score_grads.untyped_data(),
                    PACKAX_MASK_ROWS(m),
                    .q_order = m.q_order.untyped_data(),
                    .block_mask = c.block_mask.bits.untyped_data(),
                    .q_block_lists = c.block_mask.q_lists.untyped_data(),
                    PACKAX_BIAS_PARAMS(c.scores, c.bias),
                    .segment_check = m.segment_check,
                    .has_score_grads = c.needs_score_grads,
                    PACKAX_BIAS_NUMBERS(c.bias),
                    PACKAX_FALLBACK_SIZES(s, c.scores, c.block_mask),
                });
}

// A program owns a tile of the bias, as many rows as keys.
ffi::Error LaunchDbias(const Ready<BackwardDbiasArgs>& dbias, Stream stream,
                       const BackwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  const int64_t block = dbias.block();
  return Launch(dbias, stream,
                Grid{Product({c.bias.batch, c.bias.heads, CeilDiv(c.bias.rows, block),
                              CeilDiv(s.kv_len, block)})},
                BackwardDbiasArgs{
                    .query = c.query.untyped_data(),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .dout = c.dout.untyped_data(),
                    .lse = c.lse.untyped_data(),
                    .delta = c.workspace.untyped_data(),
                    .dbias = c.dbias,
                    PACKAX_MASK_ROWS(m),
                    .block_mask = c.block_mask.bits.untyped_data(),
                    PACKAX_BIAS_PARAMS(c.scores, c.bias),
                    .segment_check = m.segment_check,
                    PACKAX_BIAS_NUMBERS(c.bias),
                    PACKAX_FALLBACK_SIZES(s, c.scores, c.block_mask),
                });
}

template <typename Args>
ffi::Error FindCovering(Device* device, const Shape& s, Ready<Args>* ready) {
  PACKAX_TRY(CheckAllHeads(s));
  return PrepareCovering(device, s.kernel_dtype(), s.qk_dim, s.v_dim, ready);
}

}  // namespace

ffi::Error ForwardWithBias(Device* device, Stream stream, const ForwardCall& c) {
  bool done = false;
  PACKAX_TRY(ForwardWithBiasAlone(device, stream, c, &done));
  if (done) return ffi::Error::Success();
  Ready<ForwardBiasArgs> forward;
  PACKAX_TRY(FindCovering(device, c.shape, &forward));
  return LaunchForward(forward, stream, c);
}

ffi::Error BackwardWithBias(Device* device, Stream stream, const BackwardCall& c) {
  bool done = false;
  PACKAX_TRY(BackwardWithBiasAlone(device, stream, c, &done));
  if (done) return ffi::Error::Success();
  // All kernels before the first launch: a missing one must not leave half a backward behind.
  Ready<BackwardDeltaFallbackArgs> delta;
  Ready<BackwardDkdvBiasArgs> dkdv;
  Ready<BackwardDqBiasArgs> dq;
  Ready<BackwardDbiasArgs> dbias;
  PACKAX_TRY(FindDelta(device, c.shape, &delta));
  PACKAX_TRY(FindCovering(device, c.shape, &dkdv));
  PACKAX_TRY(FindCovering(device, c.shape, &dq));
  PACKAX_TRY(FindCovering(device, c.shape, &dbias));
  PACKAX_TRY(LaunchDelta(delta, stream, c));
  if (c.needs_dkv) PACKAX_TRY(LaunchDkdv(dkdv, stream, c));
  if (c.needs_dq) PACKAX_TRY(LaunchDq(dq, stream, c));
  return c.dbias != nullptr ? LaunchDbias(dbias, stream, c) : ffi::Error::Success();
}

}  // namespace packax
