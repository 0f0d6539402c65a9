# What `cmake --install` and the Python wheel consist of. The command line finds the rest from where it lies itself
# (cli/python/install.cpp); the recorder goes along as sources, for whatever torch there is.
if(OOMDIAG_SANITIZE)
  return()
endif()
include(GNUInstallDirs)
set(libraries "lib/oomdiag")
set(share "share/oomdiag")

install(TARGETS oomdiag oomdiag_measure RUNTIME DESTINATION bin)
install(TARGETS oomdiag_preload oomdiag_reports LIBRARY DESTINATION ${libraries})

# For C++ programs: find_package(oomdiag), in an installation, a wheel or this build.
set(config "${CMAKE_BINARY_DIR}/lib/cmake/oomdiag")
include(CMakePackageConfigHelpers)
write_basic_package_version_file("${config}/oomdiagConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
configure_file(scripts/cmake/oomdiagConfig.cmake "${config}/oomdiagConfig.cmake" COPYONLY)
configure_file(extension/oomdiag.h "${CMAKE_BINARY_DIR}/include/oomdiag/oomdiag.h" COPYONLY)
install(FILES "${config}/oomdiagConfig.cmake" "${config}/oomdiagConfigVersion.cmake" DESTINATION lib/cmake/oomdiag)
install(FILES extension/oomdiag.h DESTINATION include/oomdiag)

get_property(mocks GLOBAL PROPERTY oomdiag_mocks)
install(TARGETS ${mocks} LIBRARY DESTINATION ${libraries}/virtual_device)
install(DIRECTORY extension/python/fixes/ DESTINATION ${libraries}/python/fixes/site-packages FILES_MATCHING PATTERN "*.py")
if(SKBUILD)  # OOMDIAG=1 in the environment: read by every start of that Python
  install(FILES extension/python/oomdiag.pth DESTINATION "${SKBUILD_PLATLIB_DIR}")
else()  # there it is the package itself
  install(DIRECTORY extension/python/oomdiag DESTINATION ${libraries}/python FILES_MATCHING PATTERN "*.py" PATTERN "py.typed")
endif()

install(DIRECTORY extension/virtual_device/device_files DESTINATION ${share} FILES_MATCHING PATTERN "*.json")
install(FILES extension/virtual_device/gpus_without_profile.json profiler/report/oomdiag-report-1.schema.json DESTINATION ${share})
install(FILES "${CMAKE_BINARY_DIR}/share/recorder_units.txt" DESTINATION ${share})
install(FILES profiler/error.h profiler/event.h profiler/meter_words.h DESTINATION ${share}/sources/profiler)
install(DIRECTORY profiler/trace DESTINATION ${share}/sources/profiler FILES_MATCHING REGEX "\\.(h|cpp)$")
install(DIRECTORY extension DESTINATION ${share}/sources FILES_MATCHING REGEX "extension/[^/]*\\.(h|cpp|map)$"
  REGEX "extension/(record|cupti|virtual_device/torch)/[^/]*\\.(h|cpp)$" REGEX "extension/virtual_device/driver/device\\.h$"
  REGEX "extension/virtual_device/entry_point\\.h$" PATTERN "python" EXCLUDE)
