# cuda.h alone, as nvidia-cuda-runtime-cu12 ships it: target packax::cuda_header. No CUDA library is
# linked.
#
# PACKAX_CUDA_INCLUDE_DIR overrides the search, which asks the building Python.

set(PACKAX_CUDA_INCLUDE_DIR "" CACHE PATH
    "Folder that holds cuda.h (default: nvidia-cuda-runtime-cu12's)")

set(CudaHeader_INCLUDE_DIR "${PACKAX_CUDA_INCLUDE_DIR}")
if(NOT CudaHeader_INCLUDE_DIR)
  execute_process(
    COMMAND
      ${Python_EXECUTABLE} -c
      "import importlib.util as u; spec = u.find_spec('nvidia.cuda_runtime'); \
print(spec.submodule_search_locations[0] + '/include')"
    OUTPUT_VARIABLE CudaHeader_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

set(header "${CudaHeader_INCLUDE_DIR}/cuda.h")
if(NOT EXISTS "${header}")
  message(FATAL_ERROR "\
packax: no cuda.h at '${CudaHeader_INCLUDE_DIR}'. Install nvidia-cuda-runtime-cu12==12.9.79 into \
${Python_EXECUTABLE} or set -DPACKAX_CUDA_INCLUDE_DIR.")
endif()
file(STRINGS "${header}" version REGEX "^#define CUDA_VERSION [0-9]+$")
string(REGEX REPLACE "[^0-9]" "" CudaHeader_VERSION "${version}")

# driver.cc names functions by their CUDA 12 signatures; CUDA 13 changed some behind the same names.
if(NOT CudaHeader_VERSION MATCHES "^12[0-9][0-9][0-9]$")
  message(FATAL_ERROR "\
packax: cuda.h at '${CudaHeader_INCLUDE_DIR}' is of CUDA_VERSION ${CudaHeader_VERSION}, \
expected 12000 to 12999 (nvidia-cuda-runtime-cu12==12.9.79).")
endif()
message(STATUS "packax: cuda.h ${CudaHeader_VERSION} from ${CudaHeader_INCLUDE_DIR}")

set(CudaHeader_FOUND TRUE)
if(NOT TARGET packax::cuda_header)
  add_library(packax::cuda_header INTERFACE IMPORTED)
  keep_copy("${CudaHeader_INCLUDE_DIR}" cuda_header "cuda.h")
  target_include_directories(packax::cuda_header SYSTEM INTERFACE "${cuda_header}")
endif()
