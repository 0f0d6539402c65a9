#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "cli/python/install.h"

namespace oomdiag {

/// Whether `program` names a Python interpreter: python, python3, python3.12, with or without a folder.
bool is_python(std::string_view program);

/// The torch of a Python.
struct TorchOfPython {
  std::string python{};            ///< the interpreter, as it was named
  std::string tag{};               ///< of the interpreter, "cpython-311"
  std::filesystem::path folder{};  ///< site-packages/torch; empty = it has none
  std::string version{};           ///< "2.15.0+cu132"
  std::string cuda{};              ///< "13.2"; empty = built without
  bool is_rocm = false;

  bool operator==(const TorchOfPython&) const = default;
};

/// Asks the interpreter where its torch is, without importing it, which takes a second; nullopt if it cannot be started.
std::optional<TorchOfPython> look_at_torch(const std::string& python);

/// Version, CUDA and ROCm as the text of a torch/version.py has them.
void read_version_py(std::string_view text, TorchOfPython& torch);

/// A Python that can run a program under the recorder.
struct PythonChoice {
  std::string executable;
  std::string note;                 ///< which one it is and why, one line
  bool needs_own_recorder = false;  ///< its torch is not the one that this build has a recorder for
  std::string no_recorder{};        ///< why there is nothing to record, or empty

  bool operator==(const PythonChoice&) const = default;
};

/// Which Python to run for `interpreter`, given its torch: that one; the private one only where `interpreter` has no
/// torch at all and means any Python.
PythonChoice choose_python(const std::string& interpreter, const TorchOfPython& torch, const Install& install);

/// The interpreter of a script in PATH that is written in Python, as torchrun and accelerate are; empty if it is none.
std::string interpreter_of(const std::string& program);

/// The interpreter that stands in the first lines of such a script, or empty.
std::string read_interpreter(std::string_view beginning);

/// Makes `install` the one for the torch of the Python that runs `program`, which may be another program: the recorder is built
/// where there is none yet, or `install` says why it has none. Returns the program, with the private python in the place of a
/// "python" or "python3" that has no torch; what is run is said on stderr. Throws Error(environment) if a Python that was named
/// otherwise cannot be started or has no torch.
std::string prepare_torch(const std::string& program, Install& install);

}  // namespace oomdiag
