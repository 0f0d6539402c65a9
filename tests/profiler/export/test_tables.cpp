#include "profiler/export/tables.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("no cell of CSV is a formula for a spreadsheet", "[export]") {
  Report report;
  ReportOfDevice& device = report.devices.emplace_back();
  device.top_allocations = {
      {.name = "=cmd|' /C calc'!A0", .op = "+1", .source = "@SUM(A1)", .bytes = 1},
      {.name = "-2\"", .op = "aten::relu", .source = "train.py:3", .referrer = "list 'h' in f", .bytes = 1}};
  const std::string csv = to_csv(report);
  CHECK(csv.find(R"x(,"'=cmd|' /C calc'!A0","'+1","'@SUM(A1)",)x") != csv.npos);
  CHECK(csv.find(R"(,"'-2""",aten::relu,train.py:3,)") != csv.npos);
  CHECK(csv.find(",1,list 'h' in f\r\n") != csv.npos);
}
