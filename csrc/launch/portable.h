// The kernels that every GPU has: the plain ones, and the fallback ones for what changes scores,
// block masks, float32 and head dims between the compiled ones.
//
// In the initialize stage, without a stream, they are found and loaded and their grids checked, and
// nothing is launched.

#pragma once

#include "launch/calls.h"

namespace packax {

ffi::Error ForwardPortable(Device* device, Stream stream, const ForwardCall& c);

// delta = sum(out * dout) - dlse into the workspace, then those of dK and dV and of dQ that are
// needed. The workspace begins with delta, (batch, heads, q_len) float32.
ffi::Error BackwardPortable(Device* device, Stream stream, const BackwardCall& c);

}  // namespace packax
