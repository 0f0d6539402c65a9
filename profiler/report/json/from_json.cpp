#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "profiler/error.h"
#include "profiler/explain/findings.h"
#include "profiler/field.h"
#include "profiler/report/json/json.h"
#include "profiler/report/report.h"

// A report may come from anywhere. Every value is checked for its kind and range before it is taken; what is absent or null
// stays at its default, so that reports of an older oomdiag with the same schema can be read.

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void reject(const std::string& reason) {
  throw Error(ErrorKind::input, "this is not a report of oomdiag: " + reason,
              "give a report.json or a folder oomdiag-<pid> that oomdiag wrote");
}

void demand(bool fulfilled, const char* name, const char* expected) {
  if (!fulfilled) reject(std::string("\"") + name + "\" is not " + expected);
}

/// What the elements of all lists may take: a few characters may stand for a kilobyte of values.
struct Budget {
  size_t left = size_t{64} << 20;

  void spend(size_t count, size_t bytes_each, const char* name) {
    demand(count <= left / bytes_each, name, "a list as short as a report's");
    left -= count * bytes_each;
  }
};

/// Reads the members of a value from a JSON object.
class Reader {
 public:
  Reader(const Json& json, const char* name, Budget& budget) : json_(json), budget_(budget) {
    demand(json.is_object(), name, "an object");
  }

  template <class T>
  void operator()(const Field& field, T& to) {
    const auto found = json_.find(field.name);
    if (found != json_.end() && !found->is_null()) take(*found, field.name, to);
  }
  void or_null(const Field& field, std::string& to) { (*this)(field, to); }
  void figures(const Field& field, Figures& to, std::initializer_list<Field> /*names*/) { (*this)(field, to); }
  void constant(const Field& field, const char* expected) {
    std::string text;
    (*this)(field, text);
    if (text.empty()) reject(std::string("it names no ") + field.name);
    if (text != expected) reject(fmt::format("its {} is {}, not {}", field.name, text.substr(0, 40), expected));
  }
  void object(const char* /*name*/, const char* /*about*/) {}

 private:
  template <std::integral T>
  static void take(const Json& value, const char* name, T& to) {
    constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    const bool too_large = value.is_number_unsigned() && value.get<uint64_t>() > kMax;
    demand(value.is_number_integer() && !too_large, name, "an integer");
    demand(std::in_range<T>(value.get<int64_t>()), name, "in range");
    to = static_cast<T>(value.get<int64_t>());
  }
  static void take(const Json& value, const char* name, bool& to) {
    demand(value.is_boolean(), name, "true or false");
    to = value.get<bool>();
  }
  static void take(const Json& value, const char* name, std::string& to) {
    demand(value.is_string(), name, "a string");
    to = value.get<std::string>();
  }
  template <class Enum>
  requires std::is_enum_v<Enum>
  static void take(const Json& value, const char* name, Enum& to) {
    demand(value.is_string(), name, "a string");
    for (size_t i = 0; i < kCountOf<Enum>; ++i) {
      to = static_cast<Enum>(i);
      if (name_of(to) == value.get_ref<const std::string&>()) return;
    }
    demand(false, name, "one of those that this oomdiag knows");
  }
  template <class T>
  void take(const Json& value, const char* name, std::optional<T>& to) {
    take(value, name, to.emplace());
  }
  template <class T>
  void take(const Json& value, const char* name, std::vector<T>& to) {
    demand(value.is_array(), name, "an array");
    budget_.spend(value.size(), sizeof(T), name);
    for (const Json& element : value) take(element, name, to.emplace_back());
  }
  void take(const Json& value, const char* name, Figures& to) {
    demand(value.is_object(), name, "an object");
    budget_.spend(value.size(), sizeof(Figures::value_type), name);
    for (const auto& [key, figure] : value.items()) {
      if (figure.is_number()) take(figure, key.c_str(), to.emplace_back(key, 0).second);
    }
  }
  template <class T>
  requires std::is_class_v<T>
  void take(const Json& value, const char* name, T& to) {
    Reader reader(value, name, budget_);
    visit_fields(reader, to);
  }

  const Json& json_;
  Budget& budget_;
};

Report read_report(const Json& json) {
  Budget budget;
  Reader read(json, "the report", budget);
  Report report;
  visit_fields(read, report);
  demand(report.main_device < std::max<size_t>(report.devices.size(), 1), "main_device", "one of \"devices\"");
  return report;
}

}  // namespace

Report from_json(std::string_view text) try {
  return read_report(Json::parse(text));
} catch (const Json::parse_error& error) {
  reject(error.byte > text.size() ? "it is cut off after " + std::to_string(text.size()) + " bytes"
                                  : "it is no JSON from byte " + std::to_string(error.byte) + " on");
} catch (const Json::exception& error) {
  reject(error.what());
}

}  // namespace oomdiag
