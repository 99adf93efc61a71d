// The backward's kernels of mma.sync that add dQ up in memory, for GPUs other than Hopper's.

#pragma once

#include "launch/calls.h"

namespace packax {

// `*found` says whether this device has them for the call: one without options, whose workspace has
// room for the sum. In the initialize stage sizes are checked and nothing is launched.
ffi::Error BackwardOnSm80(Device* device, Stream stream, const BackwardCall& c, bool* found);

}  // namespace packax
