#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "profiler/snapshot/snapshot.h"

namespace oomdiag {

/// A frame as PyTorch records it: of Python with a path, of C++ with a symbol, often without a file.
struct SnapshotFrame {
  std::string_view name, filename;
  int64_t line = 0;
  std::string_view
      original{};  ///< of code that torch.compile made: the lines that it was made from, as Python prints them
};

/// Finds out what stacks say, each kind of place once.
class PlaceFinder {
 public:
  PlaceFinder() { add(SnapshotPlace{}); }

  /// Takes the next frame of a stack, innermost first. Its texts must live until finish().
  void see(const SnapshotFrame& frame);
  /// The place of the stack whose frames were seen since the last call.
  uint32_t finish();
  /// The same place in a part that the program called so.
  uint32_t within(uint32_t place, std::string_view part);
  /// The index of this name.
  uint32_t name(std::string_view text);

  std::vector<std::string> names() && { return std::move(names_); }
  /// All places. Threads of the autograd engine have no Python frames: where other stacks have some, one that is empty is
  /// theirs.
  std::vector<SnapshotPlace> places() &&;

 private:
  uint32_t add(const SnapshotPlace& place);
  void see_exported(const SnapshotFrame& frame);
  void set_stacks(SnapshotPlace& place);

  SnapshotPlace now_;
  std::vector<SnapshotFrame> calls_;  ///< of the stack that is being seen
  std::string outermost_;             ///< file of its outermost Python frame so far
  bool in_engine_ = false;            ///< a frame of the autograd engine was seen
  bool any_python_ = false;           ///< in any stack
  std::vector<std::string> names_{""};
  std::unordered_map<std::string, uint32_t> name_index_{{"", 0}};
  std::vector<SnapshotPlace> places_;
  using Key = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint64_t, bool>;
  std::map<Key, uint32_t> place_index_;
};

}  // namespace oomdiag
