#include "launch/portable.h"

#include "launch/bias.h"

namespace packax {

ffi::Error CheckAllHeads(const Shape& s) {
  PACKAX_CHECK(s.heads == s.row_heads, kUnimplemented)
      << "attributes first_head and heads are " << s.first_head << " and " << s.heads
      << ", but the fallback kernels take all of the query's " << s.row_heads;
  return ffi::Error::Success();
}

ffi::Error FindDelta(Device* device, const Shape& s, Ready<BackwardDeltaFallbackArgs>* ready) {
  PACKAX_TRY(CheckAllHeads(s));
  const Dtype dtype = s.dtype == ffi::DataType::F32 ? Dtype::kF32 : s.kernel_dtype();
  return PrepareCovering(device, dtype, s.qk_dim, s.v_dim, ready);
}

ffi::Error LaunchDelta(const Ready<BackwardDeltaFallbackArgs>& delta, Stream stream,
                       const BackwardCall& c) {
  const Shape& s = c.shape;
  return Launch(delta, stream, Grid{Product({CeilDiv(s.q_len, delta.block()), s.heads, s.batch})},
                BackwardDeltaFallbackArgs{
                    .out = c.out.untyped_data(),
                    .dout = c.dout.untyped_data(),
                    .dlse = c.dlse.untyped_data(),
                    .delta = c.workspace.untyped_data(),
                    .q_lo = c.mask.q_lo.untyped_data(),
                    .q_hi = c.mask.q_hi.untyped_data(),
                    .has_dlse = c.has_dlse,
                    .batch = s.batch,
                    .mask_batch = s.mask_batch,
                    .q_len = s.q_len,
                    .heads = s.heads,
                    .v_dim = s.v_dim,
                });
}

namespace {

ffi::Error LaunchForward(const Ready<ForwardArgs>& forward, Stream stream, const ForwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(forward, stream, QueryGrid(s, forward.block()),
                ForwardArgs{
                    .query = FirstHead(c.query, s),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .out = FirstHead(c.out, s),
                    .lse = c.lse.untyped_data(),
                    PACKAX_MASK_ROWS(m),
                    .q_order = m.q_order.untyped_data(),
                    .scale = c.scores.scale,
                    .segment_check = m.segment_check,
                    PACKAX_SIZES_OF_ROWS(s),
                });
}

ffi::Error LaunchForward(const Ready<ForwardFallbackArgs>& forward, Stream stream,
                         const ForwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(forward, stream, QueryGrid(s, forward.block()),
                ForwardFallbackArgs{
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
                    PACKAX_SCORE_PARAMS(c.scores),
                    .segment_check = m.segment_check,
                    PACKAX_FALLBACK_SIZES(s, c.scores, c.block_mask),
                });
}

ffi::Error LaunchDelta(const Ready<BackwardDeltaArgs>& delta, Stream stream,
                       const BackwardCall& c) {
  const Shape& s = c.shape;
  return Launch(delta, stream, Grid{Product({CeilDiv(s.q_len, delta.block()), s.heads, s.batch})},
                BackwardDeltaArgs{
                    .out = FirstHead(c.out, s),
                    .dout = FirstHead(c.dout, s),
                    .dlse = c.dlse.untyped_data(),
                    .delta = c.workspace.untyped_data(),
                    .q_lo = c.mask.q_lo.untyped_data(),
                    .q_hi = c.mask.q_hi.untyped_data(),
                    .has_dlse = c.has_dlse,
                    .batch = s.batch,
                    .mask_batch = s.mask_batch,
                    .q_len = s.q_len,
                    .heads = s.heads,
                    .row_heads = s.row_heads,
                });
}

ffi::Error LaunchDkdv(const Ready<BackwardDkdvArgs>& dkdv, Stream stream, const BackwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(dkdv, stream, KeyGrid(s, dkdv.block()),
                BackwardDkdvArgs{
                    .query = FirstHead(c.query, s),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .dout = FirstHead(c.dout, s),
                    .lse = c.lse.untyped_data(),
                    .delta = c.workspace.untyped_data(),
                    .dk = c.dk.untyped_data(),
                    .dv = c.dv.untyped_data(),
                    PACKAX_MASK_ROWS(m),
                    .kv_blocks = c.kv_blocks.untyped_data(),
                    .kv_order = c.kv_order.untyped_data(),
                    .scale = c.scores.scale,
                    .segment_check = m.segment_check,
                    PACKAX_SIZES_OF_ROWS(s),
                });
}

ffi::Error LaunchDkdv(const Ready<BackwardDkdvFallbackArgs>& dkdv, Stream stream,
                      const BackwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(dkdv, stream, KeyGrid(s, dkdv.block()),
                BackwardDkdvFallbackArgs{
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
                    PACKAX_SCORE_PARAMS(c.scores),
                    .segment_check = m.segment_check,
                    PACKAX_FALLBACK_SIZES(s, c.scores, c.block_mask),
                });
}

ffi::Error LaunchDq(const Ready<BackwardDqArgs>& dq, Stream stream, const BackwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(dq, stream, QueryGrid(s, dq.block()),
                BackwardDqArgs{
                    .query = FirstHead(c.query, s),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .dout = FirstHead(c.dout, s),
                    .lse = c.lse.untyped_data(),
                    .delta = c.workspace.untyped_data(),
                    .dq = FirstHead(c.dq, s),
                    PACKAX_MASK_ROWS(m),
                    .q_order = m.q_order.untyped_data(),
                    .scale = c.scores.scale,
                    .segment_check = m.segment_check,
                    PACKAX_SIZES_OF_ROWS(s),
                });
}

ffi::Error LaunchDq(const Ready<BackwardDqFallbackArgs>& dq, Stream stream, const BackwardCall& c) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  return Launch(dq, stream, QueryGrid(s, dq.block()),
                BackwardDqFallbackArgs{
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
                    PACKAX_SCORE_PARAMS(c.scores),
                    .segment_check = m.segment_check,
                    .has_score_grads = c.needs_score_grads,
                    PACKAX_FALLBACK_SIZES(s, c.scores, c.block_mask),
                });
}

// The kernels for just these head dims.
struct Plain {
  using Forward = ForwardArgs;
  using Delta = BackwardDeltaArgs;
  using Dkdv = BackwardDkdvArgs;
  using Dq = BackwardDqArgs;

  template <typename Args>
  static ffi::Error Find(Device* device, const Shape& s, Ready<Args>* ready) {
    return Prepare(device, s.kernel_dtype(), s.qk_dim, s.v_dim, ready);
  }
};

// Those for head dims of at least these.
struct Fallback {
  using Forward = ForwardFallbackArgs;
  using Delta = BackwardDeltaFallbackArgs;
  using Dkdv = BackwardDkdvFallbackArgs;
  using Dq = BackwardDqFallbackArgs;

  template <typename Args>
  static ffi::Error Find(Device* device, const Shape& s, Ready<Args>* ready) {
    if constexpr (std::is_same_v<Args, Delta>) return FindDelta(device, s, ready);
    PACKAX_TRY(CheckAllHeads(s));
    return PrepareCovering(device, s.kernel_dtype(), s.qk_dim, s.v_dim, ready);
  }
};

template <typename Kernels>
ffi::Error Forward(Device* device, Stream stream, const ForwardCall& c) {
  Ready<typename Kernels::Forward> forward;
  PACKAX_TRY(Kernels::Find(device, c.shape, &forward));
  return LaunchForward(forward, stream, c);
}

template <typename Kernels>
ffi::Error Backward(Device* device, Stream stream, const BackwardCall& c) {
  // All kernels and grids before the first launch: what is missing or too large must not leave half
  // a backward behind.
  Ready<typename Kernels::Delta> delta;
  Ready<typename Kernels::Dkdv> dkdv;
  Ready<typename Kernels::Dq> dq;
  PACKAX_TRY(Kernels::Find(device, c.shape, &delta));
  PACKAX_TRY(Kernels::Find(device, c.shape, &dkdv));
  PACKAX_TRY(Kernels::Find(device, c.shape, &dq));
  if (c.needs_dkv) PACKAX_TRY(CheckGrid(dkdv.kernel, KeyGrid(c.shape, dkdv.block())));
  if (c.needs_dq) PACKAX_TRY(CheckGrid(dq.kernel, QueryGrid(c.shape, dq.block())));
  PACKAX_TRY(LaunchDelta(delta, stream, c));
  if (c.needs_dkv) PACKAX_TRY(LaunchDkdv(dkdv, stream, c));
  return c.needs_dq ? LaunchDq(dq, stream, c) : ffi::Error::Success();
}

// The plain kernels where they can; also where there are no others, so that an error is about them.
template <typename PlainArgs, typename FallbackArgs, typename Call>
bool TakesPlain(const Device& device, const Call& c) {
  const Shape& s = c.shape;
  Query query{PlainArgs::kKernel, device.cc, s.kernel_dtype(), s.qk_dim, s.v_dim, device.driver};
  if (!c.plain()) return false;
  if (Find(query) != nullptr) return true;
  query.kernel = FallbackArgs::kKernel;
  return FindCovering(query) == nullptr && s.dtype != ffi::DataType::F32;
}

}  // namespace

ffi::Error ForwardPortable(Device* device, Stream stream, const ForwardCall& c) {
  if (c.bias.any()) return ForwardWithBias(device, stream, c);
  return TakesPlain<ForwardArgs, ForwardFallbackArgs>(*device, c)
             ? Forward<Plain>(device, stream, c)
             : Forward<Fallback>(device, stream, c);
}

ffi::Error BackwardPortable(Device* device, Stream stream, const BackwardCall& c) {
  if (c.bias.any()) return BackwardWithBias(device, stream, c);
  return TakesPlain<BackwardDqArgs, BackwardDqFallbackArgs>(*device, c)
             ? Backward<Plain>(device, stream, c)
             : Backward<Fallback>(device, stream, c);
}

}  // namespace packax
