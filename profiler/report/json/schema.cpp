#include "profiler/report/json/schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>
#include <vector>

#include "profiler/explain/findings.h"
#include "profiler/field.h"
#include "profiler/report/report.h"

// A visitor of the report's fields (profiler/field.h) collects what each object of a report has; two functions write that down: as JSON schema, as Markdown.
// A new type of field is an overload of type_of here; a new field needs nothing here.

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

struct FieldType {
  std::string words;
  Json schema;
};

struct DescribedField {
  std::string name, about;
  FieldType type;
};

struct DescribedObject {
  std::string name, about;
  std::vector<DescribedField> fields{};
  bool has_all = true;  ///< each of its fields is there, also where its value is null
};

FieldType one_of_words(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += fmt::format("{}`{}`", text.empty() ? "" : ", ", word);
  return {text, {{"enum", words}}};
}

FieldType or_null_too(FieldType type) {
  type.words += " or null";
  Json& schema = type.schema;
  if (schema.contains("enum")) {
    schema["enum"].push_back(nullptr);
  } else if (schema.contains("type")) {
    schema["type"] = {schema["type"], "null"};
  } else {
    schema = {{"oneOf", {schema, {{"type", "null"}}}}};
  }
  return type;
}

FieldType reference_to(const std::string& name) {
  return {fmt::format("[{}](#{})", name, name), {{"$ref", "#/$defs/" + name}}};
}

/// A number's name ends with its unit.
const char* unit_of(std::string_view name) {
  if (name == "bytes" || name.ends_with("_bytes") || name == "bytes_per_step") return "bytes";
  if (name.ends_with("_ns")) return "ns";
  return name.ends_with("_percent") ? "%" : "integer";
}

/// Lists the fields of an object, then those of the objects inside of it.
class Describer {
 public:
  explicit Describer(std::vector<DescribedObject>& objects) : objects_(objects) {}

  void object(const char* name, const char* about) {
    const auto same = [&](const DescribedObject& one) { return one.name == name; };
    is_known_ = std::ranges::any_of(objects_, same);
    name_ = name;
    if (!is_known_) objects_.push_back({name, about});
    place_ = objects_.size() - 1;
  }
  template <class T>
  void operator()(const Field& field, const T& /*value*/) {
    if (!is_known_) add(field, type_of(field, static_cast<const T*>(nullptr)));
  }
  void or_null(const Field& field, const std::string& /*text*/) {
    if (!is_known_) add(field, or_null_too(text_type(field)));
  }
  void figures(const Field& field, const Figures& /*value*/, std::initializer_list<Field> names) {
    if (is_known_) return;
    add(field, reference_to(field.name));
    DescribedObject object{.name = field.name, .about = fmt::format("Figures: {}.", field.about), .has_all = false};
    for (const Field& one : names) object.fields.push_back({one.name, one.about, integer_type(one)});
    objects_.push_back(std::move(object));
  }
  void constant(const Field& field, const char* text) { add(field, {fmt::format("`{}`", text), {{"const", text}}}); }

  template <class T>
  static std::string describe(std::vector<DescribedObject>& objects) {
    const T value{};
    Describer describer(objects);
    visit_fields(describer, value);
    return describer.name_;
  }

 private:
  void add(const Field& field, FieldType type) {
    objects_[place_].fields.push_back({field.name, field.about, std::move(type)});
  }
  static FieldType text_type(const Field& field) {
    if (field.words.size() > 0) return one_of_words({field.words.begin(), field.words.end()});
    return {"text", {{"type", "string"}}};
  }
  static FieldType integer_type(const Field& field) {
    FieldType type{unit_of(field.name), {{"type", "integer"}}};
    if (!field.may_be_negative) type.schema["minimum"] = 0;
    return type;
  }
  template <class T>
  FieldType type_of(const Field& field, const T* /*of*/) {
    if constexpr (std::is_same_v<T, bool>) {
      return {"boolean", {{"type", "boolean"}}};
    } else if constexpr (std::is_integral_v<T>) {
      return integer_type(field);
    } else if constexpr (std::is_enum_v<T>) {
      std::vector<std::string> words;
      for (size_t i = 0; i < kCountOf<T>; ++i) words.emplace_back(name_of(static_cast<T>(i)));
      return one_of_words(words);
    } else if constexpr (std::is_same_v<T, std::string>) {
      return text_type(field);
    } else {
      return reference_to(describe<T>(objects_));
    }
  }
  FieldType type_of(const Field& /*field*/, const Figures* /*of*/) {
    return {"figures by name", {{"type", "object"}, {"additionalProperties", {{"type", "integer"}}}}};
  }
  template <class T>
  FieldType type_of(const Field& field, const std::optional<T>* /*of*/) {
    return or_null_too(type_of(field, static_cast<const T*>(nullptr)));
  }
  template <class T>
  FieldType type_of(const Field& field, const std::vector<T>* /*of*/) {
    FieldType each = type_of(field, static_cast<const T*>(nullptr));
    return {"list of " + each.words, {{"type", "array"}, {"items", std::move(each.schema)}}};
  }

  std::vector<DescribedObject>& objects_;
  std::string name_{};
  size_t place_ = 0;
  bool is_known_ = false;
};

std::vector<DescribedObject> describe_report() {
  std::vector<DescribedObject> objects;
  Describer::describe<Report>(objects);
  return objects;
}

Json schema_of(const DescribedObject& object) {
  Json schema = {{"description", object.about}, {"type", "object"}};
  if (object.has_all) schema["required"] = Json::array();
  for (const DescribedField& field : object.fields) {
    if (object.has_all) schema["required"].push_back(field.name);
    Json& one = schema["properties"][field.name] = field.type.schema;
    one["description"] = field.about;
  }
  if (!object.has_all) schema["additionalProperties"] = false;
  return schema;
}

/// JSON with what is short on one line, as people write it.
std::string lines_of_json(const Json& json, size_t indent) {
  constexpr size_t kLine = 140;
  std::string text = json.dump();
  if (!json.is_object() || text.size() + indent <= kLine) return text;
  std::string lines;
  for (const auto& [name, value] : json.items()) {
    lines += lines.empty() ? "\n" : ",\n";
    lines += std::string(indent + 2, ' ') + Json(name).dump() + ": " + lines_of_json(value, indent + 2);
  }
  return "{" + lines + "\n" + std::string(indent, ' ') + "}";
}

constexpr const char* kPageBeginning = R"(# The report in JSON, field by field

Generated by `scripts/report_schema` from `profiler/report/report.h`, as is [the JSON schema](../profiler/report/oomdiag-report-1.schema.json).

`oomdiag explain FOLDER --json` prints it, every run folder holds one as `report.json`. The name of the schema is
`oomdiag-report/1`. Within `/1` fields are only added: names and meanings stay, and a reader that knows less reads on. Reports of
older ones are compared with what this oomdiag still reads by a test (`tests/reports`).

Bytes are integers, times nanoseconds since recording began, steps are counted from 1 (0 is before the first). Each field is always
there; what is not known is null.
)";

}  // namespace

std::string report_schema() {
  const std::vector<DescribedObject> objects = describe_report();
  Json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                 {"$id", kReportSchema},
                 {"title", "A report of oomdiag"}};
  schema.update(schema_of(objects.front()));
  for (size_t i = 1; i < objects.size(); ++i) schema["$defs"][objects[i].name] = schema_of(objects[i]);
  return lines_of_json(schema, 0) + "\n";
}

std::string report_schema_page() {
  std::string page = kPageBeginning;
  for (const DescribedObject& object : describe_report()) {
    page += fmt::format("\n## {}\n\n{}\n\n| field | type | meaning |\n|---|---|---|\n", object.name, object.about);
    for (const DescribedField& field : object.fields) {
      page += fmt::format("| `{}` | {} | {} |\n", field.name, field.type.words, field.about);
    }
  }
  return page;
}

}  // namespace oomdiag
