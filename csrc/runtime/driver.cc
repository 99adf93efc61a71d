// Devices, and the kernels loaded on them; launches.

#include "runtime/driver.h"

#include <mutex>

#include "runtime/libcuda.h"

namespace packax {
namespace {

constexpr int64_t kMaxGridX = 2147483647, kMaxGridY = 65535;

ffi::Error Describe(const Api* api, CUdevice device, std::string* name, int* cc) {
  char text[256] = "";
  int major = 0, minor = 0;
  PACKAX_DRIVER(cuDeviceGetName, text, sizeof(text), device) << ", device " << device;
  PACKAX_DRIVER(cuDeviceGetAttribute, &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
      << ", device " << device;
  PACKAX_DRIVER(cuDeviceGetAttribute, &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
      << ", device " << device;
  *name = text;
  *cc = 10 * major + minor;
  return ffi::Error::Success();
}

// The only mutable state of the process. Readers take no lock: the device list and every
// Device::kernels slot only ever go from null to their final value. `mutex` orders the writers
// and guards `kernels`.
struct Registry {
  std::mutex mutex;
  std::atomic<Device*> devices{nullptr};
  std::vector<CUkernel> kernels =
      std::vector<CUkernel>(Variants().size());  // by index; null = not loaded
};

Registry& GetRegistry() {
  static auto* registry = new Registry;  // outlives static destructors: XLA may still run at exit
  return *registry;
}

Device* FindDevice(const Registry& registry, unsigned long long context) {
  for (Device* d = registry.devices.load(std::memory_order_acquire); d != nullptr; d = d->next) {
    if (d->context == context) return d;
  }
  return nullptr;
}

// A library belongs to the process, not to a context, so each cubin is handed to the driver once.
// `result` is what the driver said last, here and below.
ffi::Error LoadLibrary(const Api* api, const Variant& variant, const Device& device,
                       CUkernel* kernel, CUresult* result) {
  CUlibrary library = nullptr;
  *result =
      api->cuLibraryLoadData(&library, variant.begin, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (*result != CUDA_SUCCESS) {
    return Failed(*api, "cuLibraryLoadData", *result)
           << "; " << Where(variant, device) << ", " << variant.bytes()
           << " bytes, driver for CUDA " << CudaVersionText(device.driver);
  }
  *result = api->cuLibraryGetKernel(kernel, library, variant.symbol);
  if (*result != CUDA_SUCCESS) {
    api->cuLibraryUnload(library);
    return Failed(*api, "cuLibraryGetKernel", *result)
           << "; " << Where(variant, device) << ", symbol " << variant.symbol;
  }
  return ffi::Error::Success();
}

// Into the current context, which is the device's. The registry's mutex is held.
ffi::Error LoadFunction(const Api* api, const Variant& variant, const Device& device,
                        CUkernel* kernel, CUfunction* function, CUresult* result) {
  if (*kernel == nullptr) {
    CUkernel found = nullptr;
    PACKAX_TRY(LoadLibrary(api, variant, device, &found, result));
    *kernel = found;
  }
  // Above 48 KiB a kernel has to ask; below, asking does no harm.
  *result = api->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      variant.shared, *kernel, device.ordinal);
  if (*result != CUDA_SUCCESS) {
    return Failed(*api, "cuKernelSetAttribute", *result)
           << "; " << Where(variant, device) << ", " << variant.shared << " bytes of shared memory";
  }
  // Libraries are loaded lazily; this is what puts the code into the current context.
  *result = api->cuKernelGetFunction(function, *kernel);
  if (*result != CUDA_SUCCESS) {
    return Failed(*api, "cuKernelGetFunction", *result)
           << "; " << Where(variant, device) << ", " << variant.bytes() << " bytes";
  }
  return ffi::Error::Success();
}

// The driver does not understand the cubin, as opposed to: has no memory for it, or is broken.
bool CannotRead(CUresult result) {
  switch (result) {
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_INVALID_SOURCE:
    case CUDA_ERROR_NOT_SUPPORTED:
      return true;
    default:
      return false;
  }
}

}  // namespace

ffi::Error CurrentDevice(Device** device) {
  const Api* api;
  PACKAX_TRY(GetApi(&api));
  CUcontext current = nullptr;
  PACKAX_DRIVER(cuCtxGetCurrent, &current);
  PACKAX_CHECK(current != nullptr, kInternal) << "the calling thread has no current CUDA context";
  unsigned long long context = 0;
  PACKAX_DRIVER(cuCtxGetId, current, &context);

  Registry& registry = GetRegistry();
  *device = FindDevice(registry, context);
  if (*device != nullptr) [[likely]] {
    return ffi::Error::Success();
  }

  const std::scoped_lock lock(registry.mutex);
  *device = FindDevice(registry, context);
  if (*device != nullptr) return ffi::Error::Success();
  auto added = std::make_unique<Device>();
  CUdevice ordinal = 0;
  PACKAX_DRIVER(cuCtxGetDevice, &ordinal);
  PACKAX_TRY(Describe(api, ordinal, &added->name, &added->cc));
  PACKAX_DRIVER(cuDeviceGetAttribute, &added->multiprocessors,
                CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ordinal)
      << ", device " << ordinal;
  PACKAX_DRIVER(cuDriverGetVersion, &added->driver);
  added->context = context;
  added->ordinal = ordinal;
  added->kernels = std::make_unique<std::atomic<const LoadedKernel*>[]>(Variants().size());
  added->next = registry.devices.load(std::memory_order_relaxed);
  *device = added.release();
  registry.devices.store(*device, std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error Load(Device* device, const Variant& variant, LoadedKernel* kernel) {
  const auto index = [](const Variant& v) { return static_cast<size_t>(&v - Variants().data()); };
  std::atomic<const LoadedKernel*>& slot = device->kernels[index(variant)];
  if (const LoadedKernel* loaded = slot.load(std::memory_order_acquire); loaded != nullptr)
      [[likely]] {
    *kernel = *loaded;
    return ffi::Error::Success();
  }

  const Api* api;
  PACKAX_TRY(GetApi(&api));
  Registry& registry = GetRegistry();
  const std::scoped_lock lock(registry.mutex);
  if (const LoadedKernel* loaded = slot.load(std::memory_order_relaxed); loaded != nullptr) {
    *kernel = *loaded;
    return ffi::Error::Success();
  }

  const Variant* used = &variant;
  CUfunction function = nullptr;
  CUresult result = CUDA_SUCCESS;
  ffi::Error error =
      LoadFunction(api, *used, *device, &registry.kernels[index(*used)], &function, &result);
  if (error.failure() && CannotRead(result)) {
    const Variant& v = variant;
    const Variant* older = Find({v.kernel, device->cc, v.dtype, v.qk_dim, v.v_dim, v.driver - 1});
    if (older != nullptr) {
      used = older;
      error =
          LoadFunction(api, *used, *device, &registry.kernels[index(*used)], &function, &result);
    }
  }
  PACKAX_TRY(error);
  *kernel = {device, used, function};
  slot.store(new LoadedKernel(*kernel), std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error CheckGrid(const LoadedKernel& kernel, Grid grid) {
  PACKAX_CHECK(grid.x <= kMaxGridX && grid.y <= kMaxGridY, kInvalidArgument)
      << kernel.variant->name << " would need a grid of (" << grid.x << ", " << grid.y
      << "), a GPU takes (" << kMaxGridX << ", " << kMaxGridY << ") at most; split the batch";
  return ffi::Error::Success();
}

ffi::Error Launch(const LoadedKernel& kernel, void* stream, Grid grid, const void* const* params) {
  const Variant& v = *kernel.variant;
  if (grid.x == 0 || grid.y == 0) return ffi::Error::Success();
  const Api* api;
  PACKAX_TRY(GetApi(&api));
  PACKAX_DRIVER(cuLaunchKernel, static_cast<CUfunction>(kernel.function),
                static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), 1,
                static_cast<unsigned>(v.threads), 1, 1, static_cast<unsigned>(v.shared),
                static_cast<CUstream>(stream), const_cast<void**>(params), nullptr)
      << "; " << Where(v, *kernel.device) << ", grid (" << grid.x << ", " << grid.y << ", 1), "
      << v.threads << " threads, " << v.shared << " bytes of shared memory";
  return ffi::Error::Success();
}

ffi::Error Clear(const Device& device, void* stream, void* word) {
  const Api* api;
  PACKAX_TRY(GetApi(&api));
  PACKAX_DRIVER(cuMemsetD32Async, reinterpret_cast<CUdeviceptr>(word), 0, 1,
                static_cast<CUstream>(stream))
      << ", device " << device.ordinal;
  return ffi::Error::Success();
}

ffi::Error DescribeDriver(DriverInfo* info) {
  const Api* api;
  PACKAX_TRY(GetApi(&api));
  PACKAX_DRIVER(cuInit, 0);
  PACKAX_DRIVER(cuDriverGetVersion, &info->version);
  int count = 0;
  PACKAX_DRIVER(cuDeviceGetCount, &count);
  for (int i = 0; i < count; ++i) {
    CUdevice device = 0;
    PACKAX_DRIVER(cuDeviceGet, &device, i) << ", device " << i;
    DeviceInfo entry{i, "", 0};
    PACKAX_TRY(Describe(api, device, &entry.name, &entry.cc));
    info->devices.push_back(std::move(entry));
  }
  return ffi::Error::Success();
}

}  // namespace packax
