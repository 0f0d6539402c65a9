#include <nlohmann/json.hpp>

#include "profiler/explain/findings.h"
#include "profiler/field.h"
#include "profiler/report/json/json.h"
#include "profiler/report/report.h"
#include "profiler/report/words/json_text.h"

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

/// Writes the members of a value into a JSON object.
class Writer {
 public:
  template <class T>
  void operator()(const Field& field, const T& value) {
    json_[field.name] = convert(value);
  }
  void or_null(const Field& field, const std::string& text) { json_[field.name] = text_or_null(text); }
  void figures(const Field& field, const Figures& value, std::initializer_list<Field> /*names*/) {
    (*this)(field, value);
  }
  void constant(const Field& field, const char* text) { json_[field.name] = text; }
  void object(const char* /*name*/, const char* /*about*/) {}

  template <class T>
  static Json convert(const T& value) {
    if constexpr (requires(Writer & writer) { visit_fields(writer, value); }) {
      Writer writer;
      visit_fields(writer, value);
      return std::move(writer.json_);
    } else if constexpr (std::is_enum_v<T>) {
      return Json(std::string(name_of(value)));
    } else {
      return Json(value);
    }
  }
  template <class T>
  static Json convert(const std::optional<T>& value) {
    return value ? convert(*value) : Json(nullptr);
  }
  template <class T>
  static Json convert(const std::vector<T>& values) {
    Json json = Json::array();
    for (const T& value : values) json.push_back(convert(value));
    return json;
  }
  static Json convert(const Figures& figures) {
    Json json = Json::object();
    for (const auto& [name, value] : figures) json[name] = value;
    return json;
  }

 private:
  Json json_ = Json::object();
};

}  // namespace

std::string to_json(const Report& report, int indent) { return json_text(Writer::convert(report), indent); }

}  // namespace oomdiag
