// The generated table of the cubins in this build, and the lookup that selects one for a device.
//
// Uses neither XLA nor the driver, so it can be tested without them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "args.h"  // generated: Kernel, kKernelNames
#include "runtime/tensor_map.h"

namespace packax {

// kTf32: float32 operands, multiplied in TF32 (11-bit significands). kE4m3: key and value in
// float8_e4m3fn.
enum class Dtype { kAny, kBf16, kF16, kF32, kTf32, kE4m3 };

struct Variant {
  const char* name;
  Kernel kernel;
  const char* arch;    // "sm_90a"
  int cc;              // compute capability, 10 * major + minor
  bool arch_specific;  // runs on `cc` only; otherwise on it and later minors of its major
  int driver;          // the oldest driver that loads it; 12090 is CUDA 12.9
  Dtype dtype;
  int qk_dim, v_dim;  // 0 for mask kernels
  const char* symbol;
  int threads;
  int shared;                                // bytes of dynamic shared memory
  int block;                                 // the extent of one program: grids are divided by it
  TensorMapBox tensor_maps[kMaxTensorMaps];  // in the order of the "tma" parameters
  const unsigned char* begin;
  const unsigned char* end;

  size_t bytes() const { return static_cast<size_t>(end - begin); }
};

inline constexpr int kNewestDriver = std::numeric_limits<int>::max();

// A lookup: a kernel for a device, and for attention kernels the dtype and head dims. `covering`:
// at least these head dims, of which Find() takes the smallest.
struct Query {
  Kernel kernel;
  int cc;
  Dtype dtype = Dtype::kAny;
  int64_t qk_dim = 0, v_dim = 0;
  int driver = kNewestDriver;
  bool covering = false;
};

// All variants of this build, sorted by name.
std::span<const Variant> Variants();

// How the build was narrowed, such as "archs 90a, dtypes bf16"; empty for a full build.
const char* Part();

// A table, indexed by kernel, since each call looks up several kernels and the table of a full
// build has about 2,000 rows.
class Table {
 public:
  explicit Table(std::span<const Variant> rows);
  const std::vector<const Variant*>& Of(Kernel kernel) const {
    return by_kernel_[static_cast<size_t>(kernel)];
  }
  const std::set<int>& ccs() const { return ccs_; }  // that variants are compiled for

 private:
  std::vector<std::vector<const Variant*>> by_kernel_;
  std::set<int> ccs_;
};

// What Find() and DescribeMissing() search: the variants of this build, or those of the innermost
// UseTable of this thread. Launching needs the former; the latter answer questions.
const Table& CurrentTable();

class UseTable {
 public:
  explicit UseTable(const Table& table);
  ~UseTable();
  UseTable(const UseTable&) = delete;
  UseTable& operator=(const UseTable&) = delete;

 private:
  const Table* before_;
};

// The kernels of a full build, as if compiled for one GPU of compute capability 0.
const Table& FullBuild();

// The variant specific to this compute capability if there is one, otherwise the one for the
// highest minor of the same major that the device can run; among several, the newest driver's.
// Variants that need a newer driver or more shared memory than there is are excluded. Null if there
// is none.
const Variant* Find(const Query& query);

// Explains why Find() failed: the device, the query, and this build's variants of the kernel.
std::string DescribeMissing(const Query& query);

// "12.9" of 12090.
std::string CudaVersionText(int version);

const char* Name(Kernel kernel);
const char* Name(Dtype dtype);
bool ParseKernel(std::string_view name, Kernel* kernel);
bool ParseDtype(std::string_view name, Dtype* dtype);

}  // namespace packax
