#include "profiler/report/text_tables.h"

#include <fmt/format.h>

#include <algorithm>

#include "profiler/report/table.h"

namespace oomdiag {
namespace {

constexpr size_t kLabelColumns = 54;
constexpr size_t kMostRemedies = 6;
constexpr size_t kMostTensors = 5;  ///< shown under what is saved for backward

int64_t cached_in_private_pools(const ReportOfDevice& device) {
  for (const auto& [name, bytes] : device.private_pools) {
    if (name == "cached_bytes") return bytes;
  }
  return 0;
}

int64_t sum_of(const ReportOfDevice& device, std::initializer_list<std::string_view> categories) {
  int64_t sum = 0;
  for (const auto& [name, bytes] : device.categories) {
    if (std::find(categories.begin(), categories.end(), name) != categories.end()) sum += bytes;
  }
  return sum;
}

/// A table whose rows are written one by one.
class Holders {
 public:
  Holders(const ReportOfDevice& device, const TextOptions& options) : options_(options) {
    // What is free may be a hundred times what is used: neither the unit nor the bars go by it.
    largest_ = std::max(device.card.cached_bytes, device.card.outside_pytorch_bytes);
    for (const auto& [name, bytes] : device.categories) largest_ = std::max(largest_, bytes);
    unit_ = unit_for(std::max(device.card.allocated_bytes, largest_));
    text_ = "  " + padded("who holds the card", kLabelColumns) + fmt::format("{:>9}\n", unit_.name);
  }

  bool shows(int64_t bytes) const { return bytes * 200 >= unit_.bytes; }  // else it would read 0.00

  void row(std::string_view label, int64_t bytes) {
    if (!shows(bytes)) return;
    text_ += "    " + padded(label, kLabelColumns - 2) + fmt::format("{:>9}", in_unit(bytes, unit_));
    const std::string bars = bytes <= largest_ ? bar(bytes, largest_, options_.unicode) : std::string();
    text_ += bars.empty() ? "\n" : "  " + bars + "\n";
  }

  void detail(const std::string& label, int64_t bytes) {
    text_ += "      " + padded(printable(label, kLabelColumns - 5), kLabelColumns - 4) +
             fmt::format("{:>9}\n", in_unit(bytes, unit_));
  }

  std::string finish() { return std::move(text_); }

 private:
  TextOptions options_;
  int64_t largest_ = 0;
  Unit unit_;
  std::string text_;
};

// "h.7.mlp.c_proj" beside "h.7.mlp.act" is "c_proj": paths of modules are long and begin alike. A bare index says nothing
// and keeps the name before it.
std::string_view without_common_path(std::string_view path, std::string_view beside) {
  const auto differs = std::mismatch(path.begin(), path.end(), beside.begin(), beside.end()).first;
  auto begin = static_cast<size_t>(differs - path.begin());
  begin = begin == 0 ? 0 : path.rfind('.', begin - 1) + 1;  // npos + 1 = 0
  const bool bare = path.find_first_not_of("0123456789", begin) == path.npos;
  if (bare && begin >= 2) begin = path.rfind('.', begin - 2) + 1;
  return path.substr(begin);
}

// "relu1 → pool1  [6800, 32, 64, 64]": who made it, who keeps it, what it is.
std::string label_of(const ReportOwner& owner, const TextOptions& options) {
  std::string label = owner.name.empty() ? "?" : owner.name;
  if (!owner.used_by.empty()) {
    label += options.unicode ? " → " : " -> ";
    label += without_common_path(owner.used_by.front(), owner.name);
  }
  std::string shape = owner.shape;
  if (shape.ends_with(" float32")) shape.resize(shape.size() - std::string_view(" float32").size());
  const size_t room = kLabelColumns - 7 - std::min<size_t>(shape.size(), 24);
  return printable(label, room) + (shape.empty() ? "" : "  " + shape);
}

std::vector<const ReportOwner*> owners_of(const ReportOfDevice& device, std::string_view category) {
  std::vector<const ReportOwner*> owners;
  for (const ReportOwner& owner : device.owners) {
    if (owner.category == category) owners.push_back(&owner);
  }
  return owners;
}

// Unfolds into its owners, of which "unexplained" always stands there.
void outside_rows(Holders& table, const ReportOfDevice& device) {
  if (device.card.outside_pytorch_bytes == 0) return;
  table.row(device.device.virtual_device ? "outside PyTorch (context: estimated)" : "outside PyTorch",
            device.card.outside_pytorch_bytes);
  for (const ReportOutside& owner : device.outside) {
    if (owner.owner == "unexplained" || table.shows(owner.bytes)) table.detail(owner.owner, owner.bytes);
  }
}

}  // namespace

std::string holders_table(const ReportOfDevice& device, const TextOptions& options) {
  Holders table(device, options);
  table.row("saved for backward", sum_of(device, {"activation"}));
  const auto saved = owners_of(device, "activation");
  for (size_t i = 0; i < saved.size() && i < kMostTensors; ++i)
    table.detail(label_of(*saved[i], options), saved[i]->bytes);
  if (saved.size() > kMostTensors) {
    int64_t rest = sum_of(device, {"activation"});
    for (size_t i = 0; i < kMostTensors; ++i) rest -= saved[i]->bytes;
    table.detail("others", rest);
  }
  table.row("gradients on their way", sum_of(device, {"gradient_in_flight"}));
  table.row("inputs", sum_of(device, {"input"}));
  table.row("outputs that are held", sum_of(device, {"output"}));
  table.row("temporaries", sum_of(device, {"temporary"}));
  table.row("workspace (cuDNN, cuBLAS)", sum_of(device, {"workspace"}));
  table.row("parameters + gradients + optimizer",
            sum_of(device, {"parameter", "buffer", "gradient", "optimizer_state"}));
  table.row("unknown", sum_of(device, {"unknown"}));
  // Blocks of a snapshot are known by their lines only, and nearly all are here.
  const auto unknown = owners_of(device, "unknown");
  for (size_t i = 0;
       i < unknown.size() && i < kMostTensors && sum_of(device, {"unknown"}) == device.card.allocated_bytes; ++i)
    table.detail(label_of(*unknown[i], options), unknown[i]->bytes);
  table.row("freed, in use on another stream", device.card.pending_free_bytes);
  const int64_t private_bytes = cached_in_private_pools(device);
  table.row("cached, free", device.card.cached_bytes - private_bytes);
  table.row("cached in private pools", private_bytes);
  outside_rows(table, device);
  table.row("free", device.card.free_bytes);
  return table.finish();
}

std::string holes_table(const ReportOfDevice& device, const TextOptions& options) {
  if (!device.cause || device.cause->pinned.empty()) return {};
  int64_t largest = 0;
  for (const ReportPinnedSegment& segment : device.cause->pinned) largest = std::max(largest, segment.bytes);
  const Unit unit = unit_for(largest);
  std::string text = "  " + padded(fmt::format("largest holes, {}", unit.name), 24) +
                     fmt::format("{:>9}{:>9}   pinned by\n", "hole", "segment");
  for (const ReportPinnedSegment& segment : device.cause->pinned) {
    if (segment.largest_hole_bytes * 200 < unit.bytes) continue;
    const std::string by = segment.pinned_by.empty() ? "" : label_of(segment.pinned_by.front(), options);
    text += fmt::format("    {:22}{:>9}{:>9}   {}\n", "", in_unit(segment.largest_hole_bytes, unit),
                        in_unit(segment.bytes, unit), by);
  }
  return text;
}

std::string groups_table(const ReportOfDevice& device) {
  constexpr size_t kMostGroups = 8;
  if (device.parameter_groups.empty()) return {};
  int64_t largest = 0;
  for (const ReportParameterGroup& group : device.parameter_groups) {
    largest = std::max({largest, group.parameter_bytes, group.gradient_bytes, group.optimizer_state_bytes});
  }
  const Unit unit = unit_for(largest);
  std::string text = "  " + padded(fmt::format("by parameter group, {}", unit.name), 30) +
                     fmt::format("{:>11}{:>11}{:>17}\n", "parameters", "gradients", "optimizer state");
  for (size_t i = 0; i < std::min(device.parameter_groups.size(), kMostGroups); ++i) {
    const ReportParameterGroup& group = device.parameter_groups[i];
    const std::string name = group.name.empty() ? "in no group that is known" : printable(group.name, 27);
    text += "    " + padded(name, 28) +
            fmt::format("{:>11}{:>11}{:>17}\n", in_unit(group.parameter_bytes, unit),
                        in_unit(group.gradient_bytes, unit), in_unit(group.optimizer_state_bytes, unit));
  }
  if (device.parameter_groups.size() > kMostGroups) {
    text += fmt::format("    {} more\n", device.parameter_groups.size() - kMostGroups);
  }
  return text;
}

std::string growth_table(const ReportOfDevice& device, const TextOptions& options) {
  if (device.growth.empty()) return {};
  constexpr size_t kMostRows = 3;
  int64_t largest = 0;
  for (const ReportGrowth& growth : device.growth) largest = std::max(largest, growth.grown_bytes);
  const Unit unit = unit_for(largest);
  std::string text = "  " + padded(fmt::format("growing from step to step, {}", unit.name), kLabelColumns - 9) +
                     fmt::format("{:>9}{:>9}\n", "per step", "so far");
  for (size_t i = 0; i < device.growth.size() && i < kMostRows; ++i) {
    const ReportGrowth& growth = device.growth[i];
    std::string label = growth.kind;
    std::replace(label.begin(), label.end(), '_', ' ');
    for (const std::string& part : {growth.op, growth.module, growth.source.substr(growth.source.rfind('/') + 1)}) {
      if (!part.empty()) label += (options.unicode ? " ← " : " <- ") + part;
    }
    text += "    " + padded(printable(label, kLabelColumns - 12), kLabelColumns - 11) +
            fmt::format("{:>9}{:>9}\n", in_unit(growth.bytes_per_step, unit), in_unit(growth.grown_bytes, unit));
  }
  return text;
}

std::string marks_table(const ReportOfDevice& device) {
  constexpr size_t kMostMarks = 12;
  if (device.marks.empty()) return {};
  int64_t largest = 0;
  for (const ReportMark& mark : device.marks) largest = std::max(largest, mark.peak_allocated_bytes);
  const Unit unit = unit_for(largest);
  std::string text = "  " + padded(fmt::format("marks, {}", unit.name), 36) +
                     fmt::format("{:>6}{:>12}{:>21}\n", "step", "allocated", "peak since the last");
  for (size_t i = 0; i < std::min(device.marks.size(), kMostMarks); ++i) {
    const ReportMark& mark = device.marks[i];
    text += "    " + padded(printable(mark.name, 33), 34) +
            fmt::format("{:>6}{:>12}{:>21}\n", mark.step, in_unit(mark.allocated_bytes, unit),
                        in_unit(mark.peak_allocated_bytes, unit));
  }
  if (device.marks.size() > kMostMarks) text += fmt::format("    {} more\n", device.marks.size() - kMostMarks);
  return text;
}

std::string remedies_table(const ReportOfDevice& device) {
  if (device.remedies.empty()) return {};
  int64_t largest = 0;
  for (const ReportRemedy& remedy : device.remedies) largest = std::max(largest, remedy.predicted_peak_bytes);
  const Unit unit = unit_for(largest);
  const bool measured = std::any_of(device.remedies.begin(), device.remedies.end(),
                                    [](const ReportRemedy& remedy) { return remedy.measured_peak_bytes.has_value(); });
  std::string text = "  " + padded(fmt::format("what helps, {}", unit.name), 36);
  text += measured ? fmt::format("{:>14}{:>12}   fits\n", "peak, measured", "predicted")
                   : fmt::format("{:>15}   should fit\n", "peak, predicted");
  for (size_t i = 0; i < device.remedies.size() && i < kMostRemedies; ++i) {
    const ReportRemedy& remedy = device.remedies[i];
    const std::string peak = remedy.measured_peak_bytes ? in_unit(*remedy.measured_peak_bytes, unit) : "-";
    const std::optional<bool> fits = remedy.fits ? remedy.fits : remedy.predicted_fits;
    const std::string predicted = (remedy.at_least ? "≥ " : "") + in_unit(remedy.predicted_peak_bytes, unit);
    text += "    " + padded(printable(remedy.label, 33), 34) + (measured ? fmt::format("{:>14}", peak) : "");
    text += fmt::format("{:>{}}   {}\n", predicted, measured ? 12 : 15, !fits ? "not known" : *fits ? "yes" : "no");
  }
  return text;
}

}  // namespace oomdiag
