#include "profiler/report/json/json.h"
#include "profiler/report/make/make_report.h"
#include "tests/catch.h"
#include "tests/scenarios.h"

namespace oomdiag {

TEST_CASE("a redacted report has neither paths, nor arguments, nor names of users; all else stays", "[report]") {
  Report report = make_report(oom_in_backward(), {.exit_code = 1, .folder = "/home/alice/runs/oomdiag-7"});
  report.command = "/home/alice/venv/bin/python /home/alice/secret/train.py --token=abc";
  ReportFailure& failure = *report.devices.front().failure;
  failure.source = "/home/alice/secret/train.py:31";
  failure.stack = {"/home/alice/secret/train.py:31 in forward", "site-packages/torch/nn/modules/module.py:9 in call"};
  report.devices.front().non_pytorch = {{.owner = "process 12 alice_tool", .bytes = 1},
                                        {.owner = "process 13 alice", .bytes = 1}};
  report.limitations.emplace_back("recording stopped: cannot write '/home/alice/runs/trace': no space, ask alice@host");

  const Report redacted = redact(report, {"alice", "host"});
  const std::string json = to_json(redacted);
  CHECK(json.find("/home") == std::string::npos);
  CHECK(json.find("secret") == std::string::npos);
  CHECK(json.find("token") == std::string::npos);
  CHECK(redacted.command == "python");
  CHECK(redacted.folder == "oomdiag-7");
  CHECK(redacted.devices.front().failure->source == "train.py:31");
  CHECK(redacted.devices.front().failure->stack.front() == "train.py:31 in forward");
  CHECK(redacted.devices.front().non_pytorch[0].owner == "process 12 alice_tool");
  CHECK(redacted.devices.front().non_pytorch[1].owner == "process 13 ...");
  CHECK(redacted.limitations.back() == "recording stopped: cannot write 'trace': no space, ask ...@...");
  CHECK(redacted.devices.front().categories == report.devices.front().categories);
  CHECK(redacted.devices.front().failure->requested_for == failure.requested_for);
}

TEST_CASE("a report whose names are no UTF-8 is redacted as well", "[report]") {
  Report report;
  report.limitations = {"recording stopped: \xff"};
  CHECK(redact(report, {}).limitations == std::vector<std::string>{"recording stopped: \xef\xbf\xbd"});
}

}  // namespace oomdiag
