# Imported targets from NVIDIA's PyPI packages, which PyTorch's wheel brings along: headers, and libraries whose names are looked at. No CUDA toolkit.
#
# Input:  OOMDIAG_NVIDIA, the .../site-packages/nvidia folder with CUDA 13's (default: beside OOMDIAG_TORCH, else that of the Python that
#         CMake finds; scripts/build gives that of .venv where the torch is one for CUDA 12).
# Output: wheel::cuda_headers   cuda.h, cuda_runtime_api.h, cupti.h, cublas, ... of CUDA 13 (cuda-toolkit[crt,cccl] brings what torch does not)
#         wheel::cudnn_headers  cudnn.h
#         wheel::nccl_headers   nccl.h
#         wheel::cuda12_headers those of CUDA 12's runtime, where nvidia-cuda-runtime-cu12 is installed: OOMDIAG_CUDA12_INCLUDE
#         CudaWheels_LIB_DIR, CudaWheels_CUDNN_LIB_DIR, CudaWheels_NCCL_LIB_DIR, CudaWheels_INCLUDE

if(NOT OOMDIAG_NVIDIA AND OOMDIAG_TORCH)
  get_filename_component(OOMDIAG_NVIDIA "${OOMDIAG_TORCH}/../nvidia" ABSOLUTE)
endif()
if(NOT OOMDIAG_NVIDIA)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND "${Python3_EXECUTABLE}" -c "import nvidia; print(list(nvidia.__path__)[0])"
    OUTPUT_VARIABLE OOMDIAG_NVIDIA OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(OOMDIAG_NVIDIA "${OOMDIAG_NVIDIA}" CACHE PATH "site-packages/nvidia: the packages with CUDA's headers")

file(GLOB CudaWheels_INCLUDE "${OOMDIAG_NVIDIA}/cu13/include")
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudaWheels
  REQUIRED_VARS CudaWheels_INCLUDE
  REASON_FAILURE_MESSAGE "no packages of CUDA 13 in '${OOMDIAG_NVIDIA}', run scripts/setup, or set OOMDIAG_NVIDIA to a site-packages/nvidia that has them")

if(NOT EXISTS "${CudaWheels_INCLUDE}/crt/host_defines.h")
  get_filename_component(site_packages "${OOMDIAG_NVIDIA}" DIRECTORY)
  file(GLOB metadata "${site_packages}/torch-*.dist-info/METADATA")
  set(toolkit "cuda-toolkit[crt,cccl]")
  if(metadata)
    list(GET metadata 0 metadata)
    file(STRINGS "${metadata}" needed REGEX "^Requires-Dist: cuda-toolkit")
    if("${needed}" MATCHES "==([0-9.]+)")
      string(APPEND toolkit "==${CMAKE_MATCH_1}")
    endif()
  endif()
  get_filename_component(own_python "${site_packages}/../../../bin/python3" ABSOLUTE)
  message(FATAL_ERROR "the wheel lacks the header crt/host_defines.h; run: ${own_python} -m pip install '${toolkit}'")
endif()

get_filename_component(CudaWheels_LIB_DIR "${CudaWheels_INCLUDE}/../lib" ABSOLUTE)
set(CudaWheels_CUDNN_LIB_DIR "${OOMDIAG_NVIDIA}/cudnn/lib")
set(CudaWheels_NCCL_LIB_DIR "${OOMDIAG_NVIDIA}/nccl/lib")
set(OOMDIAG_CUDA12_INCLUDE "${OOMDIAG_NVIDIA}/cuda_runtime/include" CACHE PATH "cuda_runtime_api.h of CUDA 12, for the virtual device under such a torch")

if(NOT TARGET wheel::cuda_headers)
  add_library(wheel::cuda_headers INTERFACE IMPORTED)
  target_include_directories(wheel::cuda_headers SYSTEM INTERFACE "${CudaWheels_INCLUDE}")

  add_library(wheel::cudnn_headers INTERFACE IMPORTED)
  target_include_directories(wheel::cudnn_headers SYSTEM INTERFACE "${OOMDIAG_NVIDIA}/cudnn/include")
  target_link_libraries(wheel::cudnn_headers INTERFACE wheel::cuda_headers)

  add_library(wheel::nccl_headers INTERFACE IMPORTED)
  target_include_directories(wheel::nccl_headers SYSTEM INTERFACE "${OOMDIAG_NVIDIA}/nccl/include")
  target_link_libraries(wheel::nccl_headers INTERFACE wheel::cuda_headers)

  if(EXISTS "${OOMDIAG_CUDA12_INCLUDE}/cuda_runtime_api.h")
    add_library(wheel::cuda12_headers INTERFACE IMPORTED)
    target_include_directories(wheel::cuda12_headers SYSTEM INTERFACE "${OOMDIAG_CUDA12_INCLUDE}" "${CudaWheels_INCLUDE}")  # crt/ is in the second
  endif()
endif()
