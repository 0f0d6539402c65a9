#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "cli/install.h"

namespace oomdiag {

/// Whether `program` names a Python interpreter: python, python3, python3.12, with or without a folder.
bool is_python(std::string_view program);

/// A Python that can run a program under the recorder.
struct PythonChoice {
  std::string executable;
  std::string note;  ///< which one it is and why, one line

  bool operator==(const PythonChoice&) const = default;
};

/// Which Python to run for `wanted`: that one, with a note where its torch cannot be recorded; the private one only where
/// `wanted` has no torch at all. Throws Error(environment) if `wanted` cannot be started: another environment in its
/// place would be another program. Asks the interpreter where its torch is, without importing it.
PythonChoice choose_python(const std::string& wanted, const Install& install);

/// The same, given the answer: the caller's torch, "2.15.0+cu132", or nullopt.
PythonChoice choose_python(const std::string& wanted, const std::optional<std::string>& torch_version,
                           const Install& install);

/// The value of __version__ in the text of a torch/version.py, or nullopt.
std::optional<std::string> read_torch_version(std::string_view version_py);

}  // namespace oomdiag
