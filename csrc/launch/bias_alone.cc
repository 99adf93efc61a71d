// The kernels with a bias array and nothing else that changes scores, which some GPUs have for head
// dims of at least the call's.

#include "launch/bias_alone.h"

#include "launch/portable.h"

namespace packax {
namespace {

constexpr int64_t kElementsAtOnce = 8;  // 16 bytes

// The bias is of the query's dtype, and its rows begin at 16 bytes.
bool Takes(const AttentionCall& c) {
  return c.bias.bias_kind == 1 && c.bias.dropout_threshold == 0 && !c.scores.any() &&
         !c.block_mask.there() && c.shape.kv_len % kElementsAtOnce == 0 &&
         c.shape.heads == c.shape.row_heads;
}

template <typename Args>
ffi::Error FindIfAny(Device* device, const Shape& s, std::optional<Ready<Args>>* ready) {
  ready->reset();
  const Query query{Args::kKernel, device->cc, s.kernel_dtype(), s.qk_dim, s.v_dim, device->driver};
  const Variant* variant = FindCovering(query);
  if (variant == nullptr) return ffi::Error::Success();
  return Load(device, *variant, &ready->emplace().kernel);
}

// Members of all four kernels' arguments, up to their sizes.
#define PACKAX_BIAS_ALONE(c)                                          \
  .scale = (c).scores.scale, .segment_check = (c).mask.segment_check, \
  .bias_axes = (c).bias.bias_axes
#define PACKAX_BIAS_ALONE_SIZES(s)                                                            \
  .batch = (s).batch, .mask_batch = (s).mask_batch, .q_len = (s).q_len, .kv_len = (s).kv_len, \
  .heads = (s).heads, .kv_heads = (s).kv_heads, .qk_dim = (s).qk_dim, .v_dim = (s).v_dim
#define PACKAX_BACKWARD_OPERANDS(c)                                   \
  .query = (c).query.untyped_data(), .key = (c).key.untyped_data(),   \
  .value = (c).value.untyped_data(), .dout = (c).dout.untyped_data(), \
  .lse = (c).lse.untyped_data(), .delta = (c).workspace.untyped_data()

}  // namespace

ffi::Error ForwardWithBiasAlone(Device* device, Stream stream, const ForwardCall& c, bool* done) {
  *done = false;
  if (!Takes(c) || c.needs_row_max) return ffi::Error::Success();
  std::optional<Ready<ForwardBiasAloneArgs>> forward;
  PACKAX_TRY(FindIfAny(device, c.shape, &forward));
  if (!forward) return ffi::Error::Success();
  *done = true;
  return Launch(*forward, stream, QueryGrid(c.shape, forward->block()),
                ForwardBiasAloneArgs{
                    .query = c.query.untyped_data(),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .out = c.out.untyped_data(),
                    .lse = c.lse.untyped_data(),
                    PACKAX_MASK_ROWS(c.mask),
                    .q_order = c.mask.q_order.untyped_data(),
                    .bias = c.bias.bias,
                    PACKAX_BIAS_ALONE(c),
                    PACKAX_BIAS_ALONE_SIZES(c.shape),
                });
}

ffi::Error BackwardWithBiasAlone(Device* device, Stream stream, const BackwardCall& c, bool* done) {
  *done = false;
  if (!Takes(c) || c.needs_score_grads) return ffi::Error::Success();
  const Shape& s = c.shape;
  Ready<BackwardDeltaFallbackArgs> delta;
  std::optional<Ready<BackwardDkdvBiasAloneArgs>> dkdv;
  std::optional<Ready<BackwardDqBiasAloneArgs>> dq;
  std::optional<Ready<BackwardDbiasAloneArgs>> dbias;
  PACKAX_TRY(FindDelta(device, s, &delta));
  PACKAX_TRY(FindIfAny(device, s, &dkdv));
  PACKAX_TRY(FindIfAny(device, s, &dq));
  PACKAX_TRY(FindIfAny(device, s, &dbias));
  if (!dkdv || !dq || !dbias) return ffi::Error::Success();
  *done = true;
  PACKAX_TRY(LaunchDelta(delta, stream, c));
  if (c.needs_dkv) {
    PACKAX_TRY(Launch(*dkdv, stream, KeyGrid(s, dkdv->block()),
                      BackwardDkdvBiasAloneArgs{
                          PACKAX_BACKWARD_OPERANDS(c),
                          .dk = c.dk.untyped_data(),
                          .dv = c.dv.untyped_data(),
                          PACKAX_MASK_ROWS(c.mask),
                          .kv_blocks = c.kv_blocks.untyped_data(),
                          .kv_order = c.kv_order.untyped_data(),
                          .bias = c.bias.bias,
                          PACKAX_BIAS_ALONE(c),
                          PACKAX_BIAS_ALONE_SIZES(s),
                      }));
  }
  if (c.needs_dq) {
    PACKAX_TRY(Launch(*dq, stream, QueryGrid(s, dq->block()),
                      BackwardDqBiasAloneArgs{
                          PACKAX_BACKWARD_OPERANDS(c),
                          .dq = c.dq.untyped_data(),
                          PACKAX_MASK_ROWS(c.mask),
                          .q_order = c.mask.q_order.untyped_data(),
                          .bias = c.bias.bias,
                          PACKAX_BIAS_ALONE(c),
                          PACKAX_BIAS_ALONE_SIZES(s),
                      }));
  }
  if (c.dbias == nullptr) return ffi::Error::Success();
  const int64_t block = dbias->block();  // a program owns a tile of the bias, as many rows as keys
  return Launch(*dbias, stream,
                Grid{Product({c.bias.batch, c.bias.heads, CeilDiv(c.bias.rows, block),
                              CeilDiv(s.kv_len, block)})},
                BackwardDbiasAloneArgs{
                    PACKAX_BACKWARD_OPERANDS(c),
                    .dbias = c.dbias,
                    PACKAX_MASK_ROWS(c.mask),
                    .bias = c.bias.bias,
                    PACKAX_BIAS_ALONE(c),
                    PACKAX_BIAS_ALONE_SIZES(s),
                });
}

}  // namespace packax
