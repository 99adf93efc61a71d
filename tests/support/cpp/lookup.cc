// Asks a table that tests/aot/test_emit.py made: reads "kernel cc dtype qk_dim v_dim driver" lines,
// answers each with the name that Find() gives, or with DescribeMissing(). First prints every row,
// its cubin's bytes included, to show that the generated table, symbols and structs say the same.

#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>

#include "runtime/variants.h"

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
  packax::SidewaysArgs args{.out = &args, .scale = 0.5f, .rows = 7, .bytes = int64_t{1} << 40};
  const auto addresses = args.Addresses();
  std::cout << "args " << addresses.size() << " " << (addresses[0] == &args.out)
            << (addresses[1] == &args.scale) << (addresses[2] == &args.rows)
            << (addresses[3] == &args.bytes)
            << (*static_cast<const void* const*>(addresses[4]) == nullptr)
            << (*static_cast<const void* const*>(addresses[5]) == nullptr) << "\n";
  // A map is seven parameters; the first must be aligned, whatever stands before it.
  packax::MappedArgs mapped{.query = {}, .dk = {}, .q_order = nullptr, .rows = 7};
  const auto m = mapped.Addresses();
  const packax::TensorMap &q = mapped.query, &d = mapped.dk;
  const void* const want[] = {q.map,         &q.shape[0],   &q.shape[1],     &q.shape[2],
                              &q.strides[0], &q.strides[1], &q.strides[2],   d.map,
                              &d.shape[0],   &d.shape[1],   &d.shape[2],     &d.strides[0],
                              &d.strides[1], &d.strides[2], &mapped.q_order, &mapped.rows};
  std::cout << "maps " << m.size() << " "
            << (reinterpret_cast<uintptr_t>(q.map) | reinterpret_cast<uintptr_t>(d.map)) % 64;
  for (size_t i = 0; i < std::size(want); ++i) std::cout << (m[i] == want[i]);
  std::cout << (packax::MappedArgs::kDk == 1) << "\n";
  // No variant, but a struct: the handlers have to compile.
  std::cout << "absent " << (packax::AbsentArgs::kKernel == packax::Kernel::kAbsent)
            << (packax::AbsentArgs::kDk == 0) << "\n";
  std::string kernel, dtype;
  packax::Query query;
  while (std::cin >> kernel >> query.cc >> dtype >> query.qk_dim >> query.v_dim >> query.driver) {
    if (!packax::ParseKernel(kernel, &query.kernel) || !packax::ParseDtype(dtype, &query.dtype)) {
      std::cout << "unknown\n";
      continue;
    }
    const packax::Variant* found = packax::Find(query);
    std::cout << (found != nullptr ? found->name : packax::DescribeMissing(query)) << "\n";
  }
}
