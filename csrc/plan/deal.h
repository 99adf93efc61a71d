// Local plans on the host: assigns whole documents to ranks by every strategy that a plan tries.
//
// Results are those of `_deal` in python/packax/_src/context/document_assignment.py, which is used
// if the extension is not built.

#pragma once

#include <cstdint>
#include <span>

namespace packax {

// What is the same for all strategies. Documents come heaviest first, padded with empty ones.
struct Deal {
  std::span<const int32_t> lengths;
  std::span<const int32_t> areas;
  std::span<const int32_t> density;  // the mean area of a token from each document on
  int32_t most_tokens;               // per rank
  int32_t most_area;
  int rounds;
};

// One strategy: the tokens and areas of ranks, changed in place, and the rank of each document.
struct Strategy {
  std::span<int32_t> tokens;
  std::span<int32_t> areas;
  std::span<int32_t> owner;  // as long as `lengths`
};

// Deals from document `begin` on; each token adds `weight` to its area. Returns how many documents
// have then been dealt with. In every round `owner` must have room for a document of each rank.
int32_t DealDocuments(const Deal& deal, int32_t begin, int32_t weight, Strategy strategy);

}  // namespace packax
