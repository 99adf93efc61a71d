// Local plans on the host: whole documents dealt to ranks in every way that a plan tries.
//
// The numbers are those of `_deal` in python/packax/_src/context/local_plan.py, which is used where
// the extension is not built.

#pragma once

#include <cstdint>
#include <span>

namespace packax {

// What is the same for all ways. Documents are the heaviest first, padded with empty ones.
struct Deal {
  std::span<const int32_t> lengths;
  std::span<const int32_t> areas;
  std::span<const int32_t> light;  // area of a token in what is behind each, on average
  int32_t most_tokens;             // of a rank
  int32_t most_area;
  int rounds;
};

// One way: what ranks hold, changed in place, and who got each document.
struct Way {
  std::span<int32_t> tokens;
  std::span<int32_t> areas;
  std::span<int32_t> owner;  // as long as `lengths`
};

// Deals from document `begin` on; a token weighs `weight` beside its area. Returns how many
// documents are dealt with then. In every round `owner` must have room for a document of each rank.
int32_t DealWay(const Deal& deal, int32_t begin, int32_t weight, Way way);

}  // namespace packax
