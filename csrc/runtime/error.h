// Errors as ffi::Error values: one macro checks and returns an error, one passes an error on.
//
// Codes mirror the Python side: kInvalidArgument = the request is wrong (ValueError),
// kUnimplemented = right request, no kernel for it here (NotImplementedError), kInternal = the
// driver failed.

#pragma once

#include <sstream>

#include "xla/ffi/api/ffi.h"

namespace packax {

namespace ffi = xla::ffi;

// Collects the text of an error and becomes the error when returned.
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

// PACKAX_TRY(CheckMask(shape, mask));
#define PACKAX_TRY(expression)                                                                  \
  do {                                                                                          \
    if (::xla::ffi::Error packax_error_ = (expression); packax_error_.failure()) [[unlikely]] { \
      return packax_error_;                                                                     \
    }                                                                                           \
  } while (false)
