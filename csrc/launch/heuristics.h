// Which kernel a call takes where several could, and how many programs: what measurements decided.

#pragma once

#include "launch/calls.h"

namespace packax {

// Whether there are kernels for Hopper with such scores and blocks: of one option at most, and
// blocks that are found by shifts.
bool TakesSm90(const AttentionCall& c);

// Where not every multiprocessor has a tile of 192 rows, the longest one decides: shorter ones end
// sooner. All heads of the rows count, so that a call for some of them takes the kernel of all.
bool LowOccupancy(const Shape& s, const Device& device);

// One program per multiprocessor, which draws further tiles from a counter.
int64_t PersistentPrograms(int64_t tiles, const Device& device);

struct DecodeShares {
  int64_t splits;  // of one sequence, at most
  int64_t dealt;   // of all sequences together, to be dealt out by length; 0: all have `splits`
};

// Of the keys of a decoding call, whose new rows make `tiles` tiles and `rows` rows for each of its
// key heads. `most`: what the workspace and the kernels take.
DecodeShares ChooseDecodeShares(const Device& device, int64_t batch, int64_t kv_heads,
                                int64_t kv_len, int64_t rows, int64_t tiles, int64_t most);

// Whether a group's new rows fit in one tile of the smaller decoding kernel.
bool TakesSmallDecodeTile(int64_t rows);

}  // namespace packax
