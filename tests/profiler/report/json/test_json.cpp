#include <nlohmann/json.hpp>

#include "profiler/error.h"
#include "profiler/report/json/json.h"
#include "profiler/report/make/make_report.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

using Json = nlohmann::json;

Json json_of(const Trace& trace, const ReportInputs& inputs = {}) {
  return Json::parse(to_json(make_report(trace, inputs)));
}

void check_rejected(const std::string& text) {
  INFO(text.substr(0, 80));
  try {
    from_json(text);
    FAIL("it was accepted");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::input);
    CHECK(!error.hint().empty());
  }
}

}  // namespace

TEST_CASE("a device is in a report once, among its devices", "[report]") {
  const Json json = json_of(oom_in_backward(), {.exit_code = 1, .batch = 64});
  CHECK_FALSE(json.contains("peak"));
  REQUIRE(json["main_device"] == 0);
  REQUIRE(json["devices"].size() == 1);
  CHECK(json["devices"][0]["failure"]["phase"] == "backward");
  CHECK(json["devices"][0]["cause"].is_object());
  CHECK(json["devices"][0]["categories"].size() == kCategoryCount);
}

TEST_CASE("a report of nothing has its fields and no device", "[report]") {
  EventBuilder trace;
  const Json json = json_of(trace, {.exit_code = 0});

  CHECK(json["schema"] == kReportSchema);
  CHECK(json["outcome"] == "ok");
  CHECK(json["devices"].empty());
  CHECK(json["case"].is_null());
}

TEST_CASE("what is not known is null", "[report]") {
  const Json json = json_of(oom_in_optimizer());
  CHECK(json["exit_code"].is_null());
  CHECK(json["devices"][0]["failure"]["node"].is_null());
  CHECK(json["devices"][0]["failure"]["module"].is_null());
}

TEST_CASE("a report comes back from JSON as it was", "[report]") {
  for (const Trace& trace : {training_that_fits(), oom_in_backward(), oom_in_forward(), oom_in_optimizer()}) {
    const Report report = make_report(trace, {.exit_code = 1, .batch = 64});
    CHECK(from_json(to_json(report)) == report);
    CHECK(from_json(to_json(report, -1)) == report);
  }
}

TEST_CASE("names that are not known are passed over, absent ones stay at their defaults", "[report]") {
  const Report report = from_json(R"({"schema": "oomdiag-report/1", "outcome": "failed", "later": [1, {"x": 2}]})");
  CHECK(report.outcome == "failed");
  CHECK(report.world_size == 1);
  CHECK(report.devices.empty());
}

TEST_CASE("names that are no UTF-8 do not break the JSON", "[report]") {
  Trace trace = oom_in_backward();
  for (std::string& name : trace.names) {
    if (name == "relu1") name = "re\xFFlu\x01";
  }
  CHECK(Json::parse(to_json(make_report(trace, {}))).is_object());
}

TEST_CASE("what is no report is rejected in one clear line", "[report]") {
  for (const char* text : {"", "{", "null", "[]", "42", "{}", R"({"schema": null})", R"({"schema": 1})",
                           R"({"schema": "oomdiag-report/2"})", "\xFF\xFE", "\x80\x04pickle"}) {
    check_rejected(text);
  }
}

TEST_CASE("values of the wrong kind are rejected", "[report]") {
  const std::string head = R"({"schema": "oomdiag-report/1", )";
  for (const char* rest :
       {R"("outcome": 3})", R"("rank": "a"})", R"("rank": 3000000000})", R"("rank": 1.5})", R"("steps": -1})",
        R"("devices": {}})", R"("devices": [3]})", R"("main_device": 1})", R"("main_device": -1})",
        R"("limitations": [1]})", R"("devices": [{"peak": []}]})",
        R"("devices": [{"headroom_bytes": 18446744073709551615}]})", R"("devices": [{"headroom_bytes": 1e300}]})",
        R"("devices": [{"cause": {"kind": "magic"}}]})", R"("devices": [{"categories": {"parameter": 1.5}}]})",
        R"("devices": [{"saved_tensors": [{"shape": ["a"]}]}]})"}) {
    check_rejected(head + rest);
  }
}

TEST_CASE("JSON that is nested without end is rejected, not fatal", "[report]") {
  check_rejected(std::string(200'000, '['));
  check_rejected(R"({"schema": "oomdiag-report/1", "devices": )" + std::string(200'000, '[') +
                 std::string(200'000, ']') + "}");
}

TEST_CASE("JSON whose lists would take far more memory than it has characters is rejected", "[report]") {
  std::string devices = "{}";
  for (int i = 0; i < 17; ++i) devices += "," + devices;
  check_rejected(R"({"schema": "oomdiag-report/1", "devices": [)" + devices + "]}");
}

}  // namespace oomdiag
