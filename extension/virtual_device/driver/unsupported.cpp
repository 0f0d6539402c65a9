#include "extension/virtual_device/driver/device.h"

/// What every generated stub of this library does.
extern "C" int oomdiag_unsupported(const char* name) {
  oomdiag_device_note("unsupported", name);
  return CUDA_ERROR_NOT_SUPPORTED;
}
