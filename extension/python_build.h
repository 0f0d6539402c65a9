#pragma once

#include <cstring>

#include "extension/python_symbols.h"

namespace oomdiag {

/// Whether the interpreter in this process, if there is one, is a free-threaded build ("3.14.0 free-threading build"). There
/// threads run Python at the same time, and what the recorder knows of Python is guarded by the GIL.
inline bool python_is_free_threaded() { return std::strstr(python_symbols::version(), "free-threading") != nullptr; }
inline constexpr char kFreeThreaded[] =
    "this Python is a free-threaded build, in which the recorder cannot read the program's frames without racing with "
    "it; "
    "take the ordinary build for a diagnosis";

}  // namespace oomdiag
