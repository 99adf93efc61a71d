// The CUDA driver: opening libcuda, devices and the kernels loaded on them, tensor maps, launches.

#include "runtime/driver.h"

#include <cuda.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>

namespace packax {
namespace {

// --- libcuda, opened on first use, and its errors.

// All driver functions in use, by exported name. Names without a version suffix are correct: the
// CUDA 12 headers do not redirect any of these to a newer version.
// clang-format off
#define PACKAX_DRIVER_FUNCTIONS(X) \
  X(cuInit) \
  X(cuDriverGetVersion) \
  X(cuGetErrorName) \
  X(cuGetErrorString) \
  X(cuDeviceGetCount) \
  X(cuDeviceGet) \
  X(cuDeviceGetName) \
  X(cuDeviceGetAttribute) \
  X(cuCtxGetCurrent) \
  X(cuCtxGetDevice) \
  X(cuCtxGetId) \
  X(cuLibraryLoadData) \
  X(cuLibraryGetKernel) \
  X(cuLibraryUnload) \
  X(cuKernelGetFunction) \
  X(cuKernelSetAttribute) \
  X(cuLaunchKernel) \
  X(cuMemsetD32Async) \
  X(cuTensorMapEncodeTiled)
// clang-format on

struct Api {
#define X(name) decltype(&::name) name = nullptr;
  PACKAX_DRIVER_FUNCTIONS(X)
#undef X
};

struct OpenedDriver {
  Api api;
  ffi::Error error;
};

OpenedDriver OpenDriver() {
  OpenedDriver opened;
  const char* path = std::getenv("PACKAX_LIBCUDA");
  if (path == nullptr || *path == '\0') path = "libcuda.so.1";
  // Never closed: kernels stay loaded until the process ends.
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    opened.error = ErrorBuilder(ffi::ErrorCode::kInternal)
                   << "no CUDA driver: cannot open " << path << " ("
                   << (why ? why : "unknown reason") << ")";
    return opened;
  }
  const char* missing = nullptr;
#define X(name)                                                                 \
  opened.api.name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name)); \
  if (opened.api.name == nullptr && missing == nullptr) missing = #name;
  PACKAX_DRIVER_FUNCTIONS(X)
#undef X
  if (missing != nullptr) {
    int version = 0;
    if (opened.api.cuDriverGetVersion != nullptr) opened.api.cuDriverGetVersion(&version);
    opened.error = ErrorBuilder(ffi::ErrorCode::kInternal)
                   << path << " (CUDA " << CudaVersionText(version) << ") has no " << missing
                   << "; packax needs a driver for CUDA 12.0 or newer";
  }
  return opened;
}

// "CUDA_ERROR_INVALID_VALUE (invalid argument)"
std::string ResultText(const Api& api, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  api.cuGetErrorName(result, &name);
  api.cuGetErrorString(result, &text);
  std::string out =
      name != nullptr ? name : "CUDA error " + std::to_string(static_cast<int>(result));
  return text != nullptr ? out + " (" + text + ")" : out;
}

// Opens libcuda, once.
ffi::Error GetApi(const Api** api) {
  static const auto* opened = new OpenedDriver(OpenDriver());  // never destroyed: see GetRegistry()
  *api = &opened->api;
  return opened->error;
}

// "forward_bf16_128x128_sm90a (cubin for sm_90a) on device 0, NVIDIA H200 (compute capability 9.0)"
std::string Where(const Variant& variant, const Device& device) {
  std::ostringstream out;
  out << variant.name << " (cubin for " << variant.arch << ") on device " << device.ordinal << ", "
      << device.name << " (compute capability " << device.cc / 10 << "." << device.cc % 10 << ")";
  return out.str();
}

ErrorBuilder Failed(const Api& api, const char* function, CUresult result) {
  ErrorBuilder error(ffi::ErrorCode::kInternal);
  error << function << " failed: " << ResultText(api, result);
  return error;
}

// PACKAX_DRIVER(cuDeviceGet, &device, i) << ", device " << i; needs `api` in scope.
#define PACKAX_DRIVER(function, ...)                                                          \
  if (CUresult packax_result_ = api->function(__VA_ARGS__); packax_result_ == CUDA_SUCCESS) { \
  } else /* NOLINT */                                                                         \
    return Failed(*api, #function, packax_result_)

// --- Devices, kernels and tensor maps.

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

// State of the process. Readers take no lock: devices are only added at the front of the list, and
// a slot of Device::kernels changes once, from null to its final value. `mutex` serializes writers
// and guards `kernels`.
struct Registry {
  std::mutex mutex;
  std::atomic<Device*> devices{nullptr};
  std::vector<CUkernel> kernels =
      std::vector<CUkernel>(Variants().size());  // indexed like Variants(); null until loaded
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

// A library belongs to the process, not to a context, so each cubin is passed to the driver once.
// Here and below, `result` is the result of the last driver call.
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

// Loads a kernel into the current context, which must be the device's. The caller holds
// Registry::mutex.
ffi::Error LoadFunction(const Api* api, const Variant& variant, const Device& device,
                        CUkernel* kernel, CUfunction* function, CUresult* result) {
  if (*kernel == nullptr) {
    CUkernel found = nullptr;
    PACKAX_TRY(LoadLibrary(api, variant, device, &found, result));
    *kernel = found;
  }
  // Dynamic shared memory above 48 KiB must be requested; requesting less is harmless.
  *result = api->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      variant.shared, *kernel, device.ordinal);
  if (*result != CUDA_SUCCESS) {
    return Failed(*api, "cuKernelSetAttribute", *result)
           << "; " << Where(variant, device) << ", " << variant.shared << " bytes of shared memory";
  }
  // Libraries are loaded lazily; this loads the code into the current context.
  *result = api->cuKernelGetFunction(function, *kernel);
  if (*result != CUDA_SUCCESS) {
    return Failed(*api, "cuKernelGetFunction", *result)
           << "; " << Where(variant, device) << ", " << variant.bytes() << " bytes";
  }
  return ffi::Error::Success();
}

// Whether the driver cannot read the cubin, as opposed to being out of memory or broken.
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

// Limits of cuTensorMapEncodeTiled; strides are in bytes. It accepts sizes up to 2^32, but kernels
// receive the sizes as int32.
constexpr int64_t kMaxMapStride = int64_t{1} << 40;
constexpr int64_t kMapAlignment = 16;
// If a tensor's last element starts below this offset, drivers up to this version set bit 21 of the
// map's second word. It is cleared here, as in the launchers of Triton and CUTLASS.
constexpr int64_t kSmallMap = int64_t{128} * 1024;
constexpr int kSmallMapFixed = 13010;

struct MapElement {
  CUtensorMapDataType type;
  int64_t bytes;
  const char* name;
};

MapElement Describe(TensorMapElement element) {
  switch (element) {
    case TensorMapElement::kBf16:
      return {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, "bfloat16"};
    case TensorMapElement::kF16:
      return {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, "float16"};
    case TensorMapElement::kF32:
      return {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, "float32"};
    case TensorMapElement::kI32:
      return {CU_TENSOR_MAP_DATA_TYPE_INT32, 4, "int32"};
  }
  __builtin_unreachable();
}

// "tensor map of query, bfloat16[2, 300, 384] in boxes of 64 x 64, swizzle 3"
std::string MapText(const TensorView& view, const TensorMapBox& box) {
  std::ostringstream out;
  out << "tensor map of " << view.name << ", " << Describe(view.element).name << "[" << view.batch
      << ", " << view.heads << ", " << view.length << ", " << view.columns << "] in boxes of "
      << box.rows << " x " << box.columns << ", swizzle " << box.swizzle;
  return out.str();
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

ffi::Error LaunchKernel(const LoadedKernel& kernel, void* stream, Grid grid,
                        const void* const* params) {
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

ffi::Error Clear(const Device& device, void* stream, const void* word) {
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
  PACKAX_DRIVER(cuDriverGetVersion, &info->version);
  const CUresult started = api->cuInit(0);
  if (started == CUDA_ERROR_NO_DEVICE) return ffi::Error::Success();  // none, or none visible
  if (started != CUDA_SUCCESS) return Failed(*api, "cuInit", started);
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

ffi::Error CheckTensorMap(const LoadedKernel& kernel, int index, const TensorView& view) {
  const Variant& v = *kernel.variant;
  const TensorMapBox& box = v.tensor_maps[index];
  const int64_t row = view.row * Describe(view.element).bytes;
  PACKAX_CHECK(view.length <= (kMaxMapStride - 1) / row, kInvalidArgument)
      << MapText(view, box) << ": one row of the batch has 2^40 bytes or more; " << v.name;
  const int64_t head = view.columns * Describe(view.element).bytes;
  for (const auto& [bytes, what] : {std::pair{row, "row"}, std::pair{head, "head"}}) {
    PACKAX_CHECK(bytes % kMapAlignment == 0, kInvalidArgument)
        << MapText(view, box) << ": the " << bytes << " bytes of a " << what
        << " are no multiple of " << kMapAlignment << "; " << v.name;
  }
  PACKAX_CHECK(reinterpret_cast<uintptr_t>(view.data) % kMapAlignment == 0, kInvalidArgument)
      << MapText(view, box) << ": address " << view.data << " is no multiple of " << kMapAlignment
      << "; " << v.name;
  return ffi::Error::Success();
}

ffi::Error EncodeTensorMap(const LoadedKernel& kernel, int index, const TensorView& view,
                           TensorMap* map) {
  PACKAX_TRY(CheckTensorMap(kernel, index, view));
  const Variant& v = *kernel.variant;
  const TensorMapBox& box = v.tensor_maps[index];
  const MapElement element = Describe(view.element);
  const int64_t row = view.row * element.bytes;
  const int64_t matrix = row * view.length;
  const Api* api;
  PACKAX_TRY(GetApi(&api));
  // The driver lists axes from the innermost to the outermost.
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(view.columns), static_cast<cuuint64_t>(view.length),
      static_cast<cuuint64_t>(view.heads), static_cast<cuuint64_t>(view.batch)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row),
                                static_cast<cuuint64_t>(view.columns * element.bytes),
                                static_cast<cuuint64_t>(matrix)};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box.columns),
                              static_cast<cuuint32_t>(box.rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap encoded;
  PACKAX_DRIVER(cuTensorMapEncodeTiled, &encoded, element.type, 4, const_cast<void*>(view.data),
                sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                static_cast<CUtensorMapSwizzle>(box.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
      << "; " << MapText(view, box) << ", address " << view.data << "; "
      << Where(v, *kernel.device);
  // `matrix < kSmallMap` keeps the product with the batch from overflowing.
  const int64_t last = (view.length - 1) * row + (view.heads * view.columns - 1) * element.bytes;
  if (kernel.device->driver <= kSmallMapFixed && last + 1 < kSmallMap &&
      (view.batch == 1 ||
       (matrix < kSmallMap && (view.batch - 1) * matrix + last + 1 < kSmallMap))) {
    encoded.opaque[1] &= ~(cuuint64_t{1} << 21);
  }
  static_assert(sizeof(encoded) == sizeof(map->map));
  std::memcpy(map->map, &encoded, sizeof(encoded));
  map->shape[0] = static_cast<int32_t>(view.batch);
  map->shape[1] = static_cast<int32_t>(view.heads);
  map->shape[2] = static_cast<int32_t>(view.length);
  map->shape[3] = static_cast<int32_t>(view.columns);
  map->strides[0] = view.length * view.row;
  map->strides[1] = view.columns;
  map->strides[2] = view.row;
  map->strides[3] = 1;
  return ffi::Error::Success();
}

}  // namespace packax
