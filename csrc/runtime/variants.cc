#include "runtime/variants.h"

#include <iterator>
#include <sstream>
#include <tuple>
#include <utility>

#include "build.h"  // generated: kPart, kSharedLimits, kWholeTable

#define PACKAX_VARIANT(name, ...)                         \
  extern "C" const unsigned char packax_##name##_begin[]; \
  extern "C" const unsigned char packax_##name##_end[];
#include "table.inc"
#undef PACKAX_VARIANT

namespace packax {
namespace {

constexpr const char* kDtypeNames[] = {"any", "bf16", "f16", "f32", "tf32", "e4m3"};

#define PACKAX_VARIANT(name, kernel, arch, cc, arch_specific, driver, dtype, qk_dim, v_dim, \
                       symbol, threads, shared, block, ...)                                 \
  Variant{#name,                                                                            \
          Kernel::kernel,                                                                   \
          arch,                                                                             \
          cc,                                                                               \
          arch_specific,                                                                    \
          driver,                                                                           \
          Dtype::dtype,                                                                     \
          qk_dim,                                                                           \
          v_dim,                                                                            \
          symbol,                                                                           \
          threads,                                                                          \
          shared,                                                                           \
          block,                                                                            \
          {__VA_ARGS__},                                                                    \
          packax_##name##_begin,                                                            \
          packax_##name##_end},
const Variant kTable[] = {
#include "table.inc"
};
#undef PACKAX_VARIANT

thread_local const Table* other_table = nullptr;

const std::vector<const Variant*>& RowsOf(Kernel kernel) { return CurrentTable().Of(kernel); }

constexpr int kOrin = 87;  // a Tegra GPU, which runs no code for other 8.x

// Whether code compiled for `code_cc` runs on `cc`: if `arch_specific`, only on the same compute
// capability, otherwise also on later minors of the same major.
bool Covers(int code_cc, bool arch_specific, int cc) {
  if (arch_specific || cc == kOrin) return code_cc == cc;
  return code_cc / 10 == cc / 10 && code_cc <= cc;
}

// The shared-memory limit of the GPU; null if packax has no kernels for it. kSharedLimits is in
// ascending order, so the last row that covers the GPU is the closest.
const SharedLimit* LimitOf(int cc) {
  const SharedLimit* nearest = nullptr;
  for (const SharedLimit& limit : kSharedLimits) {
    if (Covers(limit.cc, limit.arch_specific, cc)) nearest = &limit;
  }
  return nearest;
}

bool TooLarge(const Variant& v, int cc) {
  const SharedLimit* limit = LimitOf(cc);
  return limit != nullptr && v.shared > limit->bytes;
}

// Whether it is a variant for the query, though it may need a newer driver or more shared memory.
bool Matches(const Variant& v, const Query& q) {
  if (v.dtype != q.dtype || !Covers(v.cc, v.arch_specific, q.cc)) return false;
  return q.covering ? v.qk_dim >= q.qk_dim && v.v_dim >= q.v_dim
                    : v.qk_dim == q.qk_dim && v.v_dim == q.v_dim;
}

// Whether `a` is preferred over `b`: the smallest head dims first, then architecture-specific code,
// then the newest architecture, then the newest driver.
bool Better(const Variant& a, const Variant& b) {
  const auto rank = [](const Variant& v) {
    return std::tuple(-v.qk_dim - v.v_dim, v.arch_specific, v.cc, v.driver);
  };
  return rank(a) > rank(b);
}

void Append(std::string* list, const std::string& item) {
  if (!list->empty()) *list += ", ";
  *list += item;
}

// How to build all kernels, if this build was narrowed and a full build has kernels for the GPU.
std::string WholeBuild(int cc) {
  if (*Part() == '\0' || LimitOf(cc) == nullptr) return "";
  std::ostringstream out;
  out << "; this build has only some of packax's kernels (" << Part()
      << "): PACKAX_ARCHS=all pip install ./ builds all";
  return out.str();
}

std::string Dims(int64_t qk_dim, int64_t v_dim) {
  return std::to_string(qk_dim) + "x" + std::to_string(v_dim);
}

}  // namespace

std::span<const Variant> Variants() { return kTable; }

const char* Part() { return kPart; }

Table::Table(std::span<const Variant> rows) : by_kernel_(std::size(kKernelNames)) {
  for (const Variant& v : rows) {
    by_kernel_[static_cast<size_t>(v.kernel)].push_back(&v);
    ccs_.insert(v.cc);
  }
}

const Table& CurrentTable() {
  static const auto* const built = new Table(kTable);
  return other_table != nullptr ? *other_table : *built;
}

UseTable::UseTable(const Table& table) : before_(std::exchange(other_table, &table)) {}

UseTable::~UseTable() { other_table = before_; }

const Table& FullBuild() {
  static const auto* const table = [] {
    auto* rows = new std::vector<Variant>;
    for (const TableRow& row : kWholeTable) {
      Variant v{};
      v.name = row.kernel;
      v.qk_dim = row.qk_dim;
      v.v_dim = row.v_dim;
      if (ParseKernel(row.kernel, &v.kernel) && ParseDtype(row.dtype, &v.dtype)) rows->push_back(v);
    }
    return new Table(*rows);
  }();
  return *table;
}

const Variant* Find(const Query& q) {
  const Variant* best = nullptr;
  for (const Variant* v : RowsOf(q.kernel)) {
    if (!Matches(*v, q) || v->driver > q.driver || TooLarge(*v, q.cc)) continue;
    if (best == nullptr || Better(*v, *best)) best = v;
  }
  return best;
}

std::string DescribeMissing(const Query& q) {
  // Sorted as numbers, not as text: sm_100a comes after sm_90a, 128x128 after 64x64.
  std::set<std::tuple<int, std::string>> archs;
  std::set<std::string> dtypes;
  std::set<std::tuple<int, int>> dims;
  for (const Variant* v : RowsOf(q.kernel)) {
    archs.emplace(v->cc, v->arch);
    dtypes.insert(Name(v->dtype));
    dims.emplace(v->qk_dim, v->v_dim);
  }
  std::string arch_list, dtype_list, dim_list;
  for (const auto& [cc, arch] : archs) Append(&arch_list, arch);
  for (const auto& dtype : dtypes) Append(&dtype_list, dtype);
  for (const auto& [qk_dim, v_dim] : dims) Append(&dim_list, Dims(qk_dim, v_dim));

  // `newer` lacks only a newer driver, and has the lowest such requirement.
  const Variant* newer = nullptr;
  const Variant* too_large = nullptr;
  for (const Variant* v : RowsOf(q.kernel)) {
    if (!Matches(*v, q) || !TooLarge(*v, q.cc)) continue;
    if (too_large == nullptr || Better(*v, *too_large)) too_large = v;
  }
  Query other = q;
  for (other.driver = kNewestDriver; const Variant* found = Find(other);) {
    newer = found;
    other.driver = found->driver - 1;
  }

  std::ostringstream out;
  out << "no " << Name(q.kernel) << " kernel for compute capability " << q.cc / 10 << "."
      << q.cc % 10;
  if (q.dtype != Dtype::kAny) {
    out << ", " << Name(q.dtype) << ", head dims " << Dims(q.qk_dim, q.v_dim)
        << " (query and key x value)";
  }
  if (archs.empty()) {
    out << "; this build has none" << WholeBuild(q.cc);
    return out.str();
  }
  if (newer != nullptr) {
    out << "; " << newer->name << " needs a driver for CUDA " << CudaVersionText(newer->driver)
        << " or newer, this one is for CUDA " << CudaVersionText(q.driver);
    return out.str();
  }
  if (too_large != nullptr) {
    out << "; " << too_large->name << " needs " << too_large->shared
        << " bytes of shared memory, this GPU has " << LimitOf(q.cc)->bytes << " for a block";
  } else {
    out << "; this build has it for " << arch_list;
    if (q.dtype != Dtype::kAny) out << "; " << dtype_list << "; head dims " << dim_list;
  }
  out << WholeBuild(q.cc);
  return out.str();
}

std::string CudaVersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

const char* Name(Kernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }

const char* Name(Dtype dtype) { return kDtypeNames[static_cast<int>(dtype)]; }

bool ParseKernel(std::string_view name, Kernel* kernel) {
  for (size_t i = 0; i < std::size(kKernelNames); ++i) {
    if (name == kKernelNames[i]) return *kernel = static_cast<Kernel>(i), true;
  }
  return false;
}

bool ParseDtype(std::string_view name, Dtype* dtype) {
  for (size_t i = 0; i < std::size(kDtypeNames); ++i) {
    if (name == kDtypeNames[i]) return *dtype = static_cast<Dtype>(i), true;
  }
  return false;
}

}  // namespace packax
