// What the FFI targets share: their names, their two stages, finding a kernel, and host time.
//
// A target is one function `ffi::Error F(Stream, operands...)`, run in both stages. In XLA's
// initialize stage there is no stream: it checks, finds and loads. In execute, possibly under CUDA
// graph capture, it does the same (the kernels are there by now) and launches.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <optional>
#include <utility>

#include "runtime/driver.h"
#include "runtime/error.h"

namespace packax {

// CUstream; empty in the initialize stage.
using Stream = std::optional<void*>;

enum class Target {
  kDocuments,
  kBlocks,
  kForward,
  kBackward,
  kDecode,
  kForwardBias,
  kBackwardBias,
};

inline constexpr const char* kTargetNames[] = {
    "packax_documents_v1", "packax_blocks_v1",  "packax_forward_v1",  "packax_backward_v1",
    "packax_decode_v1",    "packax_forward_v2", "packax_backward_v2",
};
inline constexpr int kTargets = 7;

// Time spent in the execute stage, on the host, over the life of the process.
struct HostTime {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> nanoseconds{0};
};

inline HostTime host_times[kTargets];

class ScopedHostTime {
 public:
  explicit ScopedHostTime(Target target) : target_(target), start_(Clock::now()) {}
  ~ScopedHostTime() {
    const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_);
    HostTime& time = host_times[static_cast<int>(target_)];
    time.calls.fetch_add(1, std::memory_order_relaxed);
    time.nanoseconds.fetch_add(spent.count(), std::memory_order_relaxed);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Target target_;
  Clock::time_point start_;
};

// Runs a target's function. XLA does not say which custom call failed, so the target's name goes in
// front of an error. XLA's FFI is a C interface: no exception may pass it.
template <Target target, auto function, typename... Operands>
ffi::Error RunGuarded(Stream stream, const Operands&... operands) noexcept {
  try {
    ffi::Error error = function(stream, operands...);
    if (error.success()) [[likely]] {
      return error;
    }
    return ffi::Error(*error.errc(),
                      std::string(kTargetNames[static_cast<int>(target)]) + ": " + error.message());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no host memory");  // needs none itself
  } catch (...) {
    return ffi::Error(ffi::ErrorCode::kInternal, "C++ exception");  // likewise
  }
}

template <Target target, auto function>
struct Initialize {
  template <typename... Operands>
  ffi::Error operator()(const Operands&... operands) const {
    return RunGuarded<target, function>(std::nullopt, operands...);
  }
};

template <Target target, auto function>
struct Execute {
  template <typename... Operands>
  ffi::Error operator()(void* stream, const Operands&... operands) const {
    ScopedHostTime time(target);
    return RunGuarded<target, function>(Stream(stream), operands...);
  }
};

// A loaded kernel and the generated struct of its arguments, tied together by type.
template <typename Args>
struct Ready {
  LoadedKernel kernel;

  int block() const { return kernel.variant->block; }
};

// What a user can do where there is no kernel.
inline constexpr char kWayOut[] =
    ". implementation=\"xla\", of create_attention_mask too, needs no kernels";

// Loads what a search for `query` found, or says what there is instead.
template <typename Args>
ffi::Error LoadFound(Device* device, const Query& query, const Variant* variant,
                     Ready<Args>* ready) {
  PACKAX_CHECK(variant != nullptr, kUnimplemented)
      << DescribeMissing(query) << "; device " << device->ordinal << " is " << device->name
      << kWayOut;
  return Load(device, *variant, &ready->kernel);
}

// Looks a kernel up for this device and loads it.
template <typename Args>
ffi::Error Prepare(Device* device, Dtype dtype, int64_t qk_dim, int64_t v_dim, Ready<Args>* ready) {
  const Query query{Args::kKernel, device->cc, dtype, qk_dim, v_dim, device->driver};
  return LoadFound(device, query, Find(query), ready);
}

// Prepare() of the smallest kernel whose head dims are at least these.
template <typename Args>
ffi::Error PrepareCovering(Device* device, Dtype dtype, int64_t qk_dim, int64_t v_dim,
                           Ready<Args>* ready) {
  const Query query{Args::kKernel, device->cc, dtype, qk_dim, v_dim, device->driver};
  return LoadFound(device, query, FindCovering(query), ready);
}

// Prepare() for a kernel that only some devices have and that another one stands in for: empty if
// there is none here.
template <typename Args>
ffi::Error PrepareIfAny(Device* device, Dtype dtype, int64_t qk_dim, int64_t v_dim,
                        std::optional<Ready<Args>>* ready) {
  ready->reset();
  const Variant* variant = Find({Args::kKernel, device->cc, dtype, qk_dim, v_dim, device->driver});
  if (variant == nullptr) return ffi::Error::Success();
  return Load(device, *variant, &ready->emplace().kernel);
}

// EncodeTensorMap for one of the kernel's own parameters. In the initialize stage only checks it.
template <typename Args>
ffi::Error Encode(const Ready<Args>& ready, Stream stream, typename Args::Map parameter,
                  const TensorView& view, TensorMap* map) {
  if (!stream) return CheckTensorMap(ready.kernel, parameter, view);
  return EncodeTensorMap(ready.kernel, parameter, view, map);
}

// In the initialize stage it only checks the grid: a call that is too large must not fail when half
// of its kernels have run.
template <typename Args>
ffi::Error Launch(const Ready<Args>& ready, Stream stream, Grid grid, const Args& args) {
  PACKAX_TRY(CheckGrid(ready.kernel, grid));
  if (!stream) return ffi::Error::Success();
  return Launch(ready.kernel, *stream, grid, args.Addresses().data());
}

}  // namespace packax

// The exported stages.
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_documents_initialize);  // mask.cc
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_documents_execute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_blocks_initialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_blocks_execute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_forward_initialize);  // forward.cc
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_forward_execute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_backward_initialize);  // backward.cc
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_backward_execute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_decode_initialize);  // decode.cc
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_decode_execute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_forward_v2_initialize);  // forward.cc
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_forward_v2_execute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_backward_v2_initialize);  // backward.cc
XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_backward_v2_execute);
