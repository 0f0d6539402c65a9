# find_package(oomdiag): oomdiag::oomdiag, what <oomdiag/oomdiag.h> declares, for the torch of OOMDIAG_PYTHON (default: python3).
# It depends on that torch: the program links with LibTorch itself. Where there is no recorder for this torch yet it is built.
if(TARGET oomdiag::oomdiag)
  return()
endif()
get_filename_component(prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT OOMDIAG_PYTHON)
  set(OOMDIAG_PYTHON python3)
endif()
execute_process(COMMAND "${prefix}/bin/oomdiag" recorder "${OOMDIAG_PYTHON}" OUTPUT_VARIABLE answer RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  set(oomdiag_FOUND FALSE)
  set(oomdiag_NOT_FOUND_MESSAGE "there is no recorder for the torch of '${OOMDIAG_PYTHON}', see above; set OOMDIAG_PYTHON to the Python that has it")
  return()
endif()
string(JSON library GET "${answer}" recorder)
add_library(oomdiag::oomdiag SHARED IMPORTED)
set_target_properties(oomdiag::oomdiag PROPERTIES
  IMPORTED_LOCATION "${library}"
  INTERFACE_INCLUDE_DIRECTORIES "${prefix}/include"
  INTERFACE_COMPILE_FEATURES cxx_std_11
  INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined")  # what it needs of torch the program brings
# Wheels of torch up to 2.6 have the strings of before C++11 in their interface, and so has the recorder for them.
file(STRINGS "${library}" old_strings REGEX "^_ZN7oomdiag5startERKSs$" LIMIT_COUNT 1)
if(old_strings)
  set_target_properties(oomdiag::oomdiag PROPERTIES INTERFACE_COMPILE_DEFINITIONS _GLIBCXX_USE_CXX11_ABI=0)
endif()
