// The functions of libcuda, opened on first use, and their errors. Only the files of this folder
// include it.

#pragma once

#include <cuda.h>

#include <string>

#include "runtime/driver.h"
#include "runtime/error.h"

namespace packax {

// Every driver function used, by its exported name. The names without a version suffix are right:
// none of these has a newer form that the CUDA 12 headers would redirect to.
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

// Opens libcuda, once.
ffi::Error GetApi(const Api** api);

// "forward_bf16_128x128_sm90a (cubin for sm_90a) on device 0, NVIDIA H200 (compute capability 9.0)"
std::string Where(const Variant& variant, const Device& device);

ErrorBuilder Failed(const Api& api, const char* function, CUresult result);

// PACKAX_DRIVER(cuDeviceGet, &device, i) << ", device " << i; needs `api` in scope.
#define PACKAX_DRIVER(function, ...)                                                          \
  if (CUresult packax_result_ = api->function(__VA_ARGS__); packax_result_ == CUDA_SUCCESS) { \
  } else /* NOLINT */                                                                         \
    return Failed(*api, #function, packax_result_)

}  // namespace packax
