#pragma once

#include <atomic>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "extension/record/pointer_set.h"
#include "extension/record/python_api.h"

namespace oomdiag {

/// Whose code it is. Torch's own and Python's standard library are nobody's line; a package's is the line where the user's
/// own calls it from far away, as through a trainer.
enum class Code { nobody, package, user, module_call, optimizer };

/// Where the path inside of the installed packages begins; npos of what is not installed.
size_t find_package(std::string_view file);

/// The code objects of the program. Those that are met are held for ever, since their addresses would be used again. All of it
/// with the GIL, but for the two questions that say otherwise.
class ProgramCode {
 public:
  explicit ProgramCode(const PythonApi& api) : api_(api) {}

  Code kind_of(PythonObject code);
  /// Whether it was met, and is held.
  bool holds(PythonObject code) const { return kinds_.contains(code); }
  /// Meets the functions of the module that runs in this frame, which may not have run yet.
  void meet_module(PythonObject frame);

  /// The code that calls the forward of a torch.nn.Module, null before it was met. Any thread, without the GIL.
  const void* module_call() const noexcept { return module_call_.load(std::memory_order_relaxed); }
  /// Whether this code was met and is the user's. Any thread, without the GIL.
  bool is_users(const void* code) const noexcept { return users_.contains(code); }

 private:
  Code classify(PythonObject code) const;
  Code meet(PythonObject code);
  void meet_inner(PythonObject code);
  void meet_functions(PythonObject dict, bool with_classes);

  const PythonApi& api_;
  std::unordered_map<PythonObject, Code> kinds_;
  struct {
    PythonObject code = nullptr;
    Code kind = Code::nobody;
  } recent_[512];                              ///< a small cache before `kinds_`: a dozen frames are looked at per op
  std::unordered_set<PythonObject> searched_;  ///< namespaces of modules, by their addresses: they are not held
  std::atomic<PythonObject> module_call_ = nullptr;
  PointerSet users_;
};

}  // namespace oomdiag
