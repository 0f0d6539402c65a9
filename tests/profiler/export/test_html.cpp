#include "profiler/export/html.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("marks of the page's template are text where a program's words hold them", "[export]") {
  Report plain, marked;
  plain.command = "python train.py 'xxxxxxxxxx'";
  marked.command = "python train.py '/*SCRIPT*/'";
  const std::string page = to_html(marked, {});
  CHECK(page.find("train.py '/*SCRIPT*/'") != page.npos);
  CHECK(page.size() == to_html(plain, {}).size());
  CHECK(page.find("/*SCRIPT*/") == page.rfind("/*SCRIPT*/"));
}
