#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oomdiag {

/// The path of the user scopes that are open on a thread: "encoder.layer3". One thread.
class ScopePath {
 public:
  const std::string& text() const { return path_; }
  /// A scope begins. It may have no part in the path.
  void enter() { outer_.push_back(path_); }
  /// It has: below the path so far, or at the top.
  void append(std::string_view name, bool at_top) {
    if (at_top) path_.clear();
    if (!path_.empty()) path_ += '.';
    path_ += name;
  }
  /// The scope that began last ends. One that began before recording did has no part in it.
  void leave() {
    if (outer_.empty()) return;
    path_ = std::move(outer_.back());
    outer_.pop_back();
  }

 private:
  std::string path_;
  std::vector<std::string> outer_;  ///< for each scope that is open: what to go back to
};

}  // namespace oomdiag
