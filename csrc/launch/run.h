// Runs the kernels of a call, once they are found: all grids and tensor maps are checked before the
// first launch, so that what is too large leaves nothing half done.

#pragma once

#include <array>
#include <span>

#include "call/operands.h"

namespace packax {

// What cuLaunchKernel takes: the addresses of arguments, which are fields of the call's operands,
// and of tensor maps over those that are tensors. The generated lists (args.h) call the functions,
// in the order of the arguments.
struct Arguments {
  void Pointer(const void* const* field) { Add(static_cast<const void*>(field)); }
  void Pointer(const TensorView* field) { Add(static_cast<const void*>(&field->data)); }
  void Int32(const int32_t* field) { Add(field); }
  void Float(const float* field) { Add(field); }
  void Map(const TensorView* field);
  void Add(const void* address) { addresses[count++] = address; }

  int count = 0, map_count = 0;
  std::array<const void*, kMaxArguments> addresses;
  std::array<const TensorView*, kMaxTensorMaps> views;  // of the maps
  std::array<TensorMap, kMaxTensorMaps> maps;
};

// One kernel and what it is launched with. It points into itself and into the call's operands.
struct Launch {
  LoadedKernel kernel;
  Grid grid;
  // Of a kernel whose programs draw tiles from it: there is one for each multiprocessor, and the
  // grid says how many tiles there are.
  const void* counter = nullptr;
  Arguments arguments;
};

ffi::Error Run(Stream stream, std::span<Launch> launches);

}  // namespace packax
