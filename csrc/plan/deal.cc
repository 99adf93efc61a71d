#include "plan/deal.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace packax {
namespace {

// The load of a rank that has no room for the next document.
constexpr int64_t kFull = std::numeric_limits<int64_t>::max();

}  // namespace

int32_t DealDocuments(const Deal& deal, int32_t begin, int32_t weight, Strategy strategy) {
  const int ranks = static_cast<int>(strategy.tokens.size());
  const int32_t last = static_cast<int32_t>(deal.lengths.size()) - 1;
  std::vector<int64_t> load(ranks);
  std::vector<int> by_load(ranks);
  int32_t end = begin;
  for (int round = 0; round < deal.rounds; ++round) {
    const int32_t first = std::min(end, last);
    const int64_t per_token = weight - deal.density[first];
    for (int rank = 0; rank < ranks; ++rank) {
      const bool fits = strategy.tokens[rank] + deal.lengths[first] <= deal.most_tokens &&
                        strategy.areas[rank] + deal.areas[first] <= deal.most_area;
      load[rank] = fits ? strategy.areas[rank] + per_token * strategy.tokens[rank] : kFull;
    }
    std::iota(by_load.begin(), by_load.end(), 0);
    std::ranges::stable_sort(by_load, {}, [&](int rank) { return load[rank]; });
    // Equivalent to giving each document to the rank with the least load: ranks take one document
    // each, in order of load, until a rank that took one would have less load than the next rank.
    int64_t least = kFull;
    int taken = 0;
    for (; taken < ranks; ++taken) {
      const int rank = by_load[taken];
      if (load[rank] == kFull || load[rank] > least) break;
      const int32_t document = std::min(end + taken, last);
      const int64_t length = deal.lengths[document];
      // `fits` was checked for the first document only: one with less area may be longer.
      if (strategy.tokens[rank] + length > deal.most_tokens) break;
      const int64_t area = deal.areas[document];
      least = std::min(least, load[rank] + area + per_token * length);
      strategy.tokens[rank] += deal.lengths[document];
      strategy.areas[rank] += deal.areas[document];
      strategy.owner[end + taken] = rank;
    }
    if (taken == 0) strategy.owner[end] = -1;  // no rank has room: the document is split
    end += std::max(taken, 1);
  }
  return end;
}

}  // namespace packax
