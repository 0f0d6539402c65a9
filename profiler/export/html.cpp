#include "profiler/export/html.h"

#include <nlohmann/json.hpp>
#include <string_view>

#include "profiler/export/embed.h"
#include "profiler/export/picture.h"
#include "profiler/replay/history.h"
#include "profiler/report/json/json.h"
#include "profiler/report/report.h"
#include "profiler/report/text/holders_table.h"
#include "profiler/report/text/text.h"
#include "profiler/report/words/json_text.h"

// The page's own files and the chart library lie in the program.
OOMDIAG_EMBED(page, OOMDIAG_PAGE_FOLDER "/page.html");
OOMDIAG_EMBED(style, OOMDIAG_PAGE_FOLDER "/style.css");
OOMDIAG_EMBED(script, OOMDIAG_PAGE_FOLDER "/script.js");
OOMDIAG_EMBED(d3, OOMDIAG_D3);
OOMDIAG_EMBED(d3_license, OOMDIAG_PAGE_FOLDER "/d3-license.txt");

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const OwnerNode& node) {
  Json json = {{"name", node.name}, {"bytes", node.bytes}, {"blocks", node.blocks}};
  if (node.children.empty()) return json;
  json["children"] = Json::array();
  for (const OwnerNode& child : node.children) json["children"].push_back(to_json(child));
  return json;
}

Json to_json(const StepBands& bands) {
  if (bands.step == 0) return nullptr;
  Json points = Json::array(), phases = Json::array();
  for (const BandPoint& point : bands.points) points.push_back({point.position, point.bytes});
  for (const PhaseSpan& span : bands.phases) phases.push_back({span.phase, span.first, span.last});
  return {{"step", bands.step}, {"points", points}, {"phases", phases}};
}

Json to_json(const DrawnSegment& segment) {
  Json blocks = Json::array();
  for (const DrawnBlock& block : segment.blocks) {
    blocks.push_back({block.offset, block.bytes, block.category, block.label, block.place});
  }
  return {{"bytes", segment.bytes},
          {"used_bytes", segment.used_bytes},
          {"largest_free_block_bytes", segment.largest_free_block_bytes},
          {"kind", segment.is_private   ? "private pool"
                   : segment.expandable ? "expandable"
                   : segment.small      ? "small"
                                        : ""},
          {"blocks", blocks}};
}

Json to_json(const GpuPicture& gpu) {
  Json segments = Json::array();
  for (const DrawnSegment& segment : gpu.segments) segments.push_back(to_json(segment));
  return {{"owners", to_json(gpu.owners)}, {"step", to_json(gpu.step)}, {"segments", segments}};
}

/// Text may hold "</script>"; in JSON '<' may be written so, too.
std::string inside_script(std::string_view json) {
  std::string safe;
  safe.reserve(json.size());
  for (const char c : json) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

}  // namespace

std::string page_data(const Report& report, const std::vector<GpuPicture>& gpus) {
  Json drawn = Json::array(), categories;
  for (const GpuPicture& gpu : gpus) drawn.push_back(to_json(gpu));
  for (size_t c = 0; c < kCategoryCount; ++c) {
    const auto category = static_cast<Category>(c);
    categories[std::string(name_of(category))] = label_of(category);
  }
  return "{\"report\":" + oomdiag::to_json(report, -1) + ",\"gpus\":" + json_text(drawn) +
         ",\"categories\":" + json_text(categories) +
         ",\"text\":" + json_text(Json(to_text(report, {.unicode = true, .all = true}))) + "}";
}

std::string to_html(const Report& report, const std::vector<GpuPicture>& gpus) {
  return fill_in({oomdiag_page, oomdiag_page_end},
                 {{"/*STYLE*/", {oomdiag_style, oomdiag_style_end}},
                  {"/*D3*/", {oomdiag_d3, oomdiag_d3_end}},
                  {"/*LICENSE*/", "/*\n" + std::string(oomdiag_d3_license, oomdiag_d3_license_end) + "*/"},
                  {"/*DATA*/", inside_script(page_data(report, gpus))},
                  {"/*SCRIPT*/", {oomdiag_script, oomdiag_script_end}}});
}

}  // namespace oomdiag
