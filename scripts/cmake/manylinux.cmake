# A toolchain file: compiles for the C library of 2018, with clang, lld and libc++ of PyPI's package ziglang. scripts/release
# uses it; what it makes runs on every Linux that torch's own wheels (manylinux_2_28) run on.
#
# Input:  OOMDIAG_ZIG           the program `zig`, or the package's: .../site-packages/ziglang/zig
#         OOMDIAG_PROCESSOR     x86_64 (default) or aarch64
#         OOMDIAG_GLIBC         2.28 (default)
#         OOMDIAG_INCLUDE       where fmt, CLI11, nlohmann/json, zlib.h and, for unit tests, Catch2 lie (default: /usr/include): a cross compiler does not look there
# CMake wants one file for each tool, and zig is one program: each gets a script in the build folder.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES OOMDIAG_ZIG OOMDIAG_PROCESSOR OOMDIAG_GLIBC)
foreach(default "OOMDIAG_ZIG=zig" "OOMDIAG_PROCESSOR=x86_64" "OOMDIAG_GLIBC=2.28" "OOMDIAG_INCLUDE=/usr/include")
  string(REGEX MATCH "^([A-Z_]+)=(.*)" unused "${default}")
  if(NOT ${CMAKE_MATCH_1})
    set(${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
  endif()
endforeach()

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_LIBRARY_ARCHITECTURE x86_64-linux-gnu)  # of this machine: where Debian has fmt's CMake files
set(CMAKE_SYSTEM_PROCESSOR "${OOMDIAG_PROCESSOR}")
set(tools "${CMAKE_BINARY_DIR}/zig")
set(target "-target ${OOMDIAG_PROCESSOR}-linux-gnu.${OOMDIAG_GLIBC} -mcpu=baseline")
foreach(tool "cc ${target}" "c++ ${target}" ar ranlib)
  string(REGEX MATCH "^[a-z+]+" name "${tool}")
  file(CONFIGURE OUTPUT "${tools}/${name}" CONTENT "#!/bin/sh\nexec '@OOMDIAG_ZIG@' @tool@ \"$@\"\n" @ONLY)
  file(CHMOD "${tools}/${name}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endforeach()
set(CMAKE_C_COMPILER "${tools}/cc")
set(CMAKE_CXX_COMPILER "${tools}/c++")
set(CMAKE_AR "${tools}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "${tools}/ranlib" CACHE FILEPATH "")
# Stripped by the linker: binutils know the processor of their own machine only.
set(CMAKE_EXE_LINKER_FLAGS_INIT -s)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)

# Headers alone, each under its own name: all of /usr/include would bring the C library of this machine along.
set(OOMDIAG_HEADERS "${CMAKE_BINARY_DIR}/zig/include")
file(MAKE_DIRECTORY "${OOMDIAG_HEADERS}")
foreach(library CLI catch2 fmt nlohmann zlib.h zconf.h)
  file(CREATE_LINK "${OOMDIAG_INCLUDE}/${library}" "${OOMDIAG_HEADERS}/${library}" SYMBOLIC)
endforeach()
