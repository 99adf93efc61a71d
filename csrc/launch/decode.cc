#include "launch/decode.h"

#include "launch/heuristics.h"

namespace packax {
namespace {

template <typename Args>
ffi::Error LaunchShares(const Ready<Args>& decode, Stream stream, const DecodeCall& c,
                        int64_t tiles, const DecodeShares& shares) {
  const DecodeShape& s = c.shape;
  const int64_t places = shares.dealt == 0 ? s.batch * shares.splits : shares.dealt + s.batch;
  return Launch(decode, stream, Grid{Product({tiles, s.kv_heads, places})},
                Args{
                    .query = c.query.untyped_data(),
                    .key = c.key.untyped_data(),
                    .value = c.value.untyped_data(),
                    .q_lo = c.q_lo.untyped_data(),
                    .q_hi = c.q_hi.untyped_data(),
                    .block_table = c.block_table.untyped_data(),
                    .partial = c.partial.untyped_data(),
                    .sums = c.sums.untyped_data(),
                    .scale = c.scale,
                    .soft_cap = c.soft_cap,
                    .batch = s.batch,
                    .q_len = s.q_len,
                    .kv_len = s.kv_len,
                    .pages = s.pages,
                    .page_size = s.page_size,
                    .table_width = s.table_width,
                    .heads = s.heads,
                    .kv_heads = s.kv_heads,
                    .qk_eighths = s.qk_dim / 8,
                    .v_eighths = s.v_dim / 8,
                    .splits = static_cast<int32_t>(shares.splits),
                    .shares = static_cast<int32_t>(shares.dealt),
                });
}

// `Args`: of `decode` or of `decode_tall`, which have the same arguments.
template <typename Args>
ffi::Error Run(Device* device, Stream stream, const DecodeCall& c) {
  const DecodeShape& s = c.shape;
  Ready<Args> decode;
  Ready<DecodeCombineArgs> combine;
  PACKAX_TRY(PrepareCovering(device, s.kernel_dtype(), s.qk_dim, s.v_dim, &decode));
  const Variant& v = *decode.kernel.variant;
  PACKAX_TRY(Prepare(device, s.merged_dtype(), v.qk_dim, v.v_dim, &combine));

  const int64_t tiles = CeilDiv(s.rows(), decode.block());
  const int64_t most = s.room < combine.block() ? s.room : combine.block();
  const DecodeShares shares =
      ChooseDecodeShares(*device, s.batch, s.kv_heads, s.kv_len, s.rows(), tiles, most);
  // Before the first launch: a call that is too large must not be half done.
  const Grid rows{Product({s.batch, s.q_len, s.heads})};
  PACKAX_TRY(CheckGrid(combine.kernel, rows));
  PACKAX_TRY(LaunchShares(decode, stream, c, tiles, shares));
  return Launch(combine, stream, rows,
                DecodeCombineArgs{
                    .partial = c.partial.untyped_data(),
                    .sums = c.sums.untyped_data(),
                    .sinks = c.sinks.untyped_data(),
                    .q_lo = c.q_lo.untyped_data(),
                    .q_hi = c.q_hi.untyped_data(),
                    .out = c.out.untyped_data(),
                    .lse = c.lse.untyped_data(),
                    .has_sinks = c.has_sinks,
                    .batch = s.batch,
                    .sink_batch = s.sink_batch,
                    .q_len = s.q_len,
                    .kv_len = s.kv_len,
                    .heads = s.heads,
                    .v_eighths = s.v_dim / 8,
                    .splits = static_cast<int32_t>(shares.splits),
                });
}

// The widest head dims have no `decode_tall`: their groups take more tiles of `decode`.
bool HasTall(const Device& device, const DecodeShape& s) {
  const Query query{
      DecodeTallArgs::kKernel, device.cc, s.kernel_dtype(), s.qk_dim, s.v_dim, device.driver};
  return FindCovering(query) != nullptr;
}

}  // namespace

ffi::Error LaunchDecode(Device* device, Stream stream, const DecodeCall& c) {
  return TakesSmallDecodeTile(c.shape.rows()) || !HasTall(*device, c.shape)
             ? Run<DecodeArgs>(device, stream, c)
             : Run<DecodeTallArgs>(device, stream, c);
}

}  // namespace packax
