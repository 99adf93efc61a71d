// Looks up variants in the table that tests/aot/test_lookup.py generates. First prints every row of
// the table with the bytes of its cubin, and the argument lists, so that the test can compare them.
// Then reads lines "kernel cc dtype qk_dim v_dim driver covering", and prints for each the name
// that Find() returns, or DescribeMissing().

#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "runtime/variants.h"

namespace {

struct Operands {
  const void *query = nullptr, *dk = nullptr, *q_order = nullptr, *out = nullptr;
  float scale = 0.5F;
  int32_t rows = 7;
  int64_t bytes = int64_t{1} << 40;
};

struct Listed {
  void Pointer(const void* const* x) { Add("p", x); }
  void Float(const float* x) { Add("f", x); }
  void Int32(const int32_t* x) { Add("i", x); }
  void Int64(const int64_t* x) { Add("l", x); }
  void Map(const void* const* x) { Add("t", x); }
  void Add(const char* type, const void* x) {
    text += type;
    addresses.push_back(x);
  }

  std::string text;
  std::vector<const void*> addresses;
};

}  // namespace

int main() {
  for (const packax::Variant& v : packax::Variants()) {
    std::cout << v.name << " " << packax::Name(v.kernel) << " " << v.arch << " " << v.cc << " "
              << v.arch_specific << " " << v.driver << " " << packax::Name(v.dtype) << " "
              << v.qk_dim << " " << v.v_dim << " " << v.symbol << " " << v.threads << " "
              << v.shared << " " << v.block << " "
              << std::string(reinterpret_cast<const char*>(v.begin), v.bytes()) << " "
              << reinterpret_cast<uintptr_t>(v.begin) % 64;
    for (const packax::TensorMapBox& box : v.tensor_maps) {
      if (box.rows > 0) std::cout << " " << box.rows << " " << box.columns << " " << box.swizzle;
    }
    std::cout << "\n";
  }
  // The fields with the arguments' names, in order, then Triton's two null scratch pointers.
  const Operands o;
  Listed listed;
  packax::SidewaysArgs::List(o, &listed);
  std::cout << "args " << listed.text << " " << (listed.addresses[0] == &o.out)
            << (listed.addresses[1] == &o.scale) << (listed.addresses[2] == &o.rows)
            << (listed.addresses[3] == &o.bytes)
            << (*static_cast<const void* const*>(listed.addresses[4]) == nullptr)
            << (*static_cast<const void* const*>(listed.addresses[5]) == nullptr) << "\n";
  Listed mapped;
  packax::MappedArgs::List(o, &mapped);
  // A tensor map takes nine parameters.
  std::cout << "maps " << mapped.text << " " << (mapped.addresses[0] == &o.query)
            << (mapped.addresses[1] == &o.dk) << (packax::kMaxArguments == 9 + 9 + 2 + 2) << "\n";
  // A kernel without variants in this build has an argument list, so that csrc/launch compiles.
  std::cout << "absent " << (packax::AbsentArgs::kKernel == packax::Kernel::kAbsent) << "\n";
  std::string kernel, dtype;
  packax::Query query;
  while (std::cin >> kernel >> query.cc >> dtype >> query.qk_dim >> query.v_dim >> query.driver >>
         query.covering) {
    if (!packax::ParseKernel(kernel, &query.kernel) || !packax::ParseDtype(dtype, &query.dtype)) {
      std::cout << "unknown\n";
      continue;
    }
    const packax::Variant* found = packax::Find(query);
    std::cout << (found != nullptr ? found->name : packax::DescribeMissing(query)) << "\n";
  }
}
