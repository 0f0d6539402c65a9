#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace oomdiag {

/// How much each variable of the program has. Items of a container are one: of "attribute 'nets[0].seen' in f" and
/// "attribute 'nets[1].seen' in f" it says "attribute 'nets[*].seen' in f".
class VariableCounts {
 public:
  void add(std::string_view variable, int64_t count);

  /// The variable that has most, the first one that was added of several; empty if there is none. Valid as long as this is.
  std::string_view most() const;
  /// How much that variable has.
  int64_t count_of_most() const;
  /// Whether this variable has something.
  bool has(std::string_view variable) const;

 private:
  struct Count {
    std::string_view variable{};  ///< the first one, where all are the same
    int64_t count = 0;
    size_t place = 0;
  };

  const Count* find_most() const;

  std::map<std::string, Count> counts_;  ///< by what fold_subscripts() makes of it
};

}  // namespace oomdiag
