// The backward's kernels for Hopper: tensor maps, the workspace, and which of them run.

#include "launch/backward_sm90.h"

namespace packax {
namespace {

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

// The tensor maps of a kernel that makes dK and dV, of blocks of rows that a tile of keys meets.
template <typename Args>
ffi::Error MapTiles(const Ready<Args>& kernel, const BackwardCall& c, Args* args) {
  const Shape& s = c.shape;
  const Sm90Workspace w(s);
  const Sections at(c, w);
  const auto line = [](const char* name, const void* data, TensorMapElement element, int64_t n) {
    return TensorView{name, data, element, 1, 1, n, n};
  };
  constexpr TensorMapElement f32 = TensorMapElement::kF32, i32 = TensorMapElement::kI32;
  PACKAX_TRY(Encode(kernel, Args::kQuery, RowsOf("query", c.query, s), &args->query));
  PACKAX_TRY(Encode(kernel, Args::kKey, KeysOf("key", c.key, s), &args->key));
  PACKAX_TRY(Encode(kernel, Args::kValue, KeysOf("value", c.value, s), &args->value));
  PACKAX_TRY(Encode(kernel, Args::kDout, RowsOf("dout", c.dout, s), &args->dout));
  PACKAX_TRY(Encode(kernel, Args::kLse2, line("lse2", at.lse2, f32, w.rows), &args->lse2));
  PACKAX_TRY(Encode(kernel, Args::kDelta, line("delta", at.delta, f32, w.rows), &args->delta));
  PACKAX_TRY(Encode(kernel, Args::kLo, line("lo", at.lo, i32, w.mask_rows), &args->lo));
  PACKAX_TRY(Encode(kernel, Args::kHi, line("hi", at.hi, i32, w.mask_rows), &args->hi));
  PACKAX_TRY(Encode(kernel, Args::kDk, KeysOf("dk", c.dk, s), &args->dk));
  return Encode(kernel, Args::kDv, KeysOf("dv", c.dv, s), &args->dv);
}

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

// Members of `Args{...}` of kernels that make dK and dV, as those of attention.h. Maps are filled
// in by MapTiles.
#define PACKAX_NO_TILES                                                                         \
  .query = {}, .key = {}, .value = {}, .dout = {}, .lse2 = {}, .delta = {}, .lo = {}, .hi = {}, \
  .dk = {}, .dv = {}
#define PACKAX_KEY_ARRAYS(c)                                                 \
  PACKAX_MASK_ELEMENTS((c).mask), .kv_blocks = (c).kv_blocks.untyped_data(), \
      .kv_order = (c).kv_order.untyped_data()
#define PACKAX_KEYS(c) PACKAX_KEY_ARRAYS(c), .scale = (c).scale
#define PACKAX_TESTS_AND_SIZES(c) .element_test = (c).mask.element_test, PACKAX_SIZES((c).shape)

void Fill(const BackwardCall& c, const Sections& at, BackwardSm90Args* args) {
  *args = {PACKAX_NO_TILES, .dq_sum = at.dq_sum, PACKAX_KEYS(c), PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections& at, BackwardSm90SoftCapArgs* args) {
  *args = {PACKAX_NO_TILES, .dq_sum = at.dq_sum, PACKAX_KEYS(c), .soft_cap = c.soft_cap,
           PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections& at, BackwardSm90AlibiArgs* args) {
  *args = {
      PACKAX_NO_TILES,      .dq_sum = at.dq_sum,
      PACKAX_KEY_ARRAYS(c), .slopes = c.slopes->untyped_data(),
      .scale = c.scale,     PACKAX_TESTS_AND_SIZES(c),
  };
}

void Fill(const BackwardCall& c, const Sections&, BackwardDkdvSm90Args* args) {
  *args = {PACKAX_NO_TILES, PACKAX_KEYS(c), PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections&, BackwardDkdvSm90SoftCapArgs* args) {
  *args = {PACKAX_NO_TILES, PACKAX_KEYS(c), .soft_cap = c.soft_cap, PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections&, BackwardDkdvSm90BlockListsArgs* args) {
  *args = {
      PACKAX_NO_TILES,
      PACKAX_KEY_ARRAYS(c),
      .map_bits = c.map->bits.untyped_data(),
      .kv_entries = c.map->kv_entries.untyped_data(),
      .scale = c.scale,
      .element_test = c.mask.element_test,
      PACKAX_MAPPED_SIZES(c.shape, *c.map),
  };
}

// Likewise of the kernel that makes dQ.
#define PACKAX_ROWS(c, at)                                                                     \
  .query = {}, .key = {}, .value = {}, .dout = {}, .dq = {}, .lse2 = (at).lse2,                \
  .delta = (at).delta, PACKAX_MASK_ROWS((c).mask), .q_order = (c).mask.q_order.untyped_data(), \
  .counter = (at).counter, .scale = (c).scale

void Fill(const BackwardCall& c, const Sections& at, BackwardDqSm90Args* args) {
  *args = {PACKAX_ROWS(c, at), PACKAX_TESTS_AND_SIZES(c)};
}

void Fill(const BackwardCall& c, const Sections& at, BackwardDqSm90SoftCapArgs* args) {
  *args = {PACKAX_ROWS(c, at), .soft_cap = c.soft_cap, PACKAX_TESTS_AND_SIZES(c)};
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
      .map_bits = c.map->bits.untyped_data(),
      .q_entries = c.map->entries.untyped_data(),
      .scale = c.scale,
      .element_test = c.mask.element_test,
      PACKAX_MAPPED_SIZES(c.shape, *c.map),
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
  Args args;
  Fill(c, at, &args);
  PACKAX_TRY(MapTiles(gradients, c, &args));
  PACKAX_TRY(LaunchPrepare(*kernels.prepare, stream, c, true));
  PACKAX_TRY(Launch(gradients, stream, KeyGrid(s, gradients.block()), args));
  if (!c.want_dq) return ffi::Error::Success();
  return Launch(*kernels.finish, stream, Grid{w.rows / kernels.finish->block()},
                BackwardFinishArgs{
                    .dq_sum = at.dq_sum,
                    .dq = FirstHead(c.dq, s),
                    .scale = c.scale,
                    .q_len = s.q_len,
                    .heads = s.heads,
                    .row_heads = s.row_heads,
                });
}

// One kernel for dK and dV and one for dQ, which add nothing to memory: the same bits every run,
// and only the gradients that are wanted. Also where there is no kernel for all.
template <typename KeysArgs, typename RowsArgs>
struct Apart {
  std::optional<Ready<BackwardPrepareArgs>> prepare;
  std::optional<Ready<KeysArgs>> keys;
  std::optional<Ready<RowsArgs>> rows;

  ffi::Error Find(Device* device, const Shape& s) {
    PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &prepare));
    PACKAX_TRY(PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &keys));
    return PrepareIfAny(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &rows);
  }
  bool found() const { return prepare && keys && rows; }
};

template <typename Args>
ffi::Error LaunchKeys(const Ready<Args>& keys, Stream stream, const BackwardCall& c) {
  const Shape& s = c.shape;
  Args args;
  Fill(c, Sections(c, Sm90Workspace(s)), &args);
  PACKAX_TRY(MapTiles(keys, c, &args));
  return Launch(keys, stream, KeyGrid(s, keys.block()), args);
}

template <typename Args>
ffi::Error LaunchRows(const Ready<Args>& rows, Stream stream, const BackwardCall& c) {
  const Shape& s = c.shape;
  const Sections at(c, Sm90Workspace(s));
  Args args;
  Fill(c, at, &args);
  PACKAX_TRY(Encode(rows, Args::kQuery, RowsOf("query", c.query, s), &args.query));
  PACKAX_TRY(Encode(rows, Args::kKey, KeysOf("key", c.key, s), &args.key));
  PACKAX_TRY(Encode(rows, Args::kValue, KeysOf("value", c.value, s), &args.value));
  PACKAX_TRY(Encode(rows, Args::kDout, RowsOf("dout", c.dout, s), &args.dout));
  PACKAX_TRY(Encode(rows, Args::kDq, RowsOf("dq", c.dq, s), &args.dq));
  // One program per multiprocessor; they draw further tiles from the counter.
  const int64_t tiles = Product({s.heads, s.batch, CeilDiv(s.q_len, rows.block())});
  const int64_t programs = rows.kernel.device->multiprocessors;
  PACKAX_TRY(Clear(*rows.kernel.device, *stream, at.counter));
  return Launch(rows, stream, Grid{tiles < programs ? tiles : programs}, args);
}

template <typename KeysArgs, typename RowsArgs>
ffi::Error LaunchBackward(const Apart<KeysArgs, RowsArgs>& kernels, Stream stream,
                          const BackwardCall& c) {
  PACKAX_TRY(LaunchPrepare(*kernels.prepare, stream, c, false));
  if (c.want_dkv) PACKAX_TRY(LaunchKeys(*kernels.keys, stream, c));
  if (c.want_dq) PACKAX_TRY(LaunchRows(*kernels.rows, stream, c));
  return ffi::Error::Success();
}

template <typename Kernels>
ffi::Error RunIfFound(Device* device, Stream stream, const BackwardCall& c, bool* found) {
  Kernels kernels;
  PACKAX_TRY(kernels.Find(device, c.shape));
  *found = kernels.found();
  return *found && stream ? LaunchBackward(kernels, stream, c) : ffi::Error::Success();
}

template <typename GradientsArgs, typename KeysArgs, typename RowsArgs>
ffi::Error RunOne(Device* device, Stream stream, const BackwardCall& c, bool* found) {
  const Sm90Workspace w(c.shape);
  const int64_t elements = c.workspace.dimensions()[0];
  if (elements >= w.size()) {
    PACKAX_TRY(RunIfFound<Fused<GradientsArgs>>(device, stream, c, found));
  }
  if (*found || elements < w.apart_size()) return ffi::Error::Success();
  return RunIfFound<Apart<KeysArgs, RowsArgs>>(device, stream, c, found);
}

}  // namespace

ffi::Error CheckWorkspace(const ffi::AnyBuffer& workspace, const Shape& s) {
  PACKAX_TRY(ExpectRank("workspace", workspace, 1, "(elements)"));
  PACKAX_TRY(Expect("workspace", workspace, ffi::DataType::F32,
                    {{"elements", workspace.dimensions()[0]}}));
  PACKAX_CHECK(workspace.dimensions()[0] >= s.padded_rows(), kInvalidArgument)
      << "workspace has " << workspace.dimensions()[0] << " elements, expected at least "
      << s.padded_rows() << ", batch * heads * q_len rounded up to 64";
  return ffi::Error::Success();
}

ffi::Error BackwardOnSm90(Device* device, Stream stream, const BackwardCall& c, bool* found) {
  *found = false;
  if (!Sm90Workspace(c.shape).fits_int32()) return ffi::Error::Success();
  if (c.map) {
    if (c.workspace.dimensions()[0] < Sm90Workspace(c.shape).apart_size()) {
      return ffi::Error::Success();
    }
    return RunIfFound<Apart<BackwardDkdvSm90BlockListsArgs, BackwardDqSm90BlockListsArgs>>(
        device, stream, c, found);
  }
  if (c.slopes) {  // one kernel for all gradients, or the general ones
    if (!Sm90Workspace(c.shape).holds_sum(c.workspace)) return ffi::Error::Success();
    return RunIfFound<Fused<BackwardSm90AlibiArgs>>(device, stream, c, found);
  }
  if (c.soft_cap > 0) {
    return RunOne<BackwardSm90SoftCapArgs, BackwardDkdvSm90SoftCapArgs, BackwardDqSm90SoftCapArgs>(
        device, stream, c, found);
  }
  return RunOne<BackwardSm90Args, BackwardDkdvSm90Args, BackwardDqSm90Args>(device, stream, c,
                                                                            found);
}

}  // namespace packax
