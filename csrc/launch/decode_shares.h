// Chooses into how many shares a decoding call splits the keys, tuned by measurements.

#pragma once

#include "call/operands.h"

namespace packax {

// Whether `rows` new rows of a group fit in one tile of the smaller decoding kernel.
bool TakesSmallDecodeTile(int64_t rows);

// The most shares per sequence that ChooseDecodeShares() may choose on any GPU: the size of the
// workspace, `room`. Sizes that are not known yet are 0.
int64_t DecodeRoom(const DecodeOperands& o);

// Sets `splits` and `shares`. `tiles`: tiles of new rows per key/value head of a sequence.
// `most`: the most shares per sequence that the workspace and the kernels support.
void ChooseDecodeShares(const Device& device, int64_t tiles, int64_t most, DecodeOperands* o);

}  // namespace packax
