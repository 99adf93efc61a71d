// The FFI targets: their names, their two stages, and the time that they spend on the host.
//
// A target is one function `ffi::Error F(Stream, operands...)` that runs in both stages. In XLA's
// initialize stage, without a stream, it checks the call and loads the kernels. In the execute
// stage, possibly under CUDA graph capture, it checks the call again, finds the kernels already
// loaded, and launches them.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <utility>

#include "runtime/driver.h"
#include "runtime/error.h"
#include "signatures.h"  // generated: Target, kTargetNames, the buffers of each target

namespace packax {

// Host time spent in the execute stage, since the process began or the times were last reset.
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

// Runs a target's function. XLA does not report which custom call failed, so errors begin with the
// target's name. XLA's FFI is a C interface, so no exception may escape.
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
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no host memory");  // allocates nothing
  } catch (...) {
    return ffi::Error(ffi::ErrorCode::kInternal, "C++ exception");
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

// check(stream, buffers), for a target whose operands, results and attributes are the fields of
// Buffers (generated: signatures.h).
template <typename Buffers, auto check>
inline constexpr auto kPacked =
    [](Stream stream, const auto&... fields) { return check(stream, Buffers{fields...}); };

}  // namespace packax

// Defines the handlers of a target's two stages, which call `check`. Both may be captured in a CUDA
// graph.
#define PACKAX_DEFINE_TARGET(name, Name, check)                                              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                             \
      packax_##name##_initialize,                                                            \
      (packax::Initialize<packax::Target::k##Name,                                           \
                          packax::kPacked<packax::Name##Buffers, packax::check>>()),         \
      packax::Name##Signature(xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()), \
      {xla::ffi::Traits::kCmdBufferCompatible});                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                             \
      packax_##name##_execute,                                                               \
      (packax::Execute<packax::Target::k##Name,                                              \
                       packax::kPacked<packax::Name##Buffers, packax::check>>()),            \
      packax::Name##Signature(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<void*>>()), \
      {xla::ffi::Traits::kCmdBufferCompatible})

// The exported stages.
#define PACKAX_DECLARE_TARGET(name, ...)                      \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_##name##_initialize); \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(packax_##name##_execute);
PACKAX_TARGETS(PACKAX_DECLARE_TARGET)
