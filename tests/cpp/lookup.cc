// Asks a table that tests/test_emit.py made: reads "kernel cc dtype qk_dim v_dim" lines, answers
// each with the name that Find() gives, or with DescribeMissing(). First prints every row, its
// cubin's bytes included, to show that the generated table, symbols and structs say the same.

#include <cstdio>
#include <iostream>
#include <string>

#include "variants.h"

int main() {
  for (const packax::Variant& v : packax::Variants()) {
    std::cout << v.name << " " << packax::Name(v.kernel) << " " << v.arch << " " << v.cc << " "
              << v.exact << " " << packax::Name(v.dtype) << " " << v.qk_dim << " " << v.v_dim << " "
              << v.symbol << " " << v.threads << " " << v.shared << " " << v.block << " "
              << std::string(reinterpret_cast<const char*>(v.begin), v.bytes()) << " "
              << reinterpret_cast<uintptr_t>(v.begin) % 64 << "\n";
  }
  packax::SidewaysArgs args{.out = &args, .scale = 0.5f, .rows = 7, .bytes = int64_t{1} << 40};
  const auto addresses = args.Addresses();
  std::cout << "args " << addresses.size() << " " << (addresses[0] == &args.out)
            << (addresses[1] == &args.scale) << (addresses[2] == &args.rows)
            << (addresses[3] == &args.bytes)
            << (*static_cast<const void* const*>(addresses[4]) == nullptr)
            << (*static_cast<const void* const*>(addresses[5]) == nullptr) << "\n";
  std::string kernel, dtype;
  packax::Query q;
  while (std::cin >> kernel >> q.cc >> dtype >> q.qk_dim >> q.v_dim) {
    if (!packax::ParseKernel(kernel, &q.kernel) || !packax::ParseDtype(dtype, &q.dtype)) {
      std::cout << "unknown\n";
      continue;
    }
    const packax::Variant* found = packax::Find(q);
    std::cout << (found != nullptr ? found->name : packax::DescribeMissing(q)) << "\n";
  }
}
