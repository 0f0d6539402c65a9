#include "profiler/report/text/holders_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "profiler/explain/causes/causes.h"
#include "profiler/explain/facts/growth.h"
#include "profiler/explain/facts/owners.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/report/make/holders.h"
#include "profiler/report/report.h"
#include "profiler/report/text/table.h"
#include "profiler/report/words/place_text.h"
#include "profiler/report/words/printable.h"
#include "profiler/report/words/text_options.h"

namespace oomdiag {
namespace {

constexpr size_t kHolderColumns = 62;

// Of a recording nothing.
std::string describe_confidence(const ReportOfDevice& device) {
  int64_t sure = 0;
  for (const ReportFromStacks& part : device.from_stacks)
    sure += part.confidence == name_of(Confidence::high) ? part.bytes : 0;
  if (device.from_stacks.empty() || device.memory.allocated_bytes <= 0) return {};
  return fmt::format(" (from stacks: {} % high confidence)", sure * 100 / device.memory.allocated_bytes);
}

/// A table whose rows are written one by one.
class Holders {
 public:
  Holders(const ReportOfDevice& device, TextOptions options) : options_(std::move(options)) {
    const bool failed = device.failure.has_value();
    // What is free may be a hundred times what is used: neither the unit nor the bars go by it.
    largest_ = std::max(device.memory.cached_bytes, device.memory.non_pytorch_bytes);
    for (const auto& [name, bytes] : device.categories) largest_ = std::max(largest_, bytes);
    unit_ = unit_for(std::max(device.memory.allocated_bytes, largest_));
    const std::string title = failed ? "GPU memory at the failure" : "GPU memory at the peak";
    text_ = "  " + padded(title + describe_confidence(device), kHolderColumns) + fmt::format("{:>9}\n", unit_.name);
  }

  bool shows(int64_t bytes) const { return !reads_as_zero(bytes, unit_); }

  void row(std::string_view label, int64_t bytes) {
    if (!shows(bytes)) return;
    text_ += "    " + padded(label, kHolderColumns - 2) + fmt::format("{:>9}", in_unit(bytes, unit_));
    const std::string bars = bytes <= largest_ ? bar(bytes, largest_, options_.unicode) : std::string();
    text_ += bars.empty() ? "\n" : "  " + bars + "\n";
  }

  void detail(const std::string& label, int64_t bytes) {
    text_ += "      " + padded(printable(label, kHolderColumns - 5), kHolderColumns - 4) +
             fmt::format("{:>9}\n", in_unit(bytes, unit_));
  }

  const TextOptions& options() const { return options_; }
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
  const bool bare = path.find_first_not_of("0123456789*", begin) == path.npos;
  if (bare && begin >= 2) begin = path.rfind('.', begin - 2) + 1;
  return path.substr(begin);
}

// "logits: lm_head", "aten::dropout in model.layers.* ×48", "aten::linear in 7 layers" of an nn.Sequential, "relu1 → pool1".
std::string name_of(const ReportHolder& holder, const TextOptions& options) {
  const bool of_layer = holder.name.ends_with('*') && !holder.op.empty();
  const bool of_root = of_layer && holder.name == "*";
  std::string name = of_layer ? holder.op + " in " + holder.name : holder.name;
  if (of_root) name = holder.op + (holder.copies > 1 ? fmt::format(" in {} layers", holder.copies) : " in a layer");
  if (name.empty()) name = !holder.op.empty() ? holder.op : short_source(holder.source);
  if (name.empty()) name = "of unknown origin";
  if (!holder.kind.empty() && holder.kind != name) name = holder.kind + ": " + name;
  if (holder.copies > 1 && !of_root) name += fmt::format(" {}{}", options.unicode ? "×" : "x", holder.copies);
  if (holder.used_by.empty()) return name;
  return name + (options.unicode ? " → " : " -> ") + std::string(without_common_path(holder.used_by, holder.name));
}

std::string shape_of(const ReportHolder& holder) {
  std::string shape = holder.shape;
  if (shape.ends_with(" float32")) shape.resize(shape.size() - std::string_view(" float32").size());
  return printable(shape, 40);
}

// "28 × 384.00 MiB": equal allocations of one place, as of a loop that keeps them.
std::string count_of(const ReportHolder& holder, const TextOptions& options) {
  if (holder.copies > 1 || holder.blocks < 2 || holder.block_bytes == 0) return {};
  return fmt::format("{} {} {}", holder.blocks, options.unicode ? "×" : "x", with_unit(holder.block_bytes));
}

int64_t cached_in_private_pools(const ReportOfDevice& device) {
  for (const auto& [name, bytes] : device.private_pools) {
    if (name == "cached_bytes") return bytes;
  }
  return 0;
}

/// One row for a category, and those who hold it.
void category_rows(Holders& table, const ReportOfDevice& device, std::string_view label, Category category) {
  constexpr int64_t kLeastShare = 20;
  const int64_t all = bytes_of(device, category);
  table.row(label, all);
  if (all * kLeastShare < device.memory.allocated_bytes || !table.shows(all)) return;
  int64_t named = 0;
  bool any = false;
  for (const ReportHolder& holder : device.top_allocations) {
    if (holder.category != category || !table.shows(holder.bytes) || named >= all / 5 * 4) continue;
    const bool is_unnamed = holder.name.empty() && holder.op.empty() && holder.source.empty() && holder.shape.empty();
    if (!is_unnamed) table.detail(label_of(holder, table.options(), kHolderColumns - 5), holder.bytes);
    if (!is_unnamed) any = true;
    named += is_unnamed ? 0 : holder.bytes;
  }
  if (any && table.shows(all - named)) table.detail("others", all - named);
}

// Unfolds into its owners, of which "unexplained" always stands there. Where the GPU had no room for all, what is missing is in host memory.
void non_pytorch_details(Holders& table, const ReportOfDevice& device) {
  for (const NonPytorchOwner& owner : device.non_pytorch) {
    const bool is_missing = owner.kind.empty() && owner.bytes < 0 && device.peak.host_memory_bytes > 0;
    if (owner.kind.empty() || table.shows(owner.bytes))
      table.detail(is_missing ? "in host memory" : owner.owner, owner.bytes);
  }
}

/// The categories in the order in which a report has them.
constexpr std::array<std::pair<Category, std::string_view>, kCategoryCount> kCategories = {
    {{Category::activation, "activations (saved for backward)"},
     {Category::activation_gradient, "activation gradients"},
     {Category::input, "inputs"},
     {Category::output, "outputs (live, not saved)"},
     {Category::temporary, "temporaries"},
     {Category::workspace, "workspace (cuDNN, cuBLAS)"},
     {Category::parameter, "parameters"},
     {Category::buffer, "buffers"},
     {Category::gradient, "gradients"},
     {Category::optimizer_state, "optimizer state"},
     {Category::unknown, "of unknown use"}}};

/// What is no category, in the order in which it follows them.
struct MemoryRow {
  std::string label;
  int64_t bytes = 0;
};

std::vector<MemoryRow> rows_behind_categories(const ReportOfDevice& device) {
  const int64_t private_bytes = cached_in_private_pools(device);
  return {{"freed, in use on another stream", device.memory.pending_free_bytes},
          {"cached (reserved, not allocated)", device.memory.cached_bytes - private_bytes},
          {"cached in private pools", private_bytes},
          {device.device.virtual_device ? "non-PyTorch memory (context: estimated)" : "non-PyTorch memory",
           device.memory.non_pytorch_bytes},
          {"free", device.memory.free_bytes}};
}

}  // namespace

std::string label_of(const ReportHolder& holder, const TextOptions& options, size_t columns) {
  std::string label = name_of(holder, options);
  const bool wants_line = holder.name.empty() && !holder.source.empty() && !holder.op.empty();
  for (const std::string& more :
       {wants_line ? short_source(holder.source) : std::string(), count_of(holder, options), shape_of(holder)}) {
    const bool fits = count_columns(label) + 2 + count_columns(more) <= columns;
    if (!more.empty() && fits) label += "  " + more;
  }
  return label;
}

std::string_view label_of(Category category) {
  return std::ranges::find(kCategories, category, [](const auto& one) { return one.first; })->second;
}

std::string holders_table(const ReportOfDevice& device, const TextOptions& options) {
  Holders table(device, options);
  for (const auto& [category, label] : kCategories) category_rows(table, device, label, category);
  for (const MemoryRow& row : rows_behind_categories(device)) {
    table.row(row.label, row.bytes);
    if (row.label.starts_with("non-PyTorch") && row.bytes > 0) non_pytorch_details(table, device);
  }
  return table.finish();
}

std::string memory_table(const ReportOfDevice& device, size_t at_most, const TextOptions& options) {
  Holders table(device, options);
  std::vector<MemoryRow> rows;
  for (const auto& [category, label] : kCategories) rows.push_back({std::string(label), bytes_of(device, category)});
  for (MemoryRow& row : rows_behind_categories(device)) rows.push_back(std::move(row));
  std::erase_if(rows, [&](const MemoryRow& row) { return !table.shows(row.bytes); });
  int64_t others = 0;
  while (rows.size() > at_most || (others > 0 && rows.size() >= at_most)) {
    const auto smallest = std::ranges::min_element(rows, {}, &MemoryRow::bytes);
    others += smallest->bytes;
    rows.erase(smallest);
  }
  for (const MemoryRow& row : rows) table.row(row.label, row.bytes);
  table.row("others", others);
  return table.finish();
}

namespace {

bool reports_growth(const ReportOfDevice& device) {
  return !device.growth.empty() && (!device.cause || device.cause->kind == CauseKind::leak);
}

/// Whether the reason says who keeps its memory, which may not be who keeps most.
bool names_keeper(const ReportOfDevice& device) { return device.reason && !device.reason->kept_by.empty(); }

}  // namespace

std::string kept_by_label(const ReportOfDevice& device) {
  if (names_keeper(device)) return "kept by";
  return reports_growth(device) && device.growth.front().referrer.empty() ? "grows" : "kept by";
}

std::string kept_by_text(const ReportOfDevice& device, const TextOptions& options) {
  if (names_keeper(device)) return printable(device.reason->kept_by, 160);
  if (reports_growth(device)) {
    const ReportGrowth& growth = device.growth.front();
    const std::string place = joined_by_arrows(
        {in_words(std::string(oomdiag::name_of(growth.kind))), growth.op, growth.module, short_source(growth.source)},
        options.unicode, 60);
    const std::string referrer = growth.referrer.empty() ? "" : printable(growth.referrer, 160) + ": ";
    return fmt::format("{}{}, {} per step", referrer, place, with_unit(growth.bytes_per_step));
  }
  const auto most = std::ranges::max_element(device.top_allocations, {}, &ReportHolder::bytes);
  if (most == device.top_allocations.end() || most->bytes == 0) return {};
  const std::string referrer = most->referrer.empty() ? "" : printable(most->referrer, 160) + ": ";
  std::string text = fmt::format("{}{}, {}: {}", referrer, printable(label_of(*most, options, 80), 80),
                                 with_unit(most->bytes), label_of(most->category));
  const bool same = device.largest_allocation && !device.largest_allocation->freed_by_node.empty() &&
                    device.largest_allocation->name == most->name;
  if (same) text += fmt::format(", until {} has run", printable(device.largest_allocation->freed_by_node, 40));
  return text;
}

std::string lines_table(const ReportOfDevice& device) {
  constexpr size_t kMaxLines = 5;
  constexpr int64_t kLeastShare = 50;
  std::vector<const OwnedBytes*> lines;
  for (const OwnedBytes& line : device.allocated_by.line) {
    const bool counts = !line.name.empty() && line.name != "others" &&
                        line.bytes * kLeastShare >= device.memory.allocated_bytes && lines.size() < kMaxLines;
    if (counts) lines.push_back(&line);
  }
  if (lines.size() < 2) return {};
  const Unit unit = unit_for(device.memory.allocated_bytes);
  std::string text = "  " + padded("by line", kHolderColumns) + fmt::format("{:>9}\n", unit.name);
  for (const OwnedBytes* line : lines) {
    const std::string name = line->name.starts_with('/') ? short_source(line->name) : line->name;
    text += "    " + padded(printable_end(name, kHolderColumns - 3), kHolderColumns - 2) +
            fmt::format("{:>9}\n", in_unit(line->bytes, unit));
  }
  return text;
}

}  // namespace oomdiag
