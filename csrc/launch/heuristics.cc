#include "launch/heuristics.h"

#include <cmath>

namespace packax {
namespace {

constexpr float kLargestCap = 1024;  // up to which tanh to 4e-7 is enough (sm90/soft_cap.py)

constexpr int64_t kFewRows = 16;           // of a group, in one tile of `decode` (table.py)
constexpr int64_t kShare = 128;            // keys: below, a program costs more than its keys
constexpr int64_t kBalancedShare = 1024;   // keys: splitting that far is free, if rows are few
constexpr int64_t kMostDealt = 64;         // sequences, as many as a program of `decode` looks at
constexpr int64_t kPerMultiprocessor = 2;  // programs, for which the tiles leave shared memory
constexpr double kGoodEnough = 0.95;       // of the best share of time in which all have work

}  // namespace

bool TakesSm90(const AttentionCall& c) {
  const ScoreParams& p = c.scores;
  const BlockMask& m = c.block_mask;
  if (c.bias.any()) return false;
  if (p.only_slopes()) return !m.there();
  if (p.scales_batch > 0 || p.bias_batch > 0) return false;
  if (p.soft_cap == 0) return !m.there() || m.shifts();
  return !m.there() && p.soft_cap <= kLargestCap && std::isfinite(p.scale / p.soft_cap);
}

bool LowOccupancy(const Shape& s, const Device& device) {
  return Product({s.row_heads, s.batch, s.q_tiles_192()}) < device.multiprocessors;
}

int64_t PersistentPrograms(int64_t tiles, const Device& device) {
  return tiles < device.multiprocessors ? tiles : device.multiprocessors;
}

bool TakesSmallDecodeTile(int64_t rows) { return rows <= kFewRows; }

// As few shares as keep the multiprocessors almost as busy as any number does. Lengths are known on
// the device only. Where one long sequence among others would pay for more shares, the programs
// work out there which they are of: as many on average, of about the same length. That costs each a
// look at all ranges, so not if there is one sequence or too many: then as many shares as let a
// long one fill the GPU, as long as the sums that they leave are little beside the keys.
DecodeShares ChooseDecodeShares(const Device& device, int64_t batch, int64_t kv_heads,
                                int64_t kv_len, int64_t rows, int64_t tiles, int64_t most) {
  const int64_t at_once = kPerMultiprocessor * device.multiprocessors;
  const int64_t programs = Product({tiles, kv_heads, batch});
  const int64_t least_share = CeilDiv(kv_len, kShare);
  if (most > least_share) most = least_share;
  const auto busy = [&](int64_t splits) {
    const int64_t all = Product({programs, splits});
    return static_cast<double>(all) / static_cast<double>(at_once) /
           static_cast<double>(CeilDiv(all, at_once));
  };
  double best = 0;
  for (int64_t n = 1; n <= most; ++n) best = std::fmax(best, busy(n));
  int64_t splits = 1;
  while (splits < most && busy(splits) < kGoodEnough * best) ++splits;
  int64_t cheap = kv_len / (kBalancedShare + 64 * rows);
  if (cheap > most) cheap = most;
  if (cheap > 1 && batch > 1 && batch <= kMostDealt) return {most, splits * batch};
  const int64_t alone = CeilDiv(at_once, Product({tiles, kv_heads}));
  const int64_t balanced = alone < cheap ? alone : cheap;
  return {splits < balanced ? balanced : splits, 0};
}

}  // namespace packax
