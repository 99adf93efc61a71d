// The Python module packax._ext: FFI handlers as capsules, and questions about what this build and
// machine have.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "ffi/stages.h"
#include "runtime/driver.h"
#include "runtime/variants.h"

namespace nb = nanobind;

namespace packax {
namespace {

struct Handler {
  Target target;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
};

constexpr Handler kHandlers[kTargets] = {
    {Target::kDocuments, packax_documents_initialize, packax_documents_execute},
    {Target::kBlocks, packax_blocks_initialize, packax_blocks_execute},
    {Target::kForward, packax_forward_initialize, packax_forward_execute},
    {Target::kBackward, packax_backward_initialize, packax_backward_execute},
    {Target::kDecode, packax_decode_initialize, packax_decode_execute},
    {Target::kForwardBias, packax_forward_v2_initialize, packax_forward_v2_execute},
    {Target::kBackwardBias, packax_backward_v2_initialize, packax_backward_v2_execute},
};

const char* Name(Target target) { return kTargetNames[static_cast<int>(target)]; }

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict out;
  for (const Handler& handler : kHandlers) {
    nb::dict stages;
    stages["initialize"] = Capsule(handler.initialize);
    stages["execute"] = Capsule(handler.execute);
    out[Name(handler.target)] = stages;
  }
  return out;
}

nb::list AllVariants() {
  nb::list out;
  for (const Variant& v : Variants()) {
    nb::dict row;
    row["name"] = v.name;
    row["kernel"] = Name(v.kernel);
    row["arch"] = v.arch;
    row["cc"] = v.cc;
    row["arch_specific"] = v.arch_specific;
    row["driver"] = v.driver;
    row["dtype"] = Name(v.dtype);
    row["qk_dim"] = v.qk_dim;
    row["v_dim"] = v.v_dim;
    row["threads"] = v.threads;
    row["shared"] = v.shared;
    row["block"] = v.block;
    nb::list boxes;
    for (const TensorMapBox& box : v.tensor_maps) {
      if (box.rows > 0) boxes.append(nb::make_tuple(box.rows, box.columns, box.swizzle));
    }
    row["tensor_maps"] = boxes;
    row["bytes"] = v.bytes();
    out.append(row);
  }
  return out;
}

nb::object FindName(const std::string& kernel, int cc, const std::string& dtype, int64_t qk_dim,
                    int64_t v_dim, int driver) {
  Query query{
      .kernel = {}, .cc = cc, .dtype = {}, .qk_dim = qk_dim, .v_dim = v_dim, .driver = driver};
  if (!ParseKernel(kernel, &query.kernel) || !ParseDtype(dtype, &query.dtype)) return nb::none();
  const Variant* variant = Find(query);
  return variant == nullptr ? nb::none() : nb::object(nb::str(variant->name));
}

nb::dict Driver() {
  nb::dict out;
  DriverInfo info;
  if (ffi::Error error = DescribeDriver(&info); error.failure()) {
    out["error"] = error.message();
    return out;
  }
  nb::list devices;
  for (const DeviceInfo& device : info.devices) {
    nb::dict entry;
    entry["ordinal"] = device.ordinal;
    entry["name"] = device.name;
    entry["cc"] = device.cc;
    devices.append(entry);
  }
  out["version"] = info.version;
  out["devices"] = devices;
  return out;
}

nb::dict HostTimes() {
  nb::dict out;
  for (int i = 0; i < kTargets; ++i) {
    out[kTargetNames[i]] =
        nb::make_tuple(host_times[i].calls.load(), host_times[i].nanoseconds.load());
  }
  return out;
}

void ResetHostTimes() {
  for (HostTime& time : host_times) {
    time.calls = 0;
    time.nanoseconds = 0;
  }
}

}  // namespace
}  // namespace packax

NB_MODULE(_ext, m) {
  m.doc() = "XLA FFI handlers of packax and the table of kernels in this build.";
  m.def(
      "registrations", &packax::Registrations,
      "FFI handlers: target name -> stage -> capsule, as jax.ffi.register_ffi_target takes them.");
  m.def("variants", &packax::AllVariants, "Every kernel in this build.");
  m.def("find", &packax::FindName, nb::arg("kernel"), nb::arg("cc"), nb::arg("dtype"),
        nb::arg("qk_dim"), nb::arg("v_dim"), nb::arg("driver") = packax::kNewestDriver,
        "The name of the kernel that a device of compute capability `cc` would run with a driver "
        "for CUDA `driver` (12090 is 12.9), or None.");
  m.def("driver", &packax::Driver,
        "{'version', 'devices'} of the CUDA driver, or {'error'} where there is none. Opens "
        "libcuda on first use.");
  m.def("host_times", &packax::HostTimes,
        "Target name -> (calls, nanoseconds) spent in the execute stage.");
  m.def("reset_host_times", &packax::ResetHostTimes, "Sets host_times() to zero.");
}
