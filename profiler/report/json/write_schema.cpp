// Prints what is generated from report.h: `oomdiag_report_schema json` or `page`. scripts/report_schema puts both in their places.
#include <cstdio>
#include <string_view>

#include "profiler/report/json/schema.h"

int main(int count, char** arguments) {
  const std::string_view what = count == 2 ? arguments[1] : "";
  if (what != "json" && what != "page") {
    std::fputs("usage: oomdiag_report_schema json|page\n", stderr);
    return 2;
  }
  const std::string text = what == "json" ? oomdiag::report_schema() : oomdiag::report_schema_page();
  return std::fputs(text.c_str(), stdout) < 0 ? 1 : 0;
}
