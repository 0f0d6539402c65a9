# Imported targets from an installed PyPI torch wheel. The wheel's own find_package(Torch) wants nvcc and a CUDA toolkit; this needs neither.
#
# Input:  OOMDIAG_TORCH, the .../site-packages/torch folder (CMake variable or environment; default: the private .venv).
# Output: wheel::torch         headers and libraries of LibTorch, as system headers
#         TorchWheel_VERSION
#         TorchWheel_OLD_STRINGS  it was built with the C++ ABI before that of 2011, as PyPI's wheels were up to 2.6
# Without OOMDIAG_TORCH and without a private .venv there is none, and nothing is built that needs it.

if(NOT OOMDIAG_TORCH AND DEFINED ENV{OOMDIAG_TORCH})
  set(OOMDIAG_TORCH "$ENV{OOMDIAG_TORCH}")
endif()
if(NOT OOMDIAG_TORCH)
  file(GLOB private_torch "${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch")
  set(OOMDIAG_TORCH "${private_torch}")
endif()
set(OOMDIAG_TORCH "${OOMDIAG_TORCH}" CACHE PATH "site-packages/torch of the wheel to build against")

include(FindPackageHandleStandardArgs)
if(EXISTS "${OOMDIAG_TORCH}/version.py")
  file(STRINGS "${OOMDIAG_TORCH}/version.py" version_line REGEX "^__version__")
  string(REGEX REPLACE ".*'([^']+)'.*" "\\1" TorchWheel_VERSION "${version_line}")
  file(STRINGS "${OOMDIAG_TORCH}/share/cmake/Torch/TorchConfig.cmake" TorchWheel_OLD_STRINGS REGEX "_GLIBCXX_USE_CXX11_ABI=0")
endif()
find_package_handle_standard_args(TorchWheel
  REQUIRED_VARS OOMDIAG_TORCH TorchWheel_VERSION
  VERSION_VAR TorchWheel_VERSION
  REASON_FAILURE_MESSAGE "no torch wheel at '${OOMDIAG_TORCH}', run scripts/setup, or set OOMDIAG_TORCH to a site-packages/torch folder")

# --no-as-needed: without a direct symbol the linker would drop libtorch_cuda, and CUDA would not be registered.
if(TorchWheel_FOUND AND NOT TARGET wheel::torch)
  add_library(wheel::torch INTERFACE IMPORTED)
  target_include_directories(wheel::torch SYSTEM INTERFACE
    "${OOMDIAG_TORCH}/include" "${OOMDIAG_TORCH}/include/torch/csrc/api/include")
  target_link_directories(wheel::torch INTERFACE "${OOMDIAG_TORCH}/lib")
  target_link_options(wheel::torch INTERFACE "LINKER:-rpath,${OOMDIAG_TORCH}/lib" "LINKER:--disable-new-dtags" "LINKER:--allow-shlib-undefined")
  # CUDA's headers are those that this torch was built with; the packages of CUDA 12 have a folder for each library.
  get_filename_component(packages "${OOMDIAG_TORCH}" DIRECTORY)
  if(EXISTS "${packages}/nvidia/cu13/include")
    target_link_libraries(wheel::torch INTERFACE wheel::cuda_headers)
  else()
    file(GLOB cuda12_folders "${packages}/nvidia/*/include" "${packages}/triton/backends/nvidia/include")  # crt/ is Triton's
    target_include_directories(wheel::torch SYSTEM INTERFACE ${cuda12_folders})
  endif()
  target_link_libraries(wheel::torch INTERFACE
    "-Wl,--push-state,--no-as-needed" torch torch_cuda torch_cpu c10_cuda c10 "-Wl,--pop-state")
endif()
