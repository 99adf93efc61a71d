// The forward's kernels for Hopper.

#pragma once

#include "launch/calls.h"

namespace packax {

// The kernel of Hopper for this call, with one option or none. `*found` says whether there is one
// on this device; in the initialize stage sizes are checked and nothing is launched.
ffi::Error ForwardOnSm90(Device* device, Stream stream, const ForwardCall& c, bool* found);

}  // namespace packax
