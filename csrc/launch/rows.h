// Tables of kernels: a row has the kernels that compute some calls, in order of preference. The
// select_*.cc files have a table for each kind of call. Here is how a row is found, and run.

#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <vector>

#include "launch/run.h"
#include "launch/select.h"

namespace packax {

inline constexpr size_t kMaxSteps = 5;

// One kernel of a call.
template <typename Operands>
struct Step {
  Kernel kernel;
  void (*list)(const Operands&, Arguments*);
  Grid (*grid)(const Operands&, int64_t block);
  bool (*needed)(const Operands&);  // null: always run; else always loaded, but run if true
  const void* Operands::* counter;  // of a persistent kernel (run.h)
  int resident = 1;                 // its programs per multiprocessor
};

template <typename Args, typename Operands>
constexpr Step<Operands> Use(Grid (*grid)(const Operands&, int64_t block),
                             bool (*needed)(const Operands&) = nullptr,
                             const void* Operands::* counter = nullptr) {
  return {Args::kKernel, &Args::template List<Operands, Arguments>, grid, needed, counter};
}

template <typename Operands>
using Steps = std::array<Step<Operands>, kMaxSteps>;  // unused ones have no list

enum class Dims {
  kExact,     // kernels for exactly the call's head dims
  kClipped,   // all of the same head dims, the smallest for which the row's second kernel (or its
              // only one) exists: their tensor maps end at the call's last column
  kCovering,  // each kernel with the smallest head dims that cover the call's
};
enum class Gpus {
  kSome,
  kAll,  // in a full build
};

// The kernels that together compute the calls for which `takes` is true.
template <typename Operands>
struct Row {
  bool (*takes)(const Operands&, const Device&);
  Gpus gpus;
  Dims dims;
  Steps<Operands> steps;
  bool sums_dq = false;     // accumulates dQ in memory
  int64_t copied_keys = 0;  // with up to so many keys, the first part of a block of rows is copied
};

// The table for a call.
std::span<const Row<ForwardOperands>> RowsOf(const ForwardOperands& o);
std::span<const Row<BackwardOperands>> RowsOf(const BackwardOperands& o);
std::span<const Row<TangentOperands>> RowsOf(const TangentOperands& o);
std::span<const Row<DecodeOperands>> RowsOf(const DecodeOperands& o);
std::span<const Row<DocumentsOperands>> RowsOf(const DocumentsOperands& o);
std::span<const Row<BlocksOperands>> RowsOf(const BlocksOperands& o);

// A row of a table and its loaded kernels.
template <typename Operands>
struct Selected {
  const Row<Operands>* row = nullptr;
  std::array<LoadedKernel, kMaxSteps> kernels;

  int block(size_t step) const { return kernels[step].variant->block; }
};

// The dtype of a kernel's variants. A float32 kernel without matrix products is the same for both
// precisions. Kernels for a cache in FP8 take queries in either 16-bit dtype.
inline Dtype DtypeOf(Kernel kernel, Dtype dtype) {
  switch (kernel) {
    case Kernel::kDecodeFp8:
    case Kernel::kDecodeTallFp8:
    case Kernel::kDecodeFp8Pages:
    case Kernel::kDecodeTallFp8Pages:
      return dtype == Dtype::kBf16 || dtype == Dtype::kF16 ? Dtype::kE4m3 : dtype;
    case Kernel::kBackwardDeltaFallback:
    case Kernel::kDecodeCombine:
      return dtype == Dtype::kTf32 ? Dtype::kF32 : dtype;
    default:
      return dtype;
  }
}

// Whether dq_sum has room for the columns of these kernels.
template <typename Operands>
bool HasRoom(const Row<Operands>& row, const Operands& o, int64_t qk_dim) {
  if constexpr (requires { o.dq_columns; }) return !row.sums_dq || o.dq_columns >= qk_dim;
  return true;
}

// Finds all kernels of a row; false if this device lacks one, which `query` then describes.
template <typename Operands>
bool FindAll(const Row<Operands>& row, const Operands& o, const Device& device, Query* query,
             std::array<const Variant*, kMaxSteps>* variants) {
  int64_t qk_dim = o.qk_dim, v_dim = o.v_dim;
  if (row.dims == Dims::kClipped) {
    const Kernel kernel = row.steps[row.steps[1].list != nullptr ? 1 : 0].kernel;
    const Variant* widest = Find({kernel, device.cc, o.dtype, qk_dim, v_dim, device.driver, true});
    if (widest == nullptr) return false;
    qk_dim = widest->qk_dim;
    v_dim = widest->v_dim;
  }
  for (size_t i = 0; i < kMaxSteps && row.steps[i].list != nullptr; ++i) {
    const Kernel kernel = row.steps[i].kernel;
    const Dtype dtype = DtypeOf(kernel, o.dtype);
    const bool covering = row.dims == Dims::kCovering;
    *query = {kernel, device.cc, dtype, qk_dim, v_dim, device.driver, covering};
    (*variants)[i] = Find(*query);
    if ((*variants)[i] == nullptr) return false;
  }
  return HasRoom(row, o, qk_dim);
}

// The first row that accepts the call and whose kernels, `variants`, all exist for this device. If
// there is none, null, and `missing` describes the first Gpus::kAll row that accepts the call.
template <typename Operands>
const Row<Operands>* FirstRow(std::span<const Row<Operands>> rows, const Operands& o,
                              const Device& device, std::optional<Query>* missing,
                              std::array<const Variant*, kMaxSteps>* variants) {
  for (const Row<Operands>& row : rows) {
    if (!row.takes(o, device)) continue;
    Query query;
    *variants = {};
    if (FindAll(row, o, device, &query, variants)) return &row;
    if (row.gpus == Gpus::kAll && !*missing) *missing = query;
  }
  return nullptr;
}

// Loads the kernels of that row.
template <typename Operands>
ffi::Error Select(const Operands& o, Device** device, Selected<Operands>* selected) {
  PACKAX_TRY(CurrentDevice(device));
  std::optional<Query> missing;
  std::array<const Variant*, kMaxSteps> variants;
  selected->row = FirstRow(RowsOf(o), o, **device, &missing, &variants);
  if (selected->row != nullptr) {
    for (size_t i = 0; i < kMaxSteps && variants[i] != nullptr; ++i) {
      PACKAX_TRY(Load(*device, *variants[i], &selected->kernels[i]));
    }
    return ffi::Error::Success();
  }
  return ErrorBuilder(ffi::ErrorCode::kUnimplemented)
         << DescribeMissing(*missing) << "; device " << (*device)->ordinal << " is "
         << (*device)->name << ". implementation=\"xla\", of create_attention_mask too, needs no "
         << "kernels";
}

// `each` has the operands of all steps, or of each step in turn.
template <typename Operands>
ffi::Error Run(Stream stream, std::span<const Operands> each, const Selected<Operands>& selected) {
  std::array<Launch, kMaxSteps> launches;
  size_t count = 0;
  for (size_t i = 0; i < kMaxSteps && selected.row->steps[i].list != nullptr; ++i) {
    const Step<Operands>& step = selected.row->steps[i];
    const Operands& o = each[std::min(i, each.size() - 1)];
    if (step.needed != nullptr && !step.needed(o)) continue;
    Launch& launch = launches[count++];
    launch.kernel = selected.kernels[i];
    launch.grid = step.grid(o, selected.block(i));
    launch.persistent = step.counter != nullptr;
    if (launch.persistent) launch.counter = o.*step.counter;
    launch.resident = step.resident;
    step.list(o, &launch.arguments);
  }
  return Run(stream, std::span(launches).first(count));
}

template <typename Operands>
ffi::Error Run(Stream stream, const Operands& o, const Selected<Operands>& selected) {
  return Run(stream, std::span(&o, 1), selected);
}

template <typename Operands>
constexpr bool Always(const Operands&, const Device&) {
  return true;
}

// --- What judge.cc asks.

template <typename Operands>
Choice Choose(const Operands& o, const Device& device) {
  if (!IsAligned(o)) return {};
  std::optional<Query> missing;
  std::array<const Variant*, kMaxSteps> variants;
  const Row<Operands>* row = FirstRow(RowsOf(o), o, device, &missing, &variants);
  if (row == nullptr) return {};
  Choice choice;
  choice.found = true;
  choice.fallback = row->dims == Dims::kCovering;
  choice.clipped = row->dims == Dims::kClipped;
  choice.qk_dim = variants[row->steps[1].list != nullptr ? 1 : 0]->qk_dim;
  for (size_t i = 0; i < kMaxSteps && variants[i] != nullptr; ++i) {
    const Step<Operands>& step = row->steps[i];
    if (step.needed == nullptr || step.needed(o)) choice.kernels.push_back(variants[i]);
  }
  if constexpr (requires { o.algorithm; }) {
    Operands other = o;
    for (const auto least :
         {Algorithm::kSm90Fused, Algorithm::kSm90Separate, Algorithm::kPortable}) {
      other.algorithm = least;
      if (row->takes(other, device)) choice.needs = least;
    }
  }
  return choice;
}

template <typename Operands>
bool HasDedicated(const Operands& o, const Device& device) {
  Query query;
  std::array<const Variant*, kMaxSteps> variants;
  return IsAligned(o) && std::ranges::any_of(RowsOf(o), [&](Row<Operands> row) {
           if (row.dims == Dims::kCovering || !row.takes(o, device)) return false;
           row.dims = Dims::kExact;
           return FindAll(row, o, device, &query, &variants);
         });
}

template <typename Operands>
bool HasCommon(const Operands& o, const Device& device) {
  Query query;
  std::array<const Variant*, kMaxSteps> variants;
  return IsAligned(o) && std::ranges::any_of(RowsOf(o), [&](const Row<Operands>& row) {
           return row.gpus == Gpus::kAll && row.takes(o, device) &&
                  FindAll(row, o, device, &query, &variants);
         });
}

// Instantiates them in the file that has the table.
#define PACKAX_CHOOSE(Operands)                               \
  template Choice Choose(const Operands&, const Device&);     \
  template bool HasDedicated(const Operands&, const Device&); \
  template bool HasCommon(const Operands&, const Device&);

template <typename Operands>
ffi::Error SelectAndRun(Stream stream, const Operands& o) {
  Device* device;
  Selected<Operands> selected;
  PACKAX_TRY(Select(o, &device, &selected));
  return Run(stream, o, selected);
}

}  // namespace packax
