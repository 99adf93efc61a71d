// What this build contains: the generated table of cubins, and the rule that selects one for a
// device.
//
// Pure data and arithmetic: it uses neither XLA nor the driver, so it is tested without either.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "args.h"  // generated: Kernel, kKernelNames
#include "runtime/tensor_map.h"

namespace packax {

// kTf32: float32 operands, with products in TF32 (11 bits of each operand). kE4m3: of key and
// value.
enum class Dtype { kAny, kBf16, kF16, kF32, kTf32, kE4m3 };

struct Variant {
  const char* name;
  Kernel kernel;
  const char* arch;    // "sm_90a"
  int cc;              // compute capability, 10 * major + minor
  bool arch_specific;  // runs on `cc` only; otherwise on the same major, this minor and above
  int driver;          // the oldest driver that loads it; 12090 is CUDA 12.9
  Dtype dtype;
  int qk_dim, v_dim;  // 0 for mask kernels
  const char* symbol;
  int threads;
  int shared;                                // bytes of dynamic shared memory
  int block;                                 // what one program covers: the grid is divided by it
  TensorMapBox tensor_maps[kMaxTensorMaps];  // in the order of the "tma" parameters
  const unsigned char* begin;
  const unsigned char* end;

  size_t bytes() const { return static_cast<size_t>(end - begin); }
};

inline constexpr int kNewestDriver = std::numeric_limits<int>::max();

// A request: a kernel for a device, and for attention kernels the dtype and the head dims.
struct Query {
  Kernel kernel;
  int cc;
  Dtype dtype = Dtype::kAny;
  int64_t qk_dim = 0, v_dim = 0;
  int driver = kNewestDriver;
};

// All rows, by name.
std::span<const Variant> Variants();

// How the build was narrowed, such as "archs 90a, dtypes bf16"; empty: it has every kernel.
const char* Part();

// The row for exactly this compute capability if there is one, otherwise the highest minor of the
// same major that the device can run and for which it has enough shared memory; of several, the one
// for the newest driver that is not newer than this one. Null if there is none.
const Variant* Find(const Query& query);

// Like Find(), among the rows with at least these head dims, of which it takes the smallest.
const Variant* FindCovering(const Query& query);

// Why Find() found nothing: the device, the request, and what this build has of that kernel.
std::string DescribeMissing(const Query& query);

// "12.9" of 12090.
std::string CudaVersionText(int version);

const char* Name(Kernel kernel);
const char* Name(Dtype dtype);
bool ParseKernel(std::string_view name, Kernel* kernel);
bool ParseDtype(std::string_view name, Dtype* dtype);

}  // namespace packax
