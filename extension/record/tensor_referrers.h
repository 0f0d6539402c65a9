#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "extension/python_symbols.h"
#include "extension/record/padding.h"
#include "extension/record/program_code.h"
#include "extension/record/python_api.h"
#include "extension/record/python_tensor.h"

namespace torch::autograd {
struct Node;
}

namespace oomdiag {

/// Finds which variable of the program refers to each of its tensors on a GPU: "list 'history' in train.py". To be used once,
/// with the GIL, where the interpreter begins to shut down: what the uncaught exception's frames and the program's modules
/// hold is all still there then.
///
/// It follows references from the variables on, breadth first, by the function that each type has for Python's garbage
/// collector: no Python code runs. Bounded by the constants below, and the trace says where one of them ended the search; a tensor
/// that is not reached has no referrer.
class TensorReferrers {
 public:
  static constexpr size_t kMaxObjects = size_t{1} << 19;
  static constexpr size_t kMaxItems = size_t{1} << 18;  ///< of one object
  static constexpr int kMaxMilliseconds = 500;
  static constexpr size_t kMaxEvents = size_t{1} << 14;
  static constexpr size_t kMaxNodes = size_t{1} << 19;  ///< of autograd
  static constexpr int kMaxMillisecondsInside = 100;    ///< for what tensors contain, of these

  TensorReferrers(const PythonApi& api, ProgramCode& code) : api_(api), code_(code), reader_(api), tensors_(api) {}

  /// An object that was reached. It lives as long as the GIL is held, as nothing of the program runs.
  struct Reached {
    PythonObject object;
    uint32_t parent;  ///< index of the one that refers to it, or kNone: a variable does
    uint32_t root;    ///< the variable that the way begins with
  };

  /// Writes a `referrer` event for each tensor that it finds.
  void write();
  /// All that write() came to, the nearest to a variable first.
  const std::vector<Reached>& reached() const { return reached_; }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  struct Variable {
    std::string name, place;  ///< "train.py", or "main (train.py:17)"
  };

  /// Of the search on each GPU: where it begins, or with kSearchCutShort where it ended too early.
  void write_mark(uint16_t flags);
  /// What is reached from this index on; false where a bound ended that.
  bool write_reached(uint32_t index, std::chrono::steady_clock::time_point end);
  void add_modules();
  std::string program() const;
  void add_traceback();
  bool is_comprehension(PythonObject frame) const;
  std::string place_of_function(PythonObject code, const std::string& file) const;
  void add_frame(PythonObject frame);
  void add_containers(PythonObject frame);
  void add_called_module(PythonObject frame, const std::string& file);
  void add_variable(const std::string& name, const std::string& place, PythonObject value);
  void reach(PythonObject object, uint32_t parent, uint32_t root);
  void follow(uint32_t index);
  static int visit(PythonObject object, void* search);

  std::vector<uint32_t> way_to(uint32_t index) const;
  std::string name_of(uint32_t index) const;
  std::string name_of_step(uint32_t index) const;
  std::string key_of(PythonObject container, PythonObject item) const;
  std::string variable_of(PythonObject frame, PythonObject value) const;
  bool is_function(PythonObject object) const;
  std::vector<std::pair<std::string, PythonRef>> variables_of(PythonObject frame) const;
  void write_tensor(uint32_t index);
  void write_gradient(const c10::TensorImpl& tensor, const std::string& name);
  void write_without_storage(const c10::TensorImpl& tensor, uint32_t index);
  void write_padding(const c10::TensorImpl& tensor, uint32_t index);
  static std::optional<Padding> look_inside(const c10::TensorImpl& tensor);
  struct Nodes {
    uint32_t count = 0;
    uint16_t flags = 0;  ///< kOfNewestSteps, or none
  };
  Nodes count_nodes(const torch::autograd::Node* root);

  const PythonApi& api_;
  ProgramCode& code_;
  PythonReader reader_;
  TensorReader tensors_;
  std::vector<Reached> reached_;
  std::vector<Variable> variables_;
  std::vector<PythonRef> comprehensions_;  ///< their frames, looked at last
  std::vector<PythonRef> of_packages_;     ///< frames of their functions, likewise
  std::unordered_set<PythonObject> seen_;
  std::unordered_set<const torch::autograd::Node*> nodes_;  ///< that a tensor before keeps
  std::unordered_map<PythonObject, void*> traverse_;        ///< by type: its tp_traverse, or null
  uint32_t followed_ = 0;                                   ///< index of the one whose references are read
  size_t items_ = 0;                                        ///< of that one, so far
  size_t written_ = 0;
  std::chrono::steady_clock::duration looked_inside_{};  ///< the time for which contents were read
  bool is_cut_ = false;  ///< a bound ended the search, or kept it from following an object to all that it refers to
};

}  // namespace oomdiag
