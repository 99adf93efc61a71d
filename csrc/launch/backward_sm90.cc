// Tensor maps, sections of the workspace, and which of the kernels run.

#include "launch/backward_sm90.h"

#include "launch/heuristics.h"

namespace packax {
namespace {

// The tensor maps of a kernel that makes dK and dV, of blocks of rows that a tile of keys meets.
template <typename Args>
ffi::Error MapTiles(const Ready<Args>& kernel, Stream stream, const BackwardCall& c, Args* args) {
  const Shape& s = c.shape;
  const Sm90Workspace w(s);
  const Sections at(c, w);
  const auto line = [](const char* name, const void* data, TensorMapElement element, int64_t n) {
    return TensorView{name, data, element, 1, 1, n, n};
  };
  constexpr TensorMapElement f32 = TensorMapElement::kF32, i32 = TensorMapElement::kI32;
  PACKAX_TRY(Encode(kernel, stream, Args::kQuery, RowsOf("query", c.query, s), &args->query));
  PACKAX_TRY(Encode(kernel, stream, Args::kKey, KeysOf("key", c.key, s), &args->key));
  PACKAX_TRY(Encode(kernel, stream, Args::kValue, KeysOf("value", c.value, s), &args->value));
  PACKAX_TRY(Encode(kernel, stream, Args::kDout, RowsOf("dout", c.dout, s), &args->dout));
  PACKAX_TRY(Encode(kernel, stream, Args::kLse2, line("lse2", at.lse2, f32, w.rows), &args->lse2));
  PACKAX_TRY(
      Encode(kernel, stream, Args::kDelta, line("delta", at.delta, f32, w.rows), &args->delta));
  PACKAX_TRY(Encode(kernel, stream, Args::kLo, line("lo", at.lo, i32, w.mask_rows), &args->lo));
  PACKAX_TRY(Encode(kernel, stream, Args::kHi, line("hi", at.hi, i32, w.mask_rows), &args->hi));
  PACKAX_TRY(Encode(kernel, stream, Args::kDk, KeysOf("dk", c.dk, s), &args->dk));
  return Encode(kernel, stream, Args::kDv, KeysOf("dv", c.dv, s), &args->dv);
}

// Members of `Args{...}` of kernels that make dK and dV, as those of shape.h. Maps are filled
// in by MapTiles.
#define PACKAX_NO_TILES                                                                         \
  .query = {}, .key = {}, .value = {}, .dout = {}, .lse2 = {}, .delta = {}, .lo = {}, .hi = {}, \
  .dk = {}, .dv = {}
#define PACKAX_KEY_ARRAYS(c)                                                 \
  PACKAX_MASK_ELEMENTS((c).mask), .kv_blocks = (c).kv_blocks.untyped_data(), \
      .kv_order = (c).kv_order.untyped_data()
#define PACKAX_KEYS(c) PACKAX_KEY_ARRAYS(c), .scale = (c).scores.scale
#define PACKAX_TESTS_AND_SIZES(c) .segment_check = (c).mask.segment_check, PACKAX_SIZES((c).shape)

void Fill(const BackwardCall& c, const Sections& at, BackwardSm90Args* args) {
  *args = {PACKAX_NO_TILES, .dq_sum = at.dq_sum, PACKAX_KEYS(c), PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections& at, BackwardSm90SoftCapArgs* args) {
  *args = {PACKAX_NO_TILES, .dq_sum = at.dq_sum, PACKAX_KEYS(c), .soft_cap = c.scores.soft_cap,
           PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections& at, BackwardSm90AlibiArgs* args) {
  *args = {
      PACKAX_NO_TILES,         .dq_sum = at.dq_sum,
      PACKAX_KEY_ARRAYS(c),    .slopes = c.scores.slopes.untyped_data(),
      .scale = c.scores.scale, PACKAX_TESTS_AND_SIZES(c),
  };
}

void Fill(const BackwardCall& c, const Sections&, BackwardDkdvSm90Args* args) {
  *args = {PACKAX_NO_TILES, PACKAX_KEYS(c), PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections&, BackwardDkdvSm90SoftCapArgs* args) {
  *args = {PACKAX_NO_TILES, PACKAX_KEYS(c), .soft_cap = c.scores.soft_cap,
           PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections&, BackwardDkdvSm90BlockListsArgs* args) {
  *args = {
      PACKAX_NO_TILES,
      PACKAX_KEY_ARRAYS(c),
      .block_mask = c.block_mask.bits.untyped_data(),
      .kv_block_lists = c.block_mask.kv_lists.untyped_data(),
      .scale = c.scores.scale,
      .segment_check = c.mask.segment_check,
      PACKAX_BLOCK_MASK_SIZES(c.shape, c.block_mask),
  };
}

// Likewise of the kernel that makes dQ.
#define PACKAX_ROWS(c, at)                                                                     \
  .query = {}, .key = {}, .value = {}, .dout = {}, .dq = {}, .lse2 = (at).lse2,                \
  .delta = (at).delta, PACKAX_MASK_ROWS((c).mask), .q_order = (c).mask.q_order.untyped_data(), \
  .counter = (at).counter, .scale = (c).scores.scale

void Fill(const BackwardCall& c, const Sections& at, BackwardDqSm90Args* args) {
  *args = {PACKAX_ROWS(c, at), PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections& at, BackwardDqSm90SoftCapArgs* args) {
  *args = {PACKAX_ROWS(c, at), .soft_cap = c.scores.soft_cap, PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections& at, BackwardDqSm90BlockListsArgs* args) {
  *args = {
      .query = {},
      .key = {},
      .value = {},
      .dout = {},
      .dq = {},
      .lse2 = at.lse2,
      .delta = at.delta,
      PACKAX_MASK_ROWS(c.mask),
      .q_order = c.mask.q_order.untyped_data(),
      .counter = at.counter,
      .block_mask = c.block_mask.bits.untyped_data(),
      .q_block_lists = c.block_mask.q_lists.untyped_data(),
      .scale = c.scores.scale,
      .segment_check = c.mask.segment_check,
      PACKAX_BLOCK_MASK_SIZES(c.shape, c.block_mask),
  };
}

// One kernel for all gradients. The sum of dQ is in float32 and comes together in any order; dK and
// dV do not depend on it.
template <typename GradientsArgs>
struct Fused {
  std::optional<Ready<BackwardPrepareArgs>> prepare;
  std::optional<Ready<GradientsArgs>> gradients;
  std::optional<Ready<BackwardFinishArgs>> finish;

  ffi::Error Find(Device* device, const Shape& s) {
    PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &prepare));
    PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &gradients));
    return PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &finish);
  }
  bool found() const { return prepare && gradients && finish; }
};

template <typename Args>
ffi::Error LaunchBackward(const Fused<Args>& kernels, Stream stream, const BackwardCall& c) {
  const Shape& s = c.shape;
  const Sm90Workspace w(s);
  const Sections at(c, w);
  const auto& gradients = *kernels.gradients;
  const Grid grid = KeyGrid(s, gradients.block());
  PACKAX_TRY(CheckGrid(gradients.kernel, grid));
  Args args;
  Fill(c, at, &args);
  PACKAX_TRY(MapTiles(gradients, stream, c, &args));
  if (!stream) return ffi::Error::Success();
  PACKAX_TRY(LaunchPrepare(*kernels.prepare, stream, c, true));
  PACKAX_TRY(Launch(gradients, stream, grid, args));
  if (!c.needs_dq) return ffi::Error::Success();
  return Launch(*kernels.finish, stream, Grid{w.rows / kernels.finish->block()},
                BackwardFinishArgs{
                    .dq_sum = at.dq_sum,
                    .dq = FirstHead(c.dq, s),
                    .scale = c.scores.scale,
                    .q_len = s.q_len,
                    .heads = s.heads,
                    .row_heads = s.row_heads,
                });
}

// One kernel for dK and dV and one for dQ, which add nothing to memory: the same bits every run,
// and only the gradients that are needed. Also where there is no kernel for all.
template <typename DkdvArgs, typename DqArgs>
struct Separate {
  std::optional<Ready<BackwardPrepareArgs>> prepare;
  std::optional<Ready<DkdvArgs>> dkdv;
  std::optional<Ready<DqArgs>> dq;

  ffi::Error Find(Device* device, const Shape& s) {
    PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &prepare));
    PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &dkdv));
    return PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &dq);
  }
  bool found() const { return prepare && dkdv && dq; }
};

template <typename Args>
ffi::Error MapRows(const Ready<Args>& dq, Stream stream, const BackwardCall& c, Args* args) {
  const Shape& s = c.shape;
  PACKAX_TRY(Encode(dq, stream, Args::kQuery, RowsOf("query", c.query, s), &args->query));
  PACKAX_TRY(Encode(dq, stream, Args::kKey, KeysOf("key", c.key, s), &args->key));
  PACKAX_TRY(Encode(dq, stream, Args::kValue, KeysOf("value", c.value, s), &args->value));
  PACKAX_TRY(Encode(dq, stream, Args::kDout, RowsOf("dout", c.dout, s), &args->dout));
  return Encode(dq, stream, Args::kDq, RowsOf("dq", c.dq, s), &args->dq);
}

template <typename DkdvArgs, typename DqArgs>
ffi::Error LaunchBackward(const Separate<DkdvArgs, DqArgs>& kernels, Stream stream,
                          const BackwardCall& c) {
  const Shape& s = c.shape;
  const Sections at(c, Sm90Workspace(s));
  const auto& dkdv = *kernels.dkdv;
  const auto& dq = *kernels.dq;
  const Grid grid = KeyGrid(s, dkdv.block());
  // What can be refused is, before the first launch.
  DkdvArgs dkdv_args;
  if (c.needs_dkv) {
    PACKAX_TRY(CheckGrid(dkdv.kernel, grid));
    Fill(c, at, &dkdv_args);
    PACKAX_TRY(MapTiles(dkdv, stream, c, &dkdv_args));
  }
  DqArgs dq_args;
  if (c.needs_dq) {
    Fill(c, at, &dq_args);
    PACKAX_TRY(MapRows(dq, stream, c, &dq_args));
  }
  if (!stream) return ffi::Error::Success();
  PACKAX_TRY(LaunchPrepare(*kernels.prepare, stream, c, false));
  if (c.needs_dkv) PACKAX_TRY(Launch(dkdv, stream, grid, dkdv_args));
  if (!c.needs_dq) return ffi::Error::Success();
  const int64_t tiles = Product({s.heads, s.batch, CeilDiv(s.q_len, dq.block())});
  const Device& device = *dq.kernel.device;
  PACKAX_TRY(Clear(device, *stream, at.counter));
  return Launch(dq, stream, Grid{PersistentPrograms(tiles, device)}, dq_args);
}

template <typename Kernels>
ffi::Error RunIfFound(Device* device, Stream stream, const BackwardCall& c, bool* found) {
  Kernels kernels;
  PACKAX_TRY(kernels.Find(device, c.shape));
  *found = kernels.found();
  return *found ? LaunchBackward(kernels, stream, c) : ffi::Error::Success();
}

// The fused kernel if there is room for its sum, else or without it the separate ones.
template <typename FusedArgs, typename DkdvArgs, typename DqArgs>
ffi::Error RunEither(Device* device, Stream stream, const BackwardCall& c, bool* found) {
  if (c.algorithm == Algorithm::kSm90Fused) {
    PACKAX_TRY(RunIfFound<Fused<FusedArgs>>(device, stream, c, found));
    if (*found) return ffi::Error::Success();
  }
  return RunIfFound<Separate<DkdvArgs, DqArgs>>(device, stream, c, found);
}

}  // namespace

ffi::Error LaunchPrepare(const Ready<BackwardPrepareArgs>& prepare, Stream stream,
                         const BackwardCall& c, bool clear_dq) {
  const Shape& s = c.shape;
  const Mask& m = c.mask;
  const Sm90Workspace w(s);
  const Sections at(c, w);
  return Launch(prepare, stream, Grid{w.rows / prepare.block()},
                BackwardPrepareArgs{
                    .out = FirstHead(c.out, s),
                    .dout = FirstHead(c.dout, s),
                    .lse = c.lse.untyped_data(),
                    .dlse = c.dlse.untyped_data(),
                    .q_lo = m.q_lo.untyped_data(),
                    .q_hi = m.q_hi.untyped_data(),
                    .delta = at.delta,
                    .lse2 = at.lse2,
                    .lo = at.lo,
                    .hi = at.hi,
                    .dq_sum = at.dq_sum,
                    .has_dlse = c.has_dlse,
                    .clear_dq = clear_dq,
                    .batch = s.batch,
                    .mask_batch = s.mask_batch,
                    .q_len = s.q_len,
                    .heads = s.heads,
                    .row_heads = s.row_heads,
                });
}

int64_t WorkspaceSize(Algorithm algorithm, const Shape& s) {
  const Sm90Workspace w(s);
  const int64_t sections = Sum({w.rows, w.rows, w.mask_rows, w.mask_rows});
  switch (algorithm) {
    case Algorithm::kPortable:
      return w.rows;
    case Algorithm::kSm90Separate:
      return Sum({sections, 1});
    case Algorithm::kSm90Fused:
      return Sum({sections, Product({w.rows, s.qk_dim})});
  }
  __builtin_unreachable();
}

ffi::Error BackwardOnSm90(Device* device, Stream stream, const BackwardCall& c, bool* found) {
  *found = false;
  const bool none = c.algorithm == Algorithm::kPortable || !Sm90Workspace(c.shape).fits_int32();
  if (none || c.needs_score_grads || !TakesSm90(c)) return ffi::Error::Success();
  if (c.block_mask.there()) {
    using Kernels = Separate<BackwardDkdvSm90BlockListsArgs, BackwardDqSm90BlockListsArgs>;
    return RunIfFound<Kernels>(device, stream, c, found);
  }
  if (c.scores.only_slopes()) {
    if (c.algorithm != Algorithm::kSm90Fused) return ffi::Error::Success();
    return RunIfFound<Fused<BackwardSm90AlibiArgs>>(device, stream, c, found);
  }
  if (c.scores.soft_cap > 0) {
    return RunEither<BackwardSm90SoftCapArgs, BackwardDkdvSm90SoftCapArgs,
                     BackwardDqSm90SoftCapArgs>(device, stream, c, found);
  }
  return RunEither<BackwardSm90Args, BackwardDkdvSm90Args, BackwardDqSm90Args>(device, stream, c,
                                                                               found);
}

}  // namespace packax
