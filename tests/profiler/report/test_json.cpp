#include <fstream>
#include <nlohmann/json.hpp>

#include "profiler/error.h"
#include "profiler/report/json.h"
#include "profiler/report/make_report.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {
namespace {

using Json = nlohmann::json;

Json json_of(const Trace& trace, const ReportInputs& inputs = {}) {
  return Json::parse(to_json(make_report(trace, inputs)));
}

/// Whether `json` has exactly the kind of value that stands at each name of design §9.
void check_names(const Json& json, const Json& wanted) {
  for (const auto& [name, value] : wanted.items()) {
    INFO(name);
    REQUIRE(json.contains(name));
    if (value.is_object() && !json[name].is_null()) check_names(json[name], value);
    if (value.is_array() && !value.empty() && value[0].is_object() && !json[name].empty())
      check_names(json[name][0], value[0]);
    if (value.is_number_integer()) CHECK((json[name].is_number_integer() || json[name].is_null()));
    if (value.is_string()) CHECK((json[name].is_string() || json[name].is_null()));
  }
}

/// Design §9, word for word.
const Json& design() {
  static const Json json = Json::parse(R"({
  "schema": "oomdiag-report/1", "outcome": "ok", "exit_code": 0, "torch": "2.15.0+cu132", "rank": 0, "world_size": 1,
  "devices": [],
  "device": {"index": 0, "name": "NVIDIA H200", "virtual": true, "total_bytes": 0, "compute_capability": "9.0"},
  "peak": {"allocated_bytes": 0, "reserved_bytes": 0, "phase": "backward", "step": 2},
  "failure": {"phase": "backward", "step": 1, "node": "ConvolutionBackward0", "op": "aten::convolution",
    "module": "conv1", "source": "samples/deepcnn.cpp:31",
    "requested_bytes": 0, "allocated_bytes": 0, "reserved_bytes": 0, "free_bytes": 0},
  "cause": {"kind": "capacity", "short_by_bytes": 0, "evidence": {}},
  "categories": {"parameter": 0, "buffer": 0, "gradient": 0, "optimizer_state": 0, "activation": 0, "input": 0, "output": 0,
    "activation_gradient": 0, "temporary": 0, "workspace": 0, "unknown": 0},
  "card": {"allocated_bytes": 0, "pending_free_bytes": 0, "cached_bytes": 0, "non_pytorch_bytes": 0, "free_bytes": 0},
  "saved_tensors": [{"bytes": 0, "shape": [64, 32, 64, 64], "dtype": "float32", "made_by": "aten::relu", "module": "relu1",
    "saved_by": ["ReluBackward0", "MaxPool2DWithIndicesBackward0"]}],
  "fixes": [{"id": "autocast_bf16", "predicted_peak_bytes": 0, "measured_peak_bytes": null, "fits": null}],
  "phases": [{"step": 1, "phase": "forward", "peak_allocated_bytes": 0}],
  "timeline": [{"time_ns": 0, "allocated_bytes": 0, "reserved_bytes": 0}],
  "recovered_by_library": [{"op": "aten::convolution", "requested_bytes": 0, "count": 1}],
  "caught": [],
  "limitations": ["context bytes are modelled"]})");
  return json;
}

void check_refused(const std::string& text) {
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

TEST_CASE("every name of the design is in a report, with its kind of value", "[report]") {
  const Json oom = json_of(oom_in_backward(), {.exit_code = 1, .batch = 64});
  check_names(oom, design());
  for (const char* name : {"device", "peak", "failure", "cause", "categories", "card"}) {
    CHECK(oom["devices"][0][name] == oom[name]);
  }
  const Json fits = json_of(training_that_fits(), {.exit_code = 0});
  check_names(fits, design());
  CHECK(fits["failure"].is_null());
  CHECK(fits["cause"].is_null());
}

TEST_CASE("a report of nothing has every name too", "[report]") {
  EventBuilder trace;
  const Json json = json_of(trace, {.exit_code = 0});

  for (const auto& [name, value] : design().items()) CHECK(json.contains(name));
  CHECK(json["devices"].empty());
  CHECK(json["device"].is_null());
  CHECK(json["peak"]["allocated_bytes"] == 0);
}

TEST_CASE("what is not known is null", "[report]") {
  const Json json = json_of(oom_in_optimizer());
  CHECK(json["exit_code"].is_null());
  CHECK(json["failure"]["node"].is_null());
  CHECK(json["failure"]["module"].is_null());
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

TEST_CASE("what is no report is refused in one clear line", "[report]") {
  for (const char* text : {"", "{", "null", "[]", "42", "{}", R"({"schema": null})", R"({"schema": 1})",
                           R"({"schema": "oomdiag-report/2"})", "\xFF\xFE", "\x80\x04pickle"}) {
    check_refused(text);
  }
}

TEST_CASE("values of the wrong kind are refused", "[report]") {
  const std::string head = R"({"schema": "oomdiag-report/1", )";
  for (const char* rest :
       {R"("outcome": 3})", R"("rank": "a"})", R"("rank": 3000000000})", R"("rank": 1.5})", R"("steps": -1})",
        R"("devices": {}})", R"("devices": [3]})", R"("main_device": 1})", R"("main_device": -1})",
        R"("limitations": [1]})", R"("devices": [{"peak": []}]})",
        R"("devices": [{"headroom_bytes": 18446744073709551615}]})", R"("devices": [{"headroom_bytes": 1e300}]})",
        R"("devices": [{"cause": {"kind": "magic"}}]})", R"("devices": [{"categories": {"parameter": 1.5}}]})",
        R"("devices": [{"saved_tensors": [{"shape": ["a"]}]}]})"}) {
    check_refused(head + rest);
  }
}

TEST_CASE("JSON that is nested without end is refused, not fatal", "[report]") {
  check_refused(std::string(200'000, '['));
  check_refused(R"({"schema": "oomdiag-report/1", "devices": )" + std::string(200'000, '[') +
                std::string(200'000, ']') + "}");
}

TEST_CASE("JSON whose lists would take far more memory than it has characters is refused", "[report]") {
  std::string devices = "{}";
  for (int i = 0; i < 17; ++i) devices += "," + devices;
  check_refused(R"({"schema": "oomdiag-report/1", "devices": [)" + devices + "]}");
}

TEST_CASE("the schema requires every name of the design", "[report]") {
  std::ifstream file(OOMDIAG_SCHEMA_FILE);
  const Json schema = Json::parse(file);
  const auto& required = schema["required"];
  for (const auto& [name, value] : design().items()) {
    INFO(name);
    CHECK(std::find(required.begin(), required.end(), name) != required.end());
    CHECK(schema["properties"].contains(name));
  }
}

}  // namespace oomdiag
