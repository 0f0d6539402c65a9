#include "profiler/export/surface_picture.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/report/words/markup.h"

namespace oomdiag {
namespace {

constexpr double kGridWide = 640, kCellHigh = 24, kGridLeft = 80, kGridTop = 26, kGridBottom = 44, kRight = 100;

/// Where the cells are.
struct Grid {
  const Surface& surface;

  double cell_wide() const { return kGridWide / static_cast<double>(surface.x.size()); }
  double bottom() const { return kGridTop + kCellHigh * static_cast<double>(surface.y.size()); }
  double left(size_t column) const { return kGridLeft + cell_wide() * static_cast<double>(column); }
  double top(size_t row) const { return bottom() - kCellHigh * static_cast<double>(row + 1); }
  size_t index(size_t column, size_t row) const { return row * surface.x.size() + column; }
  bool fits(size_t column, size_t row) const { return surface.fits[index(column, row)]; }
};

std::string cell_of(const Grid& grid, size_t column, size_t row) {
  const Surface& surface = grid.surface;
  const size_t at = grid.index(column, row);
  const bool fits = surface.fits[at];
  const double share = surface.available_bytes > 0
                           ? static_cast<double>(surface.peak_bytes[at]) / static_cast<double>(surface.available_bytes)
                           : 0;
  const double shade = fits ? 0.1 + 0.6 * std::clamp(share, 0.0, 1.0) : 0.3;
  const std::string title = fmt::format(
      "{} = {}, {} = {}: {}", escape_markup(surface.x_name), surface.x[column], escape_markup(surface.y_name),
      surface.y[row],
      fits ? fmt::format("{}{}", with_unit(surface.peak_bytes[at]), surface.is_exact[at] ? "" : " (an estimate)")
           : "out of memory");
  return fmt::format(
      R"svg(<g><title>{}</title><rect class="piece" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="var(--{})" fill-opacity="{:.2f}"/>)svg"
      R"svg(<text x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text></g>)svg"
      "\n",
      title, grid.left(column), grid.top(row), grid.cell_wide(), kCellHigh, fits ? "activation" : "bad", shade,
      grid.left(column) + grid.cell_wide() / 2, grid.top(row) + kCellHigh / 2 + 4,
      fits ? fmt::format("{:.2f}{}", static_cast<double>(surface.peak_bytes[at]) / (1 << 30),
                         surface.is_exact[at] ? "" : "~")
           : "–");
}

std::string line(double x1, double y1, double x2, double y2) {
  return fmt::format(R"(<line class="border" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>)", x1, y1, x2, y2);
}

/// Between each cell that fits and a neighbour that does not.
std::string border_of(const Grid& grid) {
  std::string text;
  const size_t columns = grid.surface.x.size(), rows = grid.surface.y.size();
  for (size_t row = 0; row < rows; ++row) {
    for (size_t column = 0; column < columns; ++column) {
      const double left = grid.left(column), top = grid.top(row);
      if (column + 1 < columns && grid.fits(column, row) != grid.fits(column + 1, row))
        text += line(left + grid.cell_wide(), top, left + grid.cell_wide(), top + kCellHigh);
      if (row + 1 < rows && grid.fits(column, row) != grid.fits(column, row + 1))
        text += line(left, top, left + grid.cell_wide(), top);
    }
  }
  return text;
}

std::string label(double x, double y, const char* anchor, const std::string& text) {
  return fmt::format(R"(<text class="axis-label" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>)", x, y, anchor,
                     text);
}

std::string labels_of(const Grid& grid) {
  const Surface& surface = grid.surface;
  std::string text;
  for (size_t column = 0; column < surface.x.size(); ++column) {
    text += label(grid.left(column) + grid.cell_wide() / 2, grid.bottom() + 16, "middle",
                  std::to_string(surface.x[column]));
  }
  for (size_t row = 0; row < surface.y.size(); ++row) {
    text += label(kGridLeft - 8, grid.top(row) + kCellHigh / 2 + 4, "end", std::to_string(surface.y[row]));
    const auto& most = surface.border[row];
    text += label(kGridLeft + kGridWide + 8, grid.top(row) + kCellHigh / 2 + 4, "start",
                  most ? fmt::format("fits up to {}", *most) : std::string("none fits"));
  }
  text += label(kGridLeft + kGridWide / 2, grid.bottom() + 36, "middle", escape_markup(surface.x_name));
  return text + label(kGridLeft - 8, kGridTop - 10, "end", escape_markup(surface.y_name)) +
         label(kGridLeft + kGridWide, kGridTop - 10, "end", "peak allocated, GiB");
}

}  // namespace

std::string draw_surface(const Surface& surface) {
  if (surface.x.empty() || surface.y.empty()) return {};
  const Grid grid{surface};
  std::string text = fmt::format(R"(<svg viewBox="0 0 {} {}" role="img" aria-label="peak by {} and {}">)",
                                 kGridLeft + kGridWide + kRight, grid.bottom() + kGridBottom,
                                 escape_markup(surface.x_name), escape_markup(surface.y_name));
  for (size_t row = 0; row < surface.y.size(); ++row) {
    for (size_t column = 0; column < surface.x.size(); ++column) text += cell_of(grid, column, row);
  }
  return text + border_of(grid) + labels_of(grid) + "</svg>";
}

}  // namespace oomdiag
