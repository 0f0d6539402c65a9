#pragma once

#include <concepts>
#include <initializer_list>
#include <type_traits>

// A field of the report's JSON is declared where its member is: the struct, and behind it visit_fields(), which calls a visitor
// with each field's name, its member and what it says. Writing, reading, the JSON schema and docs/report-schema.md come from
// that (scripts/report_schema writes the last two).
//
// A visitor is called as
//   visit.object(name, about)                    first: what the schema calls the object
//   visit(field, member)
//   visit.or_null(field, text)                   a text that is null in JSON when it is empty
//   visit.figures(field, member, {field, …})     figures whose names are fixed
//   visit.constant(field, text)                  the same in each report
// `value` may be const (when writing). A name ends with its unit: _bytes, _ns, _percent; other integers are counts.
namespace oomdiag {

struct Field {
  const char* name;
  const char* about;                           ///< half a sentence, in Markdown
  std::initializer_list<const char*> words{};  ///< of a text: all that it can be; empty: anything
  bool may_be_negative = false;
};

inline constexpr bool kMayBeNegative = true;

template <class Value, class Plain>
concept Either = std::same_as<std::remove_const_t<Value>, Plain>;

}  // namespace oomdiag
