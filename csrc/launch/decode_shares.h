// Into how many shares a decoding call's keys are split, as tuned by measurements.

#pragma once

#include "call/operands.h"

namespace packax {

// Whether a group's new rows fit in one tile of the smaller decoding kernel.
bool TakesSmallDecodeTile(int64_t rows);

// Sets `splits` and `shares` of a call whose new rows make `tiles` tiles per key head.
// `most`: the most that the workspace and the kernels support.
void ChooseDecodeShares(const Device& device, int64_t tiles, int64_t most, DecodeOperands* o);

}  // namespace packax
