// The Python module packax._ext: FFI handlers as capsules, queries about this build and this
// machine, and the assignment of documents to ranks.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "ffi/stages.h"
#include "launch/judge.h"
#include "launch/select.h"
#include "plan/deal.h"
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

#define PACKAX_HANDLER(name, Name) \
  {Target::k##Name, packax_##name##_initialize, packax_##name##_execute},
constexpr Handler kHandlers[kTargets] = {PACKAX_TARGETS(PACKAX_HANDLER)};

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

// Sets the field that has this name in the call. Absent names keep their value.
template <typename T>
void Read(const nb::dict& call, const char* name, T* field) {
  if (PyObject* found = PyDict_GetItemString(call.ptr(), name))
    *field = nb::cast<T>(nb::handle(found));
}

template <typename Fields>
void ReadNumbers(const nb::dict& call, Fields* fields) {
  fields->EachNumber([&](const char* name, auto* number) { Read(call, name, number); });
}

template <typename Operands>
void ReadSizes(const nb::dict& call, Operands* o) {
  Read(call, "batch", &o->batch);
  Read(call, "q_len", &o->q_len);
  Read(call, "kv_len", &o->kv_len);
  Read(call, "heads", &o->heads);
  Read(call, "kv_heads", &o->kv_heads);
  Read(call, "qk_dim", &o->qk_dim);
  Read(call, "v_dim", &o->v_dim);
}

void ReadAttention(const nb::dict& call, AttentionOperands* o) {
  ReadSizes(call, o);
  o->row_heads = o->heads;
  ReadNumbers<AttentionFields>(call, o);
  Read(call, "bias_kind", &o->bias_kind);
  Read(call, "bias_axes", &o->bias_axes);
  Read(call, "dropout_threshold", &o->dropout_threshold);
  Read(call, "scales_batch", &o->scales_batch);
  Read(call, "bias_batch", &o->bias_batch);
  Read(call, "bias_of_indices", &o->bias_of_indices);
  Read(call, "block_mask_heads", &o->block_mask_heads);
  Read(call, "q_block", &o->q_block);
  Read(call, "kv_block", &o->kv_block);
  Read(call, "row_stats", &o->row_stats);
}

// answer(operands) of the call's operands.
template <typename Answer>
auto Ask(const std::string& target, const nb::dict& call, const Answer& answer) {
  const auto with_dtype = [&](auto o) {
    if (!ParseDtype(nb::cast<std::string>(call["dtype"]), &o.dtype)) {
      throw nb::value_error("unknown dtype");
    }
    return o;
  };
  const auto of_mask = [&](auto o) {
    Read(call, "batch", &o.batch);
    Read(call, "kv_len", &o.kv_len);
    return o;
  };
  if (target == "documents") return answer(of_mask(DocumentsOperands{}));
  if (target == "blocks") return answer(of_mask(BlocksOperands{}));
  if (target == "decode") {
    auto o = with_dtype(DecodeOperands{});
    ReadSizes(call, &o);
    ReadNumbers<DecodeFields>(call, &o);
    Read(call, "pages", &o.pages);
    Read(call, "page_size", &o.page_size);
    Read(call, "table_width", &o.table_width);
    Read(call, "fp8", &o.fp8);
    Read(call, "tile_rows", &o.tile_rows);
    Read(call, "chunk_tiles", &o.chunk_tiles);
    return answer(o);
  }
  if (target == "forward_tangent") {
    auto o = with_dtype(TangentOperands{});
    ReadAttention(call, &o);
    Read(call, "has_tq", &o.has_tq);
    Read(call, "has_tk", &o.has_tk);
    Read(call, "has_tv", &o.has_tv);
    return answer(o);
  }
  if (target == "forward") {
    auto o = with_dtype(ForwardOperands{});
    ReadAttention(call, &o);
    ReadNumbers<ForwardFields>(call, &o);
    return answer(o);
  }
  if (target != "backward") throw nb::value_error("unknown target");
  auto o = with_dtype(BackwardOperands{});
  ReadAttention(call, &o);
  Read(call, "deterministic", &o.deterministic);
  Read(call, "needs_dq", &o.needs_dq);
  Read(call, "needs_dkv", &o.needs_dkv);
  Read(call, "needs_dbias", &o.needs_dbias);
  return answer(o);
}

// A table of kernels that a test makes up.
class MadeUpTable {
 public:
  explicit MadeUpTable(const nb::list& rows) : variants_(Variants(rows)), table_(variants_) {}
  const Table& table() const { return table_; }

 private:
  static std::vector<Variant> Variants(const nb::list& rows) {
    std::vector<Variant> variants;
    for (const nb::handle handle : rows) {
      const auto row = nb::cast<nb::dict>(handle);
      Variant v{};
      if (!ParseKernel(nb::cast<std::string>(row["kernel"]), &v.kernel) ||
          !ParseDtype(nb::cast<std::string>(row["dtype"]), &v.dtype)) {
        throw nb::value_error("unknown kernel or dtype");
      }
      v.name = Name(v.kernel);
      if (PyObject* name = PyDict_GetItemString(row.ptr(), "name")) {
        v.name = nb::cast<const char*>(nb::handle(name));
      }
      Read(row, "cc", &v.cc);
      Read(row, "arch_specific", &v.arch_specific);
      Read(row, "qk_dim", &v.qk_dim);
      Read(row, "v_dim", &v.v_dim);
      Read(row, "shared", &v.shared);
      Read(row, "driver", &v.driver);
      variants.push_back(v);
    }
    return variants;
  }

  std::vector<Variant> variants_;
  Table table_;
};

nb::list SelectKernels(const std::string& target, int cc, int multiprocessors, const nb::dict& call,
                       int driver, const std::optional<nb::list>& table) {
  std::optional<MadeUpTable> other;
  std::optional<UseTable> use;
  if (table) use.emplace(other.emplace(*table).table());
  std::vector<Device> devices = DevicesOf(std::array{cc}, driver);
  devices[0].multiprocessors = multiprocessors;
  nb::list out;
  const Choice choice = Ask(target, call, [&](auto o) {
    if constexpr (requires { o.algorithm; }) ChooseAlgorithm(devices, &o);
    return Choose(o, devices[0]);
  });
  for (const Variant* variant : choice.kernels) {
    out.append(nb::make_tuple(Name(variant->kernel), variant->name));
  }
  return out;
}

nb::dict JudgeCall(const std::string& target, const nb::dict& call, const std::vector<int>& gpus,
                   int driver, const std::optional<nb::list>& table) {
  std::optional<MadeUpTable> other;
  std::optional<UseTable> use;
  if (table) use.emplace(other.emplace(*table).table());
  const Judgement judged =
      Ask(target, call, [&](const auto& o) { return Judge(o, DevicesOf(gpus, driver)); });
  nb::dict out;
  out["found"] = judged.found;
  out["here"] = judged.here;
  out["native"] = judged.native;
  out["dims"] = judged.qk_dim == 0 ? nb::object(nb::none())
                                   : nb::object(nb::make_tuple(judged.qk_dim, judged.v_dim));
  out["kv_len"] = judged.kv_len;
  out["algorithm"] = Name(judged.algorithm);
  out["workspace"] = nb::make_tuple(judged.workspace.of_row, judged.workspace.of_mask_row,
                                    judged.workspace.others);
  out["dbias_parts"] = judged.dbias_parts;
  out["splits"] = judged.splits;
  return out;
}

bool FullBuildHas(const std::string& target, const nb::dict& call) {
  const UseTable use(FullBuild());
  return Ask(target, call, [](const auto& o) { return Choose(o, Device{}).found; });
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

template <typename T, int kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<T> Row(const Array<T, 2>& array, size_t row) {
  return {array.data() + row * array.shape(1), array.shape(1)};
}

template <typename T>
std::span<T> All(const Array<T, 1>& array) {
  return {array.data(), array.shape(0)};
}

void DealAll(const Array<const int32_t, 1>& lengths, const Array<const int32_t, 1>& areas,
             const Array<const int32_t, 1>& density, const Array<const int32_t, 1>& weight,
             int32_t most_tokens, int32_t most_area, int rounds, const Array<int32_t, 1>& end,
             const Array<int32_t, 2>& rank_tokens, const Array<int32_t, 2>& rank_areas,
             const Array<int32_t, 2>& owner) {
  const size_t strategies = end.shape(0);
  const size_t documents = lengths.shape(0);
  const size_t ranks = rank_tokens.shape(1);
  if (areas.shape(0) != documents || density.shape(0) != documents ||
      weight.shape(0) != strategies || rank_tokens.shape(0) != strategies ||
      rank_areas.shape(0) != strategies || rank_areas.shape(1) != ranks ||
      owner.shape(0) != strategies || owner.shape(1) != documents) {
    throw nb::value_error("deal: arrays of documents, strategies and ranks do not go together");
  }
  for (size_t k = 0; k < strategies; ++k) {
    const int64_t most = end.data()[k] + int64_t{rounds} * static_cast<int64_t>(ranks);
    if (end.data()[k] < 0 || rounds < 0 || std::cmp_greater(most, documents)) {
      throw nb::value_error("deal: each round needs a document for every rank");
    }
  }
  const Deal deal{.lengths = All(lengths),
                  .areas = All(areas),
                  .density = All(density),
                  .most_tokens = most_tokens,
                  .most_area = most_area,
                  .rounds = rounds};
  for (size_t k = 0; k < strategies; ++k) {
    end.data()[k] = DealDocuments(
        deal, end.data()[k], weight.data()[k],
        {.tokens = Row(rank_tokens, k), .areas = Row(rank_areas, k), .owner = Row(owner, k)});
  }
}

}  // namespace
}  // namespace packax

// python/packax/_ext.pyi documents them.
NB_MODULE(_ext, m) {
  m.def("registrations", &packax::Registrations);
  m.def("variants", &packax::AllVariants);
  m.def("part", &packax::Part);
  m.def("find", &packax::FindName, nb::arg("kernel"), nb::arg("cc"), nb::arg("dtype"),
        nb::arg("qk_dim"), nb::arg("v_dim"), nb::arg("driver") = packax::kNewestDriver);
  m.def("select", &packax::SelectKernels, nb::arg("target"), nb::arg("cc"),
        nb::arg("multiprocessors"), nb::arg("call"), nb::arg("driver") = packax::kNewestDriver,
        nb::arg("table") = nb::none());
  m.def("judge", &packax::JudgeCall, nb::arg("target"), nb::arg("call"), nb::arg("gpus"),
        nb::arg("driver") = packax::kNewestDriver, nb::arg("table") = nb::none());
  m.def("full_build_has", &packax::FullBuildHas, nb::arg("target"), nb::arg("call"));
  m.def("driver", &packax::Driver);
  m.def("host_times", &packax::HostTimes);
  m.def("reset_host_times", &packax::ResetHostTimes);
  m.def("deal", &packax::DealAll, nb::arg("lengths"), nb::arg("areas"), nb::arg("density"),
        nb::arg("weight"), nb::arg("most_tokens"), nb::arg("most_area"), nb::arg("rounds"),
        nb::arg("end").noconvert(), nb::arg("rank_tokens").noconvert(),
        nb::arg("rank_areas").noconvert(), nb::arg("owner").noconvert());
}
