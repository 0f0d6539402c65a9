#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "extension/python_symbols.h"
#include "extension/record/object_table.h"
#include "extension/record/pointer_set.h"
#include "extension/record/python_api.h"
#include "profiler/package_paths.h"

namespace oomdiag {

/// Whose code it is. Torch's own and Python's standard library have no line; a package's is the line where the user's
/// own calls it from far away, as through a trainer.
enum class Code { nobody, package, user, module_call, optimizer };

/// Whether it is the code that calls the forward of a torch.nn.Module.
bool is_call_of_module(const PythonApi& api, PythonObject code);

/// A registered code object.
struct KnownCode {
  Code kind = Code::nobody;
  uint64_t number = 0;  ///< counts those that were registered, from 1
  /// Ids of the lines of its instructions in the trace, as far as they were asked for.
  std::unordered_map<int, uint32_t> sources;
};

/// The code objects of the program, until they die: constants of theirs may be large, and a program may make code all the time.
/// All of it with the GIL, but for the questions that say otherwise.
class ProgramCode {
 public:
  explicit ProgramCode(const PythonApi& api) : api_(api), codes_(api, forget, this) {}

  Code kind_of(PythonObject code);
  /// Whether a file is neither of an installed package nor of the standard library.
  bool is_users_file(std::string_view file) { return find_package(file) == file.npos && !is_of_standard_library(file); }
  /// Null if it is not registered.
  KnownCode* find(PythonObject code) { return codes_.find(code); }
  /// Registers the functions of the module that runs in this frame, which may not have run yet.
  void register_module(PythonObject frame);

  /// The code that calls the forward of a torch.nn.Module, null before it was registered. Any thread, without the GIL.
  const void* module_call() const noexcept { return module_call_.load(std::memory_order_relaxed); }
  /// Whether this code is registered and is the user's. Any thread, without the GIL.
  bool is_users(const void* code) const noexcept { return users_.contains(code); }
  /// How many registered ones have died: what is known of their addresses holds until then. Any thread, without the
  /// GIL.
  uint64_t deaths() const noexcept { return codes_.deaths(); }
  /// The number of the newest one. Any thread, without the GIL.
  uint64_t newest() const noexcept { return newest_.load(std::memory_order_relaxed); }

 private:
  struct Recent {
    PythonObject code = nullptr;
    Code kind = Code::nobody;
  };

  Code classify(PythonObject code);
  bool is_of_standard_library(std::string_view file);
  Code register_code(PythonObject code);
  void register_inner(PythonObject code);
  void register_functions(PythonObject dict, bool with_classes);
  static void forget(void* self, PythonObject code);
  Recent& recent(PythonObject code) { return recent_[(reinterpret_cast<uintptr_t>(code) >> 4) % std::size(recent_)]; }

  const PythonApi& api_;
  ObjectTable<KnownCode> codes_;
  Recent recent_[512];                         ///< a small cache before `codes_`: a dozen frames are looked at per op
  std::unordered_set<PythonObject> searched_;  ///< namespaces of modules, by their addresses: they are not held
  std::string standard_library_;               ///< its folder, with '/' at the end; empty = not asked for yet
  std::atomic<uint64_t> newest_ = 0;
  std::atomic<PythonObject> module_call_ = nullptr;
  PointerSet users_;
};

}  // namespace oomdiag
