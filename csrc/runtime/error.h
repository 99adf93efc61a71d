// Errors as ffi::Error values: PACKAX_CHECK returns an error if a condition fails, PACKAX_TRY
// propagates one.
//
// Codes mirror the Python side. kInvalidArgument: the request is invalid (ValueError).
// kUnimplemented: the request is valid, but there is no kernel for it here (NotImplementedError).
// kInternal: the driver failed.

#pragma once

#include <sstream>

#include "xla/ffi/api/ffi.h"

namespace packax {

namespace ffi = xla::ffi;

// Collects the message of an error, and converts to ffi::Error when returned.
class ErrorBuilder {
 public:
  explicit ErrorBuilder(ffi::ErrorCode code) : code_(code) {}

  template <typename T>
  ErrorBuilder& operator<<(const T& value) {
    text_ << value;
    return *this;
  }

  operator ffi::Error() const {
    return ffi::Error(code_, text_.str());
  }  // NOLINT: implicit on purpose

 private:
  ffi::ErrorCode code_;
  std::ostringstream text_;
};

}  // namespace packax

// PACKAX_CHECK(heads > 0, kInvalidArgument) << "heads is " << heads << ", expected at least 1";
#define PACKAX_CHECK(condition, code) \
  if (condition) [[likely]] {         \
  } else /* NOLINT */                 \
    return ::packax::ErrorBuilder(::xla::ffi::ErrorCode::code)

// PACKAX_TRY(CheckGrid(kernel, grid));
#define PACKAX_TRY(expression)                                                                  \
  do {                                                                                          \
    if (::xla::ffi::Error packax_error_ = (expression); packax_error_.failure()) [[unlikely]] { \
      return packax_error_;                                                                     \
    }                                                                                           \
  } while (false)
