#include "profiler/export/plan_picture.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/words/markup.h"

namespace oomdiag {
namespace {

constexpr double kWide = 760, kHigh = 300, kLeft = 70, kBottom = 40, kTop = 12;

/// Maps bytes and nanoseconds to the picture: peaks to the right, from 0; times upwards, from the fastest.
struct PlanScale {
  double most_bytes = 1, least_ns = 0, most_ns = 1;

  double x(int64_t bytes) const { return kLeft + (kWide - kLeft) * static_cast<double>(bytes) / most_bytes; }
  double y(double ns) const {
    return kHigh - kBottom - (kHigh - kBottom - kTop) * (ns - least_ns) / (most_ns - least_ns);
  }
};

PlanScale scale_of(const std::vector<PlanPoint>& points, int64_t available_bytes) {
  const auto [fastest, slowest] = std::ranges::minmax(points, {}, &PlanPoint::step_ns);
  const int64_t most = std::max(available_bytes, std::ranges::max(points, {}, &PlanPoint::peak_bytes).peak_bytes);
  PlanScale scale{.most_bytes = 1.05 * static_cast<double>(std::max<int64_t>(1, most))};
  const double margin = std::max(1.0, 0.05 * static_cast<double>(slowest.step_ns - fastest.step_ns));
  scale.least_ns = static_cast<double>(fastest.step_ns) - margin;
  scale.most_ns = static_cast<double>(slowest.step_ns) + margin;
  return scale;
}

std::string axes_of(const PlanScale& scale) {
  constexpr int kTicks = 5;
  std::string text;
  for (int i = 0; i <= kTicks; ++i) {
    const double share = static_cast<double>(i) / kTicks;
    const auto bytes = static_cast<int64_t>(share * scale.most_bytes);
    const double ns = scale.least_ns + share * (scale.most_ns - scale.least_ns);
    text += fmt::format(R"(<text class="axis-label" x="{:.1f}" y="{:.1f}" text-anchor="middle">{:.2f} GiB</text>)",
                        scale.x(bytes), kHigh - kBottom + 18, static_cast<double>(bytes) / (1 << 30));
    text += fmt::format(R"(<text class="axis-label" x="{:.1f}" y="{:.1f}" text-anchor="end">{:.1f} ms</text>)",
                        kLeft - 8, scale.y(ns) + 4, ns * 1e-6);
    text += fmt::format(R"(<g class="grid"><line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/></g>)", kLeft, kWide,
                        scale.y(ns), scale.y(ns));
  }
  return text;
}

std::string point_of(const PlanPoint& point, const PlanScale& scale) {
  using enum PlanPoint::State;
  const char* const fill = point.state == fits ? "var(--good)" : point.state == does_not_fit ? "var(--bad)" : "none";
  return fmt::format(
      R"svg(<circle cx="{:.1f}" cy="{:.1f}" r="5" fill="{}" stroke="var(--ink)"><title>{}: {}, {:.1f} ms</title></circle>)svg"
      "\n",
      scale.x(point.peak_bytes), scale.y(static_cast<double>(point.step_ns)), fill, escape_markup(point.label),
      with_unit(point.peak_bytes), static_cast<double>(point.step_ns) * 1e-6);
}

}  // namespace

std::string draw_plans(const std::vector<PlanPoint>& points, int64_t available_bytes) {
  if (points.size() < 2) return {};
  const PlanScale scale = scale_of(points, available_bytes);
  std::string text = fmt::format(
      R"(<svg viewBox="0 0 {} {}" role="img" aria-label="peak against step time of each plan">)", kWide + 20, kHigh);
  text += axes_of(scale);
  text += fmt::format(R"(<line class="limit" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>)", scale.x(available_bytes),
                      kTop, kHigh - kBottom);
  for (const PlanPoint& point : points) text += point_of(point, scale);
  return text + "</svg>";
}

}  // namespace oomdiag
