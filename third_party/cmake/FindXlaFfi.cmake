# The C++ headers of XLA's FFI, as jaxlib ships them: target packax::xla_ffi.
#
# PACKAX_XLA_INCLUDE_DIR overrides the search, which asks the building Python for its jaxlib.

set(PACKAX_XLA_INCLUDE_DIR "" CACHE PATH
    "Folder that holds xla/ffi/api/ffi.h (default: the installed jaxlib's)")
option(PACKAX_ANY_FFI_VERSION "Accept newer FFI headers" OFF)

# The oldest headers for this Python, as in pyproject.toml.
if(Python_VERSION VERSION_LESS 3.15)
  set(wanted jaxlib==0.8.0)
  set(api 0.1)
else()
  set(wanted jaxlib==0.11.1)
  set(api 0.4)
endif()

set(XlaFfi_INCLUDE_DIR "${PACKAX_XLA_INCLUDE_DIR}")
if(NOT XlaFfi_INCLUDE_DIR)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; spec = u.find_spec('jaxlib'); \
print(spec.submodule_search_locations[0] + '/include')"
    OUTPUT_VARIABLE XlaFfi_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

set(header "${XlaFfi_INCLUDE_DIR}/xla/ffi/api/c_api.h")
if(NOT EXISTS "${header}")
  message(FATAL_ERROR "\
packax: no XLA FFI headers at '${XlaFfi_INCLUDE_DIR}'. Install ${wanted} into \
${Python_EXECUTABLE} or set -DPACKAX_XLA_INCLUDE_DIR.")
endif()
file(STRINGS "${header}" version REGEX "^#define XLA_FFI_API_(MAJOR|MINOR) [0-9]+$")
string(REGEX REPLACE "[^0-9;]" "" version "${version}")
list(JOIN version "." XlaFfi_VERSION)

# A module built against API 0.N is refused by every jaxlib whose own API is older than 0.N.
if(NOT XlaFfi_VERSION STREQUAL api AND NOT PACKAX_ANY_FFI_VERSION)
  message(FATAL_ERROR "\
packax: the XLA FFI headers at '${XlaFfi_INCLUDE_DIR}' are API ${XlaFfi_VERSION}, \
expected ${api} (${wanted}): older jaxlibs would refuse the result. Build with isolation \
(pip install ./), point -DPACKAX_XLA_INCLUDE_DIR at the include folder of ${wanted}, or set \
-DPACKAX_ANY_FFI_VERSION=ON for a module of your own.")
endif()
message(STATUS "packax: XLA FFI API ${XlaFfi_VERSION} from ${XlaFfi_INCLUDE_DIR}")

set(XlaFfi_FOUND TRUE)
if(NOT TARGET packax::xla_ffi)
  add_library(packax::xla_ffi INTERFACE IMPORTED)
  keep_copy("${XlaFfi_INCLUDE_DIR}" xla_ffi "xla/ffi/api/*.h")
  target_include_directories(packax::xla_ffi SYSTEM INTERFACE "${xla_ffi}")
endif()
