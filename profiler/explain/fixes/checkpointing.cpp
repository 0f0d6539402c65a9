#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include "profiler/counted.h"
#include "profiler/explain/fixes/fix_rules.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/explain/step/what_if.h"
#include "profiler/explain/words/bytes_text.h"
#include "profiler/replay/history.h"
#include "profiler/whole_number.h"

// Checkpointing of modules (torch.utils.checkpoint, not reentrant). What a module saves for itself is freed in forward and
// recomputed when backward comes to the module:
//
//   as it is       ──┬── forward ───────────────────────────── backward of m ──┬──
//                    └ saved ──────────────────────────────────────────────────┘
//   checkpointed   ──┬┬─ forward ──────────────────────────┬── backward of m ──┬──
//                    └┘ freed at once                      └ recomputed ───────┘
//
// What another module saves too is the border between them: it stays up to there, as the backward of all who take it comes
// before that of m, and is recomputed for m itself.

namespace oomdiag {
namespace {

struct Segment {
  uint32_t backward = StepAllocation::kNever;  ///< where its first node allocates
  uint32_t first = StepAllocation::kNever;     ///< where its first saved tensor is made
  size_t interior = 0;                         ///< blocks that only it saves
  bool has_modules = false;                    ///< inside of it
  int64_t saved_bytes = 0;                     ///< by it, also what others save too
};

// "h.2" comes before "h.10".
struct InNaturalOrder {
  bool operator()(std::string_view a, std::string_view b) const {
    while (!a.empty() && !b.empty()) {
      const size_t i = digits(a), j = digits(b);
      if (i > 0 && j > 0) {
        if (i != j) return i < j;
        if (a.substr(0, i) != b.substr(0, j)) return a.substr(0, i) < b.substr(0, j);
      } else if (a.front() != b.front()) {
        return a.front() < b.front();
      }
      a.remove_prefix(std::max<size_t>(1, i));
      b.remove_prefix(std::max<size_t>(1, j));
    }
    return a.size() < b.size();
  }
  static size_t digits(std::string_view text) {
    return static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_digit) - text.begin());
  }
};

// "layer3.5.conv2" cut to 2 levels is "layer3.5.conv2", to 1 "layer3.5": a list of modules is no level, as the forward of an
// nn.ModuleList never runs. Modules that lie less deep are no segment.
std::string_view cut_path(std::string_view path, size_t levels) {
  size_t begin = 0;
  for (size_t level = 0; begin < path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const size_t next = std::min(path.find('.', std::min(end + 1, path.size())), path.size());
    const bool list_follows = end < path.size() && is_number(path.substr(end + 1, next - end - 1));
    if (!list_follows && ++level == levels) return path.substr(0, end);
    begin = end + 1;
  }
  return {};
}

bool is_saved_outside(const StepAllocation& block, std::string_view segment) {
  return std::any_of(block.saved_by.begin(), block.saved_by.end(),
                     [&](const Where& saver) { return !is_inside(saver.module, segment); });
}

bool is_saved_inside(const StepAllocation& block, std::string_view segment) {
  return std::any_of(block.saved_by.begin(), block.saved_by.end(),
                     [&](const Where& saver) { return is_inside(saver.module, segment); });
}

// Python's outermost module is known by its class. To run the whole model again in backward saves nothing: all that it keeps
// is there at once again.
bool is_whole_model(const StepAllocation& block) {
  const std::string_view module = block.made.module;
  return !module.empty() && module.front() >= 'A' && module.front() <= 'Z' && module.find('.') == module.npos &&
         block.made.source.find(".py:") != std::string_view::npos;
}

bool is_of_forward(const StepAllocation& block) { return block.phase == Phase::forward && block.is_of_step(); }

bool is_saved_in_forward(const StepAllocation& block) {
  return block.category == Category::activation && is_of_forward(block);
}

using Segments = std::map<std::string_view, Segment, InNaturalOrder>;

/// The module that a module is checkpointed with; empty: none.
using FindSegment = std::function<std::string_view(std::string_view module)>;

FindSegment at_level(size_t levels) {
  return [levels](std::string_view module) { return cut_path(module, levels); };
}

Segments collect_segments(const Allocations& blocks, const FindSegment& segment_of) {
  Segments segments;
  for (const StepAllocation& block : blocks) {
    const std::string_view path = segment_of(block.made.module);
    if (path.empty() || is_whole_model(block)) continue;
    Segment& segment = segments[path];
    segment.has_modules |= block.made.module.size() > path.size();
    if (block.phase == Phase::backward && block.is_of_step()) segment.backward = std::min(segment.backward, block.born);
    if (!is_saved_in_forward(block)) continue;
    segment.first = std::min(segment.first, block.born);
    if (!is_saved_outside(block, path)) ++segment.interior;
    if (is_saved_inside(block, path) || !is_saved_outside(block, path)) segment.saved_bytes += block.bytes;
  }
  return segments;
}

Segments find_segments(const Allocations& blocks, size_t levels) {
  Segments segments = collect_segments(blocks, at_level(levels));
  // A layer that saves one tensor for itself would have to save its input in the place of it.
  std::erase_if(segments, [](const auto& one) { return one.second.interior < (one.second.has_modules ? 1 : 2); });
  return segments;
}

// Where backward was not seen, it comes to the segments in reverse order from where forward ends. What was made after a
// segment is gone by then:
//
//   made     a | segment 1 | b | segment 2 | c      forward_end
//   lives    to 4            to 2            to 0   plus this; segments 2 and 1 are recomputed at 0 and at 2
void begin_backward(Allocations& blocks, Segments& segments, uint32_t forward_end) {
  std::vector<Segment*> in_order;
  for (auto& [path, segment] : segments) in_order.push_back(&segment);
  std::sort(in_order.begin(), in_order.end(), [](const Segment* a, const Segment* b) { return a->first < b->first; });
  const auto reached = [&](uint32_t born) {
    const auto after = std::upper_bound(in_order.begin(), in_order.end(), born,
                                        [](uint32_t at, const Segment* segment) { return at < segment->first; });
    return forward_end + 2 * static_cast<uint32_t>(in_order.end() - after);
  };
  for (Segment* segment : in_order) segment->backward = reached(segment->first);
  for (StepAllocation& block : blocks) {
    if (is_of_forward(block) && block.died > forward_end) block.died = reached(block.born);
  }
}

// `ends_known`: where what is recomputed goes. Where backward was cut short this is not known, and it is left out.
Allocations checkpoint(Allocations blocks, const Segments& segments, const FindSegment& segment_of, bool ends_known) {
  const uint32_t last_backward = find_last_backward(blocks);
  Allocations again;
  for (StepAllocation& block : blocks) {
    const auto segment = segments.find(segment_of(block.made.module));
    if (segment == segments.end() || !is_saved_in_forward(block)) continue;
    const bool border = is_saved_outside(block, segment->first);
    if (border && !is_saved_inside(block, segment->first)) continue;
    if (segment->second.backward != StepAllocation::kNever && ends_known) {
      again.push_back(block);
      again.back().born = std::max(segment->second.backward, block.born + 1);
      if (again.back().died <= again.back().born) again.back().died = again.back().born + 1;
      const bool outlives_backward = block.died > last_backward;  // the program holds it, too
      if (border && !outlives_backward) block.died = std::min(block.died, again.back().born);
    }
    if (!border) block.died = block.born + 1;
  }
  blocks.insert(blocks.end(), again.begin(), again.end());
  return blocks;
}

// "blocks" of "blocks.3"; of "3" the model itself, which has no name.
std::string_view parent_of(std::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == path.npos ? std::string_view() : path.substr(0, dot);
}

// "3" of "blocks.3".
std::string_view last_name(std::string_view path) { return path.substr(path.rfind('.') + 1); }

/// "checkpoint transformer.h.*, transformer.ln_f": lists of modules as a whole, and of many names the first.
std::string label_of(const Segments& segments) {
  std::map<std::string_view, size_t> lists;
  for (const auto& [path, segment] : segments) ++lists[parent_of(path)];
  std::vector<std::string> names;
  for (const auto& [path, segment] : segments) {
    const std::string_view parent = parent_of(path);
    const bool of_list = is_number(last_name(path)) && lists[parent] > 2;
    std::string name = !of_list ? std::string(path) : parent.empty() ? "*" : fmt::format("{}.*", parent);
    if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
  }
  constexpr size_t kMaxNames = 3;
  const size_t more = names.size() > kMaxNames ? names.size() - (kMaxNames - 1) : 0;
  names.resize(names.size() - more);
  return fmt::format("checkpoint {}{}", fmt::join(names, ", "), more > 0 ? fmt::format(" and {} more", more) : "");
}

/// `model.layer1[0]` for layer1.0.
std::string as_python(std::string_view path) {
  std::string text = "model";
  while (!path.empty()) {
    const std::string_view name = path.substr(0, path.find('.'));
    text += is_number(name) ? fmt::format("[{}]", name) : fmt::format(".{}", name);
    path.remove_prefix(std::min(name.size() + 1, path.size()));
  }
  return text;
}

/// The modules as Python: a list of numbered ones is meant as a whole, as those that keep nothing cost nothing.
std::vector<std::string> in_python(const Segments& segments) {
  std::vector<std::string> words;
  for (const auto& [path, segment] : segments) {
    const std::string_view parent = parent_of(path);
    const std::string word = is_number(last_name(path)) ? "*" + as_python(parent) : as_python(path);
    if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
  }
  return words;
}

// A function, as its names are its own: a loop at the top would overwrite a variable of the program, and an import of torch in main()
// would make torch a local name there.
std::vector<std::string> how_of(const Allocations& blocks, const Segments& segments) {
  constexpr size_t kMaxInOneLine = 80;
  std::vector<std::string> lines{
      "def checkpoint_forward(*modules):", "    import functools", "    from torch.utils.checkpoint import checkpoint",
      "    for module in modules:",
      "        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)"};
  const std::vector<std::string> words = in_python(segments);
  const std::string call = fmt::format("checkpoint_forward({})", fmt::join(words, ", "));
  if (call.size() <= kMaxInOneLine) {
    lines.push_back(call);
  } else {
    lines.emplace_back("checkpoint_forward(");
    for (const std::string& word : words) lines.push_back("    " + word + ",");
    lines.emplace_back(")");
  }
  const bool has_trainer = std::any_of(blocks.begin(), blocks.end(), [](const StepAllocation& block) {
    return block.made.inner_source.find("transformers/") != std::string_view::npos;
  });
  if (has_trainer) lines.emplace_back("# or, of transformers: model.gradient_checkpointing_enable()");
  return lines;
}

/// Tries the modules at each depth of the tree, all that save something for themselves alone, and takes the
/// depth with the lowest peak. Peak: interior tensors live from the backward of their module on only.
std::optional<ModifiedStep> checkpoint_modules(const StepModel& model) {
  constexpr size_t kDeepest = 8;  // "model.0.auto_model.encoder.layer.3" has six
  if (!may_train(model)) return {};
  std::optional<ModifiedStep> best;
  int64_t best_peak = 0;
  for (size_t levels = 1; levels <= kDeepest; ++levels) {
    Segments segments = find_segments(model.blocks, levels);
    if (segments.empty()) continue;
    Allocations blocks = model.blocks;
    const bool backward_seen = std::any_of(segments.begin(), segments.end(), [](const auto& one) {
      return one.second.backward != StepAllocation::kNever;
    });
    if (!model.whole && !backward_seen) begin_backward(blocks, segments, model.forward_end);
    blocks = checkpoint(std::move(blocks), segments, at_level(levels), model.whole || !backward_seen);
    const int64_t peak = find_peak(blocks);
    if (best && peak >= best_peak) continue;
    best_peak = peak;
    best = ModifiedStep{.blocks = std::move(blocks), .label = label_of(segments)};
    int64_t again = 0;
    for (const auto& [path, segment] : segments) {
      best->modules.emplace_back(path);
      again += segment.saved_bytes;
    }
    best->lines = how_of(model.blocks, segments);
    best->costs =
        "forward of " + counted(segments.size(), "module") + " runs twice: " + with_unit(again) + " recomputed";
  }
  return best;
}

/// save_on_cpu: what autograd keeps waits on the host; on the GPU remains what is used at the moment.
std::optional<ModifiedStep> offload_activations(const StepModel& model) {
  Allocations blocks = model.blocks;
  if (!may_train(model)) return {};
  const uint32_t backward = find_backward(blocks);
  int64_t moved = 0;
  for (StepAllocation& block : blocks) {
    if (!block.is_of_step() || block.born >= backward) continue;
    if (block.freed_in_backward) block.died = std::min(block.died, backward);  // inputs, too: only autograd kept them
    if (block.category != Category::activation || block.phase != Phase::forward) continue;
    moved += block.bytes;
    block.died = std::min(block.died, block.born + 1);
  }
  if (moved == 0) return {};
  return ModifiedStep{
      .blocks = std::move(blocks), .costs = with_unit(2 * moved) + " over PCIe in each step", .at_least = true};
}

/// Not of what grows from step to step, which would grow on the host.
std::optional<ModuleSettings> where_the_host_can_keep(const ProgramFacts& program) {
  return unless(!program.profile.has_root || !program.runs_backward || program.grows);
}

// Which blocks their modules get is for those who run them (cli/experiments/fix_checkpoints.cpp).
constexpr FixRow kCheckpointFixes[] = {
    {.id = "checkpoint",
     .label = "activation checkpointing",
     .group = "checkpoint",
     .cost = FixCost::recomputation,
     .has_module = true,
     .formula = "what only the module saves is freed in forward, and recomputed when its backward begins",
     .combines = true,
     .predict = checkpoint_modules,
     .in_frameworks = {{"transformers", "TrainingArguments(…, gradient_checkpointing=True)"},
                       {"trl", "SFTConfig(…, gradient_checkpointing=True)"},
                       {"diffusers", "unet.enable_gradient_checkpointing()  # or transformer., vae."},
                       {"timm", "model.set_grad_checkpointing()"}}},
    {.id = "offload_activations",
     .label = "offload activations to CPU",
     .group = "checkpoint",
     .cost = FixCost::host_copies,
     .has_module = true,
     .formula = "what autograd keeps is on the GPU only while it is used",
     .lines = "with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    loss = …  # forward",
     .in_plans = true,
     .predict = offload_activations,
     .configure = where_the_host_can_keep},
    {.id = "offload_blocks",
     .label = "offload blocks to CPU beside compute",
     .group = "checkpoint",
     .has_module = true,
     .in_plans = true},
};

}  // namespace

std::string name_layers(const Allocations& blocks) {
  std::map<std::string_view, int64_t> made;  // bytes by list of modules
  for (const StepAllocation& block : blocks) {
    const std::string_view path = cut_path(block.made.module, 1);
    const std::string_view parent = parent_of(path);
    const bool numbered = !parent.empty() && is_number(last_name(path));
    if (numbered && block.phase == Phase::forward) made[parent] += block.bytes;
  }
  const auto most = std::ranges::max_element(made, {}, [](const auto& one) { return one.second; });
  return most == made.end() ? "model.layers" : as_python(most->first);
}

Allocations checkpoint_paths(const Allocations& blocks, std::span<const std::string> paths) {
  const FindSegment segment_of = [&](std::string_view module) {
    const auto found = std::ranges::find_if(paths, [&](const std::string& path) { return is_inside(module, path); });
    return found == paths.end() ? std::string_view() : std::string_view(*found);
  };
  return checkpoint(blocks, collect_segments(blocks, segment_of), segment_of, /*ends_known=*/true);
}

std::span<const FixRow> list_checkpoint_fixes() { return kCheckpointFixes; }

}  // namespace oomdiag
