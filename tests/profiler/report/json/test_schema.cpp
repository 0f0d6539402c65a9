#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "profiler/report/json/json.h"
#include "profiler/report/json/schema.h"
#include "profiler/report/make/make_report.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

using Json = nlohmann::json;

std::string text_of_file(const char* file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Whether `json` has the fields of `object`, and those inside of it theirs.
void check_fields(const Json& json, const Json& object, const Json& schema) {
  for (const auto& [name, field] : object["properties"].items()) {
    INFO(name);
    REQUIRE(json.contains(name));
    const Json& one = field.contains("items") ? field["items"] : field;
    const Json& value = json[name].is_array() && !json[name].empty() ? json[name][0] : json[name];
    if (!one.contains("$ref") || !value.is_object() || value.empty()) continue;
    const std::string target = one["$ref"];
    check_fields(value, schema["$defs"][target.substr(target.rfind('/') + 1)], schema);
  }
  for (const auto& [name, value] : json.items()) {
    INFO(name);
    CHECK(object["properties"].contains(name));
  }
}

}  // namespace

TEST_CASE("the schema and the page of the documentation are those of report.h", "[report]") {
  CHECK(text_of_file(OOMDIAG_SCHEMA_FILE) == report_schema());
  CHECK(text_of_file(OOMDIAG_SCHEMA_PAGE) == report_schema_page());
}

TEST_CASE("reports have the fields of the schema and no others", "[report]") {
  const Json schema = Json::parse(report_schema());
  for (const Trace& trace : {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()}) {
    check_fields(Json::parse(to_json(make_report(trace, {.exit_code = 1, .batch = 64}))), schema, schema);
  }
}

TEST_CASE("the schema gives unit, nullability and all words of a field", "[report]") {
  const Json schema = Json::parse(report_schema());
  const Json& failure = schema["$defs"]["failure"]["properties"];
  CHECK(failure["requested_bytes"]["type"] == "integer");
  CHECK(failure["requested_bytes"]["minimum"] == 0);
  CHECK(failure["op"]["type"] == Json{"string", "null"});
  CHECK(failure["phase"]["enum"] == Json{"setup", "forward", "backward", "optimizer", "other"});
  CHECK(schema["$defs"]["non_pytorch_owner"]["properties"]["kind"]["enum"].back().is_null());
  CHECK_FALSE(schema["$defs"]["non_pytorch_owner"]["properties"]["bytes"].contains("minimum"));
  CHECK(report_schema_page().find("| `time_ns` | ns |") != std::string::npos);
}

}  // namespace oomdiag
