// Selects and runs the kernels of a call, by the tables in select_*.cc.
//
// In the initialize stage, without a stream, kernels are loaded and their arguments checked, but
// nothing is launched. The operands are complete except for fields that depend on the kernels.

#pragma once

#include <vector>

#include "launch/run.h"

namespace packax {

// Whether there may be kernels for the head dims. csrc/ffi refuses other calls.
template <typename Operands>
bool IsAligned(const Operands& o) {
  return o.qk_dim % o.multiple() == 0 && o.v_dim % o.multiple() == 0;
}

// What a device has for a call.
struct Choice {
  bool found = false;                      // otherwise it has no kernels for the call
  bool fallback = false;                   // kernels that take any smaller head dims
  bool clipped = false;                    // dedicated kernels that do, too
  int64_t qk_dim = 0;                      // of the kernels
  Algorithm needs = Algorithm::kPortable;  // at least, of a backward
  std::vector<const Variant*> kernels;     // that run, in order
};

// Of any call in call/operands.h. These functions read its sizes and options, but no buffers, and
// neither call the driver nor need one: of `device`, they read what describes it.
template <typename Operands>
Choice Choose(const Operands& o, const Device& device);

// Whether the device has other than fallback kernels for exactly these head dims.
template <typename Operands>
bool HasDedicated(const Operands& o, const Device& device);

// Whether it has kernels for the call that every GPU has in a full build.
template <typename Operands>
bool HasCommon(const Operands& o, const Device& device);

ffi::Error RunForward(Stream stream, ForwardOperands o);
ffi::Error RunBackward(Stream stream, BackwardOperands o);
ffi::Error RunTangent(Stream stream, const TangentOperands& o);
ffi::Error RunDecode(Stream stream, DecodeOperands o);
ffi::Error RunDocuments(Stream stream, const DocumentsOperands& o);
ffi::Error RunBlocks(Stream stream, const BlocksOperands& o);

}  // namespace packax
