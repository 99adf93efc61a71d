// Which kernels run a call: the tables of select.cc.
//
// In the initialize stage, without a stream, kernels are found and loaded and their arguments are
// checked, but nothing is launched. The operands are complete except for what depends on the
// kernels.

#pragma once

#include "launch/run.h"

namespace packax {

ffi::Error RunForward(Stream stream, ForwardOperands o);
ffi::Error RunBackward(Stream stream, BackwardOperands o);
ffi::Error RunDecode(Stream stream, DecodeOperands o);
ffi::Error RunDocuments(Stream stream, const DocumentsOperands& o);
ffi::Error RunBlocks(Stream stream, const BlocksOperands& o);

}  // namespace packax
