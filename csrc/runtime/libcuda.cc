#include "runtime/libcuda.h"

#include <dlfcn.h>

#include <cstdlib>
#include <sstream>

namespace packax {
namespace {

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

}  // namespace

ffi::Error GetApi(const Api** api) {
  static const OpenedDriver opened = OpenDriver();
  *api = &opened.api;
  return opened.error;
}

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

}  // namespace packax
