// Selects and runs the kernels of a call, by the tables in select.cc.
//
// In the initialize stage, without a stream, kernels are loaded and their arguments checked, but
// nothing is launched. The operands are complete except for fields that depend on the kernels.

#pragma once

#include "launch/run.h"

namespace packax {

ffi::Error RunForward(Stream stream, ForwardOperands o);
ffi::Error RunBackward(Stream stream, BackwardOperands o);
ffi::Error RunDecode(Stream stream, DecodeOperands o);
ffi::Error RunDocuments(Stream stream, const DocumentsOperands& o);
ffi::Error RunBlocks(Stream stream, const BlocksOperands& o);

}  // namespace packax
