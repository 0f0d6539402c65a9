#include "profiler/export/plan_picture.h"
#include "profiler/export/search_page.h"
#include "profiler/export/surface_picture.h"
#include "tests/catch.h"
#include "tests/event_builder.h"

using namespace oomdiag;

TEST_CASE(
    "the page of a search: bars against the available memory, figures, and nothing that a program's text could start",
    "[export]") {
  const SearchPage page{.text = "oomdiag: fits up to <b>\n\n  text & more\n",
                        .program = "python '<script>alert(1)</script>.py'",
                        .found = true,
                        .rows = {{.label = "batch = 1",
                                  .measured_bytes = 2_GiB,
                                  .available_bytes = 8_GiB,
                                  .fits = true,
                                  .lines = {"a < b", "c"}},
                                 {.label = "batch = 2", .fits = false, .note = "<!--ROWS-->"}}};
  const std::string html = to_html(page);
  const auto has = [&](const std::string& part) { return html.find(part) != html.npos; };
  CHECK(has("<h1>Fits up to &lt;b&gt;</h1>"));
  CHECK(has("text &amp; more"));
  CHECK(!has("<script"));
  CHECK(has("<pre tabindex=\"0\">a &lt; b\nc</pre>"));
  CHECK(has(R"(<i class="fits" style="width:25.00%"></i><b style="left:100.00%">)"));
  CHECK(has(R"(<td class="number">2.00 GiB</td>)"));
  CHECK(has("&lt;!--ROWS--&gt;"));
  CHECK(!has("predicted"));
  CHECK(!has("failed\">"));
  CHECK(!has("<!--"));
}

TEST_CASE("plans are drawn by peak and time, and what fits is marked", "[export]") {
  using enum PlanPoint::State;
  const std::string svg =
      draw_plans({{"a < b", 2 << 20, 3'000'000, fits}, {"c", 1 << 20, 4'000'000, does_not_fit}}, 3 << 20);
  CHECK(svg.starts_with("<svg"));
  CHECK(svg.ends_with("</svg>"));
  CHECK(svg.find("a &lt; b: 2.00 MiB, 3.0 ms") != svg.npos);
  CHECK(svg.find("var(--good)") < svg.find("var(--bad)"));
  CHECK(draw_plans({{"alone", 1, 1, fits}}, 1).empty());
  const SearchPage page{.text = "oomdiag: x", .picture = {.heading = "Peak against time", .svg = svg}};
  CHECK(to_html(page).find("Peak against time") != std::string::npos);
  CHECK(to_html({.text = "oomdiag: x"}).find("<svg") == std::string::npos);
}

TEST_CASE("the peak over two dimensions is a table with its border as a line", "[export]") {
  const Surface surface{.x_name = "batch<",
                        .y_name = "length",
                        .x = {1, 8},
                        .y = {16, 64},
                        .peak_bytes = {1_GiB, 2_GiB, 3_GiB, 9_GiB},
                        .fits = {true, true, true, false},
                        .is_exact = {true, false, true, true},
                        .border = {8, 5},
                        .available_bytes = 4_GiB};
  const std::string svg = draw_surface(surface);
  const auto count = [&](const std::string& part) {
    size_t times = 0;
    for (size_t at = svg.find(part); at != svg.npos; at = svg.find(part, at + 1)) ++times;
    return times;
  };
  CHECK(count("class=\"border\"") == 2);  // to the left of the cell that does not fit, and below it
  CHECK(count("batch&lt; = 8, length = 64: out of memory") == 1);
  CHECK(count("batch&lt; = 8, length = 16: 2.00 GiB (an estimate)") == 1);
  CHECK(count(">2.00~<") == 1);
  CHECK(count("fits up to 5") == 1);
  CHECK(count("peak allocated, GiB") == 1);
  CHECK(draw_surface({}).empty());
}
