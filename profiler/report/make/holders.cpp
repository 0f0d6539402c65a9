#include "profiler/report/make/holders.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "profiler/explain/facts/common_referrers.h"
#include "profiler/explain/facts/variable_counts.h"
#include "profiler/explain/findings.h"
#include "profiler/fold_indices.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/whole_number.h"

// A model of forty layers has forty blocks of each kind, and a list of the largest five names an eighth of one kind. So blocks
// are folded over the indices in their modules' paths. How coarsely depends on what it takes to name most of the bytes:
//
//   tensor    model.layers.*.mlp.act_fn  [8, 1024, 5632]     the same tensor of each layer
//   module    model.layers.*.mlp.act_fn                      all tensors of that module
//   kind      layer*.*.conv2                                 the same module of each stage
//   op        model.layers.*  aten::dropout                  the same op of each layer: many small tensors
//   layer     model.layers.*
//   name      aten::dropout                                  the same op
//
// The finest that names four fifths is taken, else the one that names most.

namespace oomdiag {
namespace {

enum class Fold { tensor, module, kind, op, layer, name };
constexpr std::array kFolds = {Fold::tensor, Fold::module, Fold::kind, Fold::op, Fold::layer, Fold::name};

// "layer3" is the third of its kind: "layer*".
std::string fold_stages(std::string_view path) {
  std::string folded;
  for (const char c : path) {
    if (!is_digit(c)) {
      folded += c;
    } else if (folded.empty() || folded.back() != '*') {
      folded += '*';
    }
  }
  return folded;
}

// "model.layers.*" of "model.layers.*.mlp.act_fn"; without an index the outermost two parts.
std::string layer_of(const std::string& folded) {
  if (const size_t index = folded.find(".*"); index != folded.npos) return folded.substr(0, index + 2);
  const size_t first = folded.find('.');
  return first == folded.npos ? folded : folded.substr(0, folded.find('.', first + 1));
}

std::string_view op_of(const Where& where) { return where.op.empty() ? where.node : where.op; }

std::string_view line_of(const Where& where) { return where.inner_source.empty() ? where.source : where.inner_source; }

bool is_loss_op(std::string_view op) {
  return op.find("cross_entropy") != op.npos || op.find("log_softmax") != op.npos || op.find("nll_loss") != op.npos ||
         op.find("_loss") != op.npos;
}

/// What identifies logits: their last size is the number of words (the first size of a large matrix, which more than
/// one tensor of the loss has, too).
int64_t last_size(std::string_view shape) {
  const size_t end = shape.find(']'), begin = shape.rfind(' ', end);
  if (end == shape.npos || shape.find(',') == shape.npos) return 0;
  int64_t size = 0;
  for (size_t i = begin == shape.npos ? 1 : begin + 1; i < end; ++i) {
    if (!is_digit(shape[i])) return 0;
    size = std::min<int64_t>(size * 10 + (shape[i] - '0'), int64_t{1} << 40);
  }
  return size;
}

std::set<int64_t> find_vocabularies(const MemoryState& state) {
  constexpr int64_t kFewestWords = 1000;
  std::set<int64_t> sizes;
  for (const LiveBlock& block : state.blocks) {
    const bool of_loss = is_loss_op(block.made.op) ||
                         std::ranges::any_of(block.saved_by, [](const Where& by) { return is_loss_op(by.op); });
    const int64_t size = of_loss ? last_size(block.shape) : 0;
    if (size >= kFewestWords) sizes.insert(size);
  }
  return sizes;
}

class Folder {
 public:
  Folder(const MemoryState& state, const CommonReferrers& referrers)
      : vocabularies_(find_vocabularies(state)), referrers_(referrers) {}

  std::vector<ReportHolder> fold(const std::vector<const LiveBlock*>& blocks) const {
    int64_t all = 0;
    for (const LiveBlock* block : blocks) all += block->bytes;
    std::vector<ReportHolder> best;
    int64_t named_by_best = -1;
    for (const Fold how : kFolds) {
      std::vector<ReportHolder> rows = fold(blocks, how);
      int64_t named = 0;
      for (const ReportHolder& row : rows) named += row.bytes;
      if (named <= named_by_best) continue;
      best = std::move(rows);
      named_by_best = named;
      if (named >= all / 5 * 4) break;
    }
    return best;
  }

 private:
  struct Row {
    ReportHolder holder;
    std::set<std::string_view> paths;  ///< before they were folded
    const LiveBlock* largest = nullptr;
    VariableCounts referrers{};
    bool same_shape = true, same_op = true, same_line = true, same_bytes = true;
  };

  std::vector<ReportHolder> fold(const std::vector<const LiveBlock*>& blocks, Fold how) const {
    std::map<std::vector<std::string>, Row> rows;
    for (const LiveBlock* block : blocks) add(rows[key_of(*block, how)], *block);
    std::vector<ReportHolder> list;
    for (auto& [key, row] : rows) {
      describe(row, key.front(), how);
      list.push_back(std::move(row.holder));
    }
    std::ranges::stable_sort(list, std::greater{}, &ReportHolder::bytes);
    if (list.size() > kMaxHolders) list.resize(kMaxHolders);
    return list;
  }

  static std::string_view path_of(const LiveBlock& block) {
    return block.name.empty() ? block.made.module : block.name;
  }

  std::vector<std::string> key_of(const LiveBlock& block, Fold how) const {
    const std::string_view path = path_of(block);
    const std::string op(op_of(block.made)), line(line_of(block.made)), kind = kind_of(block);
    const std::string folded = fold_indices(path);
    switch (how) {
      case Fold::tensor:
        return {folded, op, std::string(block.shape), line, kind};
      case Fold::module:
        return {folded, path.empty() ? op + line : "", kind};
      case Fold::kind:
        return {fold_stages(path), path.empty() ? op : "", kind};
      case Fold::op:
        return {layer_of(folded), op, kind};
      case Fold::layer:
        return {layer_of(folded), path.empty() ? op : "", kind};
      case Fold::name:
        return {"", op, kind};
    }
    return {};
  }

  /// What people call it, beside its place: "logits", "loss", "cast".
  std::string kind_of(const LiveBlock& block) const {
    if (block.category == Category::parameter || block.category == Category::gradient) return {};
    if (is_loss_op(block.made.op)) return "loss";
    if (vocabularies_.contains(last_size(block.shape)) && block.category != Category::optimizer_state) return "logits";
    const bool copies = block.made.inner == "aten::_to_copy" || block.made.inner == "aten::empty_strided" ||
                        block.made.inner == "aten::to";
    return !block.made.autocast.empty() && copies && !block.made.module.empty() ? "cast" : "";
  }

  /// What belongs to a module is called by its name there.
  std::string_view referrer_of(const LiveBlock& block) const {
    if (!block.name.empty()) return {};
    const Referrer* const referrer = referrers_.find(block);
    return referrer == nullptr ? std::string_view() : referrer->variable;
  }

  void add(Row& row, const LiveBlock& block) const {
    row.holder.bytes += block.bytes;
    ++row.holder.blocks;
    row.referrers.add(referrer_of(block), 1);
    if (const std::string_view path = path_of(block); !path.empty()) row.paths.insert(path);
    if (row.largest != nullptr) {
      row.same_shape &= row.largest->shape == block.shape;
      row.same_op &= op_of(row.largest->made) == op_of(block.made);
      row.same_line &= line_of(row.largest->made) == line_of(block.made);
      row.same_bytes &= row.largest->bytes == block.bytes;
    }
    if (row.largest == nullptr || block.bytes > row.largest->bytes) row.largest = &block;
  }

  void describe(Row& row, const std::string& name, Fold how) const {
    const LiveBlock& block = *row.largest;
    ReportHolder& holder = row.holder;
    holder.category = block.category;
    holder.name = name;
    holder.kind = kind_of(block);
    holder.copies = std::max<int64_t>(1, static_cast<int64_t>(row.paths.size()));
    if (row.same_bytes) holder.block_bytes = block.bytes;
    if (row.same_shape) holder.shape = block.shape;
    if (row.same_op) holder.op = op_of(block.made);
    if (row.same_line) holder.source = line_of(block.made);
    // One of a loop's tensors may be in the hands of the turn that runs: who keeps nearly all is said to keep them.
    const bool keeps_most = row.referrers.count_of_most() * 5 >= holder.blocks * 4;
    holder.referrer = as_written(keeps_most ? row.referrers.most() : std::string_view());
    if (how > Fold::module) return;
    for (const Where& saver : block.saved_by) {
      const std::string by = fold_indices(saver.module.empty() ? op_of(saver) : saver.module);
      if (by.empty() || by == holder.name) continue;
      holder.used_by = by;
      break;
    }
  }

  std::set<int64_t> vocabularies_;
  const CommonReferrers& referrers_;
};

}  // namespace

std::vector<ReportHolder> fold_holders(const MemoryState& state, const CommonReferrers& referrers) {
  std::array<std::vector<const LiveBlock*>, kCategoryCount> blocks;
  for (const LiveBlock& block : state.blocks) {
    if (!block.pending_free) blocks[static_cast<size_t>(block.category)].push_back(&block);
  }
  const Folder folder(state, referrers);
  std::vector<ReportHolder> holders;
  for (const auto& of_category : blocks) {
    const auto rows = folder.fold(of_category);
    holders.insert(holders.end(), rows.begin(), rows.end());
  }
  return holders;
}

int64_t bytes_of(const ReportOfDevice& device, Category category) {
  const auto found = std::ranges::find(device.categories, name_of(category), &Figures::value_type::first);
  return found == device.categories.end() ? 0 : found->second;
}

std::vector<ReportHolder> list_others(const ReportOfDevice& device) {
  std::vector<ReportHolder> others;
  for (size_t c = 0; c < kCategoryCount; ++c) {
    const auto category = static_cast<Category>(c);
    int64_t bytes = bytes_of(device, category);
    for (const ReportHolder& holder : device.top_allocations) bytes -= holder.category == category ? holder.bytes : 0;
    if (bytes > 0) others.push_back({.category = category, .name = "others", .bytes = bytes, .blocks = 0});
  }
  return others;
}

}  // namespace oomdiag
