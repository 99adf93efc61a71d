// Launches the kernels of a call. All grids and tensor maps are checked before the first launch, so
// a call that is too large launches nothing.

#pragma once

#include <array>
#include <span>

#include "call/operands.h"

namespace packax {

// The kernelParams of cuLaunchKernel: addresses of fields of the call's operands and of tensor
// maps. The generated argument lists (args.h) call these functions in the order of the arguments.
struct Arguments {
  void Pointer(const void* const* field) { Add(static_cast<const void*>(field)); }
  void Pointer(const TensorView* field) { Add(static_cast<const void*>(&field->data)); }
  void Int32(const int32_t* field) { Add(field); }
  void Float(const float* field) { Add(field); }
  void Map(const TensorView* field);
  void Add(const void* address) { addresses[count++] = address; }

  int count = 0, map_count = 0;
  std::array<const void*, kMaxArguments> addresses;
  std::array<const TensorView*, kMaxTensorMaps> views;  // that the maps describe
  std::array<TensorMap, kMaxTensorMaps> maps;
};

// One kernel and its arguments, which point into this struct and into the call's operands.
struct Launch {
  LoadedKernel kernel;
  Grid grid;
  // The programs of a persistent kernel take tiles from `counter`, or in turns if it is null.
  // `grid` is then the number of tiles; Run() launches at most `resident` programs per
  // multiprocessor.
  bool persistent = false;
  const void* counter = nullptr;
  int resident = 1;
  Arguments arguments;
};

// Without a stream, only checks the launches.
ffi::Error Run(Stream stream, std::span<Launch> launches);

}  // namespace packax
