#pragma once

namespace oomdiag {

/// The function `name` of the real cuDNN. Not by RTLD_NEXT: Python loads cuDNN RTLD_LOCAL, where RTLD_NEXT does not
/// look. Ends the process with a line when there is none: nothing could be answered truly.
void* find_real(const char* name);

/// The real cuDNN, where it is loaded: as dlopen would give it, were that not interposed.
void* find_real_library();

}  // namespace oomdiag

/// The real function behind the interposed `function`.
#define OOMDIAG_REAL(function)                                                                     \
  ([] {                                                                                            \
    static const auto real = reinterpret_cast<decltype(&function)>(oomdiag::find_real(#function)); \
    return real;                                                                                   \
  }())
