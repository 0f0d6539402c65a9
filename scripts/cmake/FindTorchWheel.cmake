# Imported targets from an installed PyPI torch wheel. The wheel's own find_package(Torch) wants nvcc and a CUDA toolkit; this needs neither.
#
# Input:  OOMDIAG_TORCH, the .../site-packages/torch folder (CMake variable or environment; default: the private .venv).
# Output: wheel::torch         headers and libraries of LibTorch, as system headers
#         wheel::cuda_headers  cuda.h, cuda_runtime_api.h, cublas, nccl, ... (needs the PyPI package cuda-toolkit[crt,cccl])
#         wheel::cudnn_headers cudnn.h
#         wheel::nccl_headers  nccl.h
#         TorchWheel_VERSION, TorchWheel_CUDA_LIB_DIR, TorchWheel_CUDNN_LIB_DIR, TorchWheel_NCCL_LIB_DIR, TorchWheel_NEWEST_ARCHITECTURES

if(NOT OOMDIAG_TORCH AND DEFINED ENV{OOMDIAG_TORCH})
  set(OOMDIAG_TORCH "$ENV{OOMDIAG_TORCH}")
endif()
if(NOT OOMDIAG_TORCH)
  file(GLOB private_torch "${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch")
  set(OOMDIAG_TORCH "${private_torch}")
endif()
set(OOMDIAG_TORCH "${OOMDIAG_TORCH}" CACHE PATH "site-packages/torch of the wheel to build against")

get_filename_component(site_packages "${OOMDIAG_TORCH}" DIRECTORY)
set(nvidia "${site_packages}/nvidia")
file(GLOB cuda_include "${nvidia}/cu[0-9]*/include")

include(FindPackageHandleStandardArgs)
if(EXISTS "${OOMDIAG_TORCH}/version.py")
  file(STRINGS "${OOMDIAG_TORCH}/version.py" version_line REGEX "^__version__")
  string(REGEX REPLACE ".*'([^']+)'.*" "\\1" TorchWheel_VERSION "${version_line}")
endif()
find_package_handle_standard_args(TorchWheel
  REQUIRED_VARS OOMDIAG_TORCH TorchWheel_VERSION cuda_include
  VERSION_VAR TorchWheel_VERSION
  REASON_FAILURE_MESSAGE "no CUDA torch wheel at '${OOMDIAG_TORCH}', run scripts/setup, or set OOMDIAG_TORCH to a site-packages/torch folder")

if(NOT EXISTS "${cuda_include}/crt/host_defines.h")
  file(GLOB metadata "${site_packages}/torch-${TorchWheel_VERSION}.dist-info/METADATA" "${site_packages}/torch-*.dist-info/METADATA")
  set(toolkit "cuda-toolkit[crt,cccl]")
  if(metadata)
    list(GET metadata 0 metadata)
    file(STRINGS "${metadata}" needed REGEX "^Requires-Dist: cuda-toolkit")
    if("${needed}" MATCHES "==([0-9.]+)")
      string(APPEND toolkit "==${CMAKE_MATCH_1}")
    endif()
  endif()
  get_filename_component(own_python "${OOMDIAG_TORCH}/../../../../bin/python3" ABSOLUTE)
  message(FATAL_ERROR "the wheel lacks the header crt/host_defines.h; run: ${own_python} -m pip install '${toolkit}'")
endif()

get_filename_component(cuda_root "${cuda_include}" DIRECTORY)
set(TorchWheel_CUDA_LIB_DIR "${cuda_root}/lib")
set(TorchWheel_CUDNN_LIB_DIR "${nvidia}/cudnn/lib")
set(TorchWheel_NCCL_LIB_DIR "${nvidia}/nccl/lib")
set(TorchWheel_LIB_DIR "${OOMDIAG_TORCH}/lib")

if(NOT TARGET wheel::cuda_headers)
  add_library(wheel::cuda_headers INTERFACE IMPORTED)
  target_include_directories(wheel::cuda_headers SYSTEM INTERFACE "${cuda_include}")

  add_library(wheel::cudnn_headers INTERFACE IMPORTED)
  target_include_directories(wheel::cudnn_headers SYSTEM INTERFACE "${nvidia}/cudnn/include")
  target_link_libraries(wheel::cudnn_headers INTERFACE wheel::cuda_headers)

  add_library(wheel::nccl_headers INTERFACE IMPORTED)
  target_include_directories(wheel::nccl_headers SYSTEM INTERFACE "${nvidia}/nccl/include")
  target_link_libraries(wheel::nccl_headers INTERFACE wheel::cuda_headers)

  # --no-as-needed: without a direct symbol the linker would drop libtorch_cuda, and CUDA would not be registered.
  add_library(wheel::torch INTERFACE IMPORTED)
  target_include_directories(wheel::torch SYSTEM INTERFACE
    "${OOMDIAG_TORCH}/include" "${OOMDIAG_TORCH}/include/torch/csrc/api/include")
  target_link_directories(wheel::torch INTERFACE "${TorchWheel_LIB_DIR}")
  target_link_options(wheel::torch INTERFACE "LINKER:-rpath,${TorchWheel_LIB_DIR}" "LINKER:--disable-new-dtags" "LINKER:--allow-shlib-undefined")
  target_link_libraries(wheel::torch INTERFACE wheel::cuda_headers
    "-Wl,--push-state,--no-as-needed" torch torch_cuda torch_cpu c10_cuda c10 "-Wl,--pop-state")
endif()
