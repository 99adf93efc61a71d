// Assigns whole documents to ranks, on the host, for context plans of kind "local"
// (python/packax/_src/context/document_assignment.py).

#pragma once

#include <cstdint>
#include <span>

namespace packax {

// The inputs that all strategies share. Documents are sorted by area, largest first, and padded
// with empty ones.
struct Deal {
  std::span<const int32_t> lengths;
  std::span<const int32_t> areas;
  std::span<const int32_t> density;  // mean area per token of each document and all later ones
  int32_t most_tokens;               // per rank
  int32_t most_area;
  int rounds;
};

// One strategy, updated in place: tokens and areas of each rank, and the rank of each document.
struct Strategy {
  std::span<int32_t> tokens;
  std::span<int32_t> areas;
  std::span<int32_t> owner;  // as long as `lengths`; -1: the document is split
};

// Assigns documents from `begin` on, in rounds; a token adds `weight` to the load of its rank.
// Returns the index of the first document that is left. `owner` must have room for one document per
// rank and round.
int32_t DealDocuments(const Deal& deal, int32_t begin, int32_t weight, Strategy strategy);

}  // namespace packax
