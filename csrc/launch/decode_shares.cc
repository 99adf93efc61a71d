#include "launch/decode_shares.h"

#include <algorithm>

namespace packax {
namespace {

constexpr int64_t kFewRows = 16;           // of a group, per tile of `decode` (aot/tiles_decode.py)
constexpr int64_t kShare = 128;            // keys: with fewer, a program's overhead dominates
constexpr int64_t kBalancedShare = 1024;   // keys: splitting down to this is free with few rows
constexpr int64_t kMostDealt = 64;         // sequences whose ranges each `decode` program reads
constexpr int64_t kPerMultiprocessor = 2;  // programs that share its shared memory
constexpr double kGoodEnough = 0.95;       // fraction of the best utilization
constexpr int64_t kMostShares = 128;       // per sequence: DECODE_SPLITS in aot/tiles_decode.py
constexpr int64_t kMostAtOnce = 1024;      // programs, on the largest GPUs
constexpr int64_t kTallTile = 64;          // rows

}  // namespace

bool TakesSmallDecodeTile(int64_t rows) { return rows <= kFewRows; }

int64_t DecodeRoom(const DecodeOperands& o) {
  if (o.kv_len == 0) return kMostShares;
  const int64_t most = std::min(kMostShares, CeilDiv(o.kv_len, kShare));
  if (o.batch == 0) return most;
  const int64_t programs = Product({o.batch, o.kv_heads, CeilDiv(o.rows(), kTallTile)});
  const int64_t fill = CeilDiv(kMostAtOnce, programs);
  const int64_t balance = o.kv_len / (kBalancedShare + 64 * o.rows());
  return std::max(int64_t{1}, std::min(most, std::max(fill, balance)));
}

// Uses the smallest number of shares that keeps the multiprocessors almost as busy as the best
// number does. The lengths of sequences are known only on the device. If one long sequence among
// others may need more shares, the shares (as many on average, of about equal length) are dealt to
// sequences on the device: each program reads the ranges of all sequences and computes which share
// it has. This is not done for a single sequence or too many. Then each sequence has enough shares
// for a long one to fill the GPU, as long as the partial sums are small compared with the keys.
void ChooseDecodeShares(const Device& device, int64_t tiles, int64_t most, DecodeOperands* o) {
  const int64_t at_once = kPerMultiprocessor * device.multiprocessors;
  const int64_t programs = Product({tiles, o->kv_heads, o->batch});
  most = std::min(most, CeilDiv(o->kv_len, kShare));
  const auto busy = [&](int64_t splits) {
    const int64_t all = Product({programs, splits});
    return static_cast<double>(all) / static_cast<double>(at_once) /
           static_cast<double>(CeilDiv(all, at_once));
  };
  double best = 0;
  for (int64_t n = 1; n <= most; ++n) best = std::max(best, busy(n));
  int64_t splits = 1, shares = 0;
  while (splits < most && busy(splits) < kGoodEnough * best) ++splits;
  const int64_t cheap = std::min(o->kv_len / (kBalancedShare + 64 * o->rows()), most);
  if (cheap > 1 && o->batch > 1 && o->batch <= kMostDealt) {
    shares = splits * o->batch;
    splits = most;
  } else {
    const int64_t alone = CeilDiv(at_once, Product({tiles, o->kv_heads}));
    splits = std::max(splits, std::min(alone, cheap));
  }
  o->splits = static_cast<int32_t>(splits);
  o->shares = static_cast<int32_t>(shares);
}

}  // namespace packax
