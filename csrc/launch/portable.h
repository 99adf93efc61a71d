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

// What kernels with more options share with the fallback ones: they have all heads of their rows,
// and delta, which of float32 has one kernel for both precisions, since it has no products.
ffi::Error CheckAllHeads(const Shape& s);
ffi::Error FindDelta(Device* device, const Shape& s, Ready<BackwardDeltaFallbackArgs>* ready);
ffi::Error LaunchDelta(const Ready<BackwardDeltaFallbackArgs>& delta, Stream stream,
                       const BackwardCall& c);

}  // namespace packax
