// The kernels with a bias array alone: faster than those of bias.h, for fewer calls and GPUs.

#pragma once

#include "launch/calls.h"

namespace packax {

// `done`: whether the call is one that they take, on a GPU that has them.
ffi::Error ForwardWithBiasAlone(Device* device, Stream stream, const ForwardCall& c, bool* done);
ffi::Error BackwardWithBiasAlone(Device* device, Stream stream, const BackwardCall& c, bool* done);

}  // namespace packax
