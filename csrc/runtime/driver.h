// The CUDA driver as the rest of packax sees it: the current device, loaded kernels, tensor maps,
// launches.
//
// Only driver.cc talks to libcuda, which is opened on first use: importing packax needs no GPU and
// no driver. Nothing here allocates device memory or waits for the device.

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
  // By index in Variants(): what runs when that row is requested; null = not loaded.
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

// Loads a cubin into a device's context, or looks it up without locks if it is already loaded. If
// the driver cannot read the cubin and the table has one for older drivers, loads that one. The
// first time is not allowed under CUDA graph capture, so it is called in XLA's initialize stage.
ffi::Error Load(Device* device, const Variant& variant, LoadedKernel* kernel);

enum class TensorMapElement { kBf16, kF16, kF32, kI32 };

// An array in device memory as (batch, length, columns), none of them 0. Rows are `row` elements
// apart, columns or more; otherwise it is dense.
struct TensorView {
  const char* name = "";  // for messages: the kernel's argument
  const void* data = nullptr;
  TensorMapElement element = TensorMapElement::kBf16;
  int64_t batch = 0, length = 0, columns = 0, row = 0;
};

// Checks that a tensor map over `view` is possible for the kernel's index-th "tma" parameter.
ffi::Error CheckTensorMap(const LoadedKernel& kernel, int index, const TensorView& view);

// The host tensor map over `view`, which is checked first, for the kernel's index-th "tma"
// parameter. Where a box extends beyond the view, TMA reads zeros and writes nothing. It takes
// about a microsecond, and makes no call that CUDA graph capture forbids.
ffi::Error EncodeTensorMap(const LoadedKernel& kernel, int index, const TensorView& view,
                           TensorMap* map);

// Checks that a GPU accepts that many programs.
ffi::Error CheckGrid(const LoadedKernel& kernel, Grid grid);

// `params` is kernelParams of cuLaunchKernel. An empty grid launches nothing; the grid must have
// passed CheckGrid.
ffi::Error LaunchKernel(const LoadedKernel& kernel, void* stream, Grid grid,
                        const void* const* params);

// Sets four bytes of device memory to 0, in stream order.
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
