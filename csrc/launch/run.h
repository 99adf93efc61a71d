// Runs the kernels of a call once they are found. All grids and tensor maps are checked before the
// first launch, so a call that is too large launches nothing.

#pragma once

#include <array>
#include <span>

#include "call/operands.h"

namespace packax {

// The arguments of cuLaunchKernel: addresses of fields of the call's operands, and of tensor maps
// over those that are tensors. The generated lists (args.h) call these functions in the order of
// the arguments.
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

// One kernel and its arguments. It points into itself and into the call's operands.
struct Launch {
  LoadedKernel kernel;
  Grid grid;
  // Not null for a kernel whose programs take tiles from this counter: it has one program per
  // multiprocessor, and the grid is the number of tiles.
  const void* counter = nullptr;
  Arguments arguments;
};

ffi::Error Run(Stream stream, std::span<Launch> launches);

}  // namespace packax
