// Selects and runs the kernels of a call, by the tables in select.cc.
//
// In the initialize stage, without a stream, kernels are loaded and their arguments checked, but
// nothing is launched. The operands are complete except for fields that depend on the kernels.

#pragma once

#include <vector>

#include "launch/run.h"

namespace packax {

// The kernels that a call would run on a device, in order; empty if the device has none. Reads
// sizes and options, no buffers, and does not call the driver.
std::vector<const Variant*> KernelsOf(const ForwardOperands& o, const Device& device);
std::vector<const Variant*> KernelsOf(const BackwardOperands& o, const Device& device);
std::vector<const Variant*> KernelsOf(const DecodeOperands& o, const Device& device);

ffi::Error RunForward(Stream stream, ForwardOperands o);
ffi::Error RunBackward(Stream stream, BackwardOperands o);
ffi::Error RunTangent(Stream stream, const TangentOperands& o);
ffi::Error RunDecode(Stream stream, DecodeOperands o);
ffi::Error RunDocuments(Stream stream, const DocumentsOperands& o);
ffi::Error RunBlocks(Stream stream, const BlocksOperands& o);

}  // namespace packax
