#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace oomdiag {

/// How much each variable of the program has. Items of a container are one: of "attribute 'nets[0].seen' in f" and
/// "attribute 'nets[1].seen' in f" it says "attribute 'nets[*].seen' in f". Where a dictionary has it by many keys they are one, too:
/// "list 'sessions["*"]' in f".
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

  struct Keys {
    int64_t count = 0;
    int64_t keys = 0;
  };

  struct Most {
    std::string_view variable{};
    int64_t count = 0;
  };

  const Count* find_most() const;
  Most find() const;

  std::map<std::string, Count> counts_;  ///< by what fold_subscripts() makes of it
  std::map<std::string, Keys> keys_;     ///< by what fold_keys() makes of that, where it has keys
};

}  // namespace oomdiag
