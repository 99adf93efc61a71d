// Runs both stages of a target whose function throws, and prints the code and the message of the
// errors that they return.

#include <iostream>
#include <stdexcept>

#include "ffi/stages.h"

namespace packax {

constexpr auto Throws = [](Stream, int what) -> ffi::Error {
  if (what == 0) throw std::bad_alloc();
  if (what == 1) throw std::runtime_error("of some library");
  if (what == 2) throw 7;
  return ffi::Error::InvalidArgument("it is said");
};

}  // namespace packax

int main() {
  for (int what = 0; what < 4; ++what) {
    packax::Initialize<packax::Target::kDecode, packax::Throws> initialize;
    packax::Execute<packax::Target::kDecode, packax::Throws> execute;
    for (const auto& error : {initialize(what), execute(nullptr, what)}) {
      std::cout << static_cast<int>(*error.errc()) << " " << error.message() << "\n";
    }
  }
}
