// Into how many shares a decoding call's keys are split: what measurements decided.

#pragma once

#include "call/operands.h"

namespace packax {

// Whether a group's new rows fit in one tile of the smaller decoding kernel.
bool TakesSmallDecodeTile(int64_t rows);

// Sets `splits` and `shares` of a call whose new rows make `tiles` tiles for each of its key heads.
// `most`: what the workspace and the kernels take.
void ChooseDecodeShares(const Device& device, int64_t tiles, int64_t most, DecodeOperands* o);

}  // namespace packax
