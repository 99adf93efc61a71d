// The interface to the CUDA driver: the current device, loaded kernels, tensor maps, launches.
//
// Only driver.cc calls libcuda, which it opens on first use, so importing packax needs neither a
// GPU nor a driver. Nothing here allocates device memory or synchronizes with the device.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/error.h"
#include "runtime/variants.h"

namespace packax {

// CUstream; empty in XLA's initialize stage, where nothing is launched.
using Stream = std::optional<void*>;

struct LoadedKernel;

// One CUDA context and the kernels loaded into it. Created once per context and never freed,
// because handlers on other threads may use it; a process has only a few.
struct Device {
  unsigned long long context;  // cuCtxGetId: unlike a CUcontext it is never reused
  int ordinal;                 // CUdevice
  int cc;                      // compute capability, 10 * major + minor
  int driver;                  // 12090 is CUDA 12.9
  int multiprocessors;
  std::string name;
  // Indexed like Variants(): the kernel that runs when that variant is requested, possibly the
  // variant for older drivers; null until loaded.
  std::unique_ptr<std::atomic<const LoadedKernel*>[]> kernels;
  Device* next;
};

// A kernel ready to launch on one device.
struct LoadedKernel {
  const Device* device = nullptr;
  const Variant* variant = nullptr;
  void* function = nullptr;
};

struct Grid {
  int64_t x, y = 1;
};

// The device of the calling thread's current context.
ffi::Error CurrentDevice(Device** device);

// Loads a variant's cubin into the device's context; if it is loaded already, returns it without
// taking a lock. If the driver cannot read the cubin, loads the variant for older drivers, if there
// is one. A first load is not allowed under CUDA graph capture, so handlers call this in XLA's
// initialize stage.
ffi::Error Load(Device* device, const Variant& variant, LoadedKernel* kernel);

enum class TensorMapElement { kBf16, kF16, kF32, kI32 };

// A (batch, heads, length, columns) view of an array (batch, length, heads, columns) in device
// memory; no size is 0. Rows are `row` elements apart, at least heads * columns; otherwise the view
// is dense.
struct TensorView {
  const char* name = "";  // the kernel argument, for error messages
  const void* data = nullptr;
  TensorMapElement element = TensorMapElement::kBf16;
  int64_t batch = 0, heads = 0, length = 0, columns = 0, row = 0;
};

// Checks that a tensor map over `view` can be encoded for the kernel's index-th "tma" parameter.
ffi::Error CheckTensorMap(const LoadedKernel& kernel, int index, const TensorView& view);

// Checks `view` and encodes a host tensor map over it for the kernel's index-th "tma" parameter.
// Outside the view, TMA reads zeros and writes nothing. Encoding takes about a microsecond and
// makes no call that CUDA graph capture forbids.
ffi::Error EncodeTensorMap(const LoadedKernel& kernel, int index, const TensorView& view,
                           TensorMap* map);

// Checks that a GPU accepts a grid of this size.
ffi::Error CheckGrid(const LoadedKernel& kernel, Grid grid);

// `params` is kernelParams of cuLaunchKernel. The grid must have passed CheckGrid; an empty grid
// launches nothing.
ffi::Error LaunchKernel(const LoadedKernel& kernel, void* stream, Grid grid,
                        const void* const* params);

// Zeroes a 4-byte word of device memory, in stream order.
ffi::Error Clear(const Device& device, void* stream, const void* word);

struct DeviceInfo {
  int ordinal;
  std::string name;
  int cc;
};

struct DriverInfo {
  int version = 0;  // 12090 is CUDA 12.9
  std::vector<DeviceInfo> devices;
};

// The driver and GPUs of this machine. Needs no context and creates none.
ffi::Error DescribeDriver(DriverInfo* info);

}  // namespace packax
