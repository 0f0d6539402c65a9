#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profiler/field.h"

namespace oomdiag {

/// Why so much is held or requested, as a programmer would say it: the second level of a cause.
struct Reason {
  std::string id{};  ///< that of the row that found it
  std::string text{};
  int64_t bytes = 0;
  std::string kept_by{};  ///< who keeps it, where that is not who keeps most: "list 'fakes' in sample (gan.py:97)"
  std::string fix{};
  std::vector<std::string> how{};
  bool piles_up = false;  ///< each further turn of a loop adds to it: less of each turn ends it later, and need not fit
  bool of_any_batch = false;  ///< smaller batches need as much: results of all of them stay, or a model is made

  /// Memory is free, in pieces: nothing of what the program holds.
  bool is_of_pieces() const { return id == "fragmentation"; }

  bool operator==(const Reason&) const = default;
};

void visit_fields(auto& visit, Either<Reason> auto& value) {
  visit.object("reason", "What of the program is behind the cause.");
  visit({"id", "a row of profiler/explain/reasons/reasons.inc: `recurrent_state`, `key_value_cache`, …"}, value.id);
  visit({"text", "the same in a sentence, with its line"}, value.text);
  visit({"bytes", "that it holds or requests"}, value.bytes);
  visit.or_null({"kept_by", "who keeps it, where that is not who keeps most"}, value.kept_by);
  visit.or_null({"fix", "the `id` of the fix that cures it"}, value.fix);
  visit({"how", "lines to change, where they are not that fix's own"}, value.how);
}

}  // namespace oomdiag
