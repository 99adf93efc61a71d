#include "launch/run.h"

#include <algorithm>

namespace packax {
namespace {

constexpr int64_t kMaxPrograms = 4096;  // more multiprocessors than any GPU has

ffi::Error CheckGrid(Launch* launch) {
  const auto& [device, variant, function] = launch->kernel;
  if (launch->persistent) {
    // Programs count tiles in 32 bits, and each increments the counter once after the last tile.
    const int64_t tiles = launch->grid.x;
    PACKAX_CHECK(tiles <= kMaxInt32 - kMaxPrograms, kInvalidArgument)
        << "batch * heads * ceil(q_len/" << variant->block << ") is " << tiles << ", a GPU takes "
        << kMaxInt32 - kMaxPrograms << " at most; split the batch";
    const int64_t most = int64_t{launch->resident} * device->multiprocessors;
    launch->grid.x = std::min(tiles, most);
  }
  return CheckGrid(launch->kernel, launch->grid);
}

ffi::Error MakeMaps(Stream stream, Launch* launch) {
  Arguments& a = launch->arguments;
  for (int i = 0; i < a.map_count; ++i) {
    PACKAX_TRY(stream ? EncodeTensorMap(launch->kernel, i, *a.views[i], &a.maps[i])
                      : CheckTensorMap(launch->kernel, i, *a.views[i]));
  }
  return ffi::Error::Success();
}

}  // namespace

void Arguments::Map(const TensorView* field) {
  views[map_count] = field;
  TensorMap& map = maps[map_count++];
  Add(map.map);
  for (const int32_t& size : map.shape) Add(&size);
  for (const int64_t& stride : map.strides) Add(&stride);
}

ffi::Error Run(Stream stream, std::span<Launch> launches) {
  for (Launch& launch : launches) {
    PACKAX_TRY(CheckGrid(&launch));
    PACKAX_TRY(MakeMaps(stream, &launch));
  }
  if (!stream) return ffi::Error::Success();
  for (const Launch& launch : launches) {
    if (launch.counter != nullptr) {
      PACKAX_TRY(Clear(*launch.kernel.device, *stream, launch.counter));
    }
    PACKAX_TRY(
        LaunchKernel(launch.kernel, *stream, launch.grid, launch.arguments.addresses.data()));
  }
  return ffi::Error::Success();
}

}  // namespace packax
