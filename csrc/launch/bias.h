// The kernels with a bias that is an array and with dropout, which take all that the fallback ones
// take besides.
//
// In the initialize stage, without a stream, they are found and loaded and their grids checked, and
// nothing is launched.

#pragma once

#include "launch/calls.h"

namespace packax {

ffi::Error ForwardWithBias(Device* device, Stream stream, const ForwardCall& c);

// As BackwardPortable(), then the gradient of the bias if it is needed.
ffi::Error BackwardWithBias(Device* device, Stream stream, const BackwardCall& c);

}  // namespace packax
