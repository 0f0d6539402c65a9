#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "cli/experiments/fix.h"
#include "cli/process/environment.h"
#include "profiler/explain/findings.h"
#include "profiler/explain/fixes/fixes.h"
#include "profiler/explain/fixes/program_facts.h"
#include "profiler/explain/step/step_model.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"

// What there is to try. Which change makes sense is read from a look at the whole run; how much it should save, where the
// report knows it, comes from there.

namespace oomdiag {
namespace {

constexpr int64_t kFewestLayers = 4;  ///< of an nn.Sequential that is cut into parts

void find_prediction(Change& change, const Report& whole) {
  for (const ReportOfDevice& device : whole.devices) {
    const auto fix = std::ranges::find(device.fixes, change.id, &Fix::id);
    if (fix != device.fixes.end() && take_prediction(change, *fix)) return;
  }
}

int compute_major_of(const Target& target) {
  return target.device.gpus.empty() ? 0 : target.device.gpus.front().capability.major;
}

const char* autocast_of(const Target& target) {
  return has_bfloat16(compute_major_of(target)) ? "autocast_bf16" : "autocast_fp16";
}

std::string with_setting(const char* variable, const std::string& setting) {
  const std::string before = environment(variable);
  return before.empty() ? setting : fmt::format("{},{}", before, setting);
}

/// What a phase took at most, in any step; 0 if there was none.
int64_t peak_of(const Report& whole, Phase phase) {
  int64_t peak = 0;
  for (const ReportOfDevice& device : whole.devices) {
    for (const PhasePeak& one : device.phases) {
      if (one.phase == phase) peak = std::max(peak, one.allocated_bytes);
    }
  }
  return peak;
}

/// Whether tensors of forward and backward are a part of the peak that is worth halving: where weights and what belongs to them
/// are the peak, autocast adds copies of them.
bool is_peak_of_activations(const Report& whole) {
  constexpr int64_t kPart = 10;
  const ReportOfDevice* const device = main_device_of(whole);
  if (device == nullptr) return true;
  int64_t all = 0, activations = 0;
  const auto is_of_model = [](std::string_view name) {
    for (size_t c = 0; c < kCategoryCount; ++c) {
      if (name_of(static_cast<Category>(c)) == name) return kCategoryTraits[c].of_model;
    }
    return false;
  };
  for (const auto& [name, bytes] : device->categories) {
    all += bytes;
    if (!is_of_model(name)) activations += bytes;
  }
  return all == 0 || activations * kPart > all;
}

ProgramFacts facts_of(const Target& target, const ProgramProfile& profile, const Report& whole, const Before& before) {
  return {.profile = profile,
          .runs_backward = peak_of(whole, Phase::backward) > 0,
          .grows = before.grows,
          .activations_count = is_peak_of_activations(whole),
          .optimizer_peak_bytes = peak_of(whole, Phase::optimizer),
          .available_bytes = before.available_bytes,
          .compute_major = compute_major_of(target),
          .failing_step = before.failing_step,
          .reason = before.reason,
          .stack = before.stack};
}

/// What the Python modules of the fixes may do for the program, as their rows say.
void add_of_modules(std::vector<Change>& changes, const ProgramFacts& program) {
  for (const FixRow& row : list_fixes()) {
    if (!row.has_module) continue;
    const bool is_cure = row.cures_reason && program.reason && program.reason->fix == row.id;
    const auto module = row.configure != nullptr ? row.configure(program) : unless(!is_cure);
    if (!module) continue;
    Change change = change_of(std::string(row.id) + (module->variant.empty() ? "" : "_" + module->variant));
    change.settings = module->settings;
    change.missing = module->missing;
    changes.push_back(std::move(change));
  }
  std::stable_partition(changes.begin(), changes.end(), [](const Change& change) { return change.cures; });
}

void add_of_blocks(std::vector<Change>& changes, const ProgramFacts& program) {
  const ProgramProfile& profile = program.profile;
  if (!profile.has_root || !program.runs_backward) return;
  if (!profile.blocks.empty()) {
    changes.push_back(checkpoint_blocks(profile, profile.blocks.size()));
  } else if (profile.layers >= kFewestLayers) {
    changes.push_back(checkpoint_layers(profile));
  }
}

void add_of_batches(std::vector<Change>& changes, const ProgramProfile& profile, const Target& target) {
  if (target.accumulates && target.batch >= 2) {
    Change change = change_of("accumulate_2");
    change.added = {"--accumulate", "2"};
    change.lines = {"--accumulate 2"};
    changes.push_back(change);
  }
  for (const int64_t parts : {2, 4}) {
    if (!target.batch || *target.batch / parts < 1) continue;
    const int64_t batch = *target.batch / parts;
    Change change = change_of(parts == 2 ? "half_batch" : fmt::format("batch_{}", batch));
    change.label = fmt::format("batch {}", batch);  // the number that was run
    change.batch = batch;
    change.lines = {fmt::format("batch = {}", batch)};
    changes.push_back(change);
  }
  if (target.batch || profile.batch_option.empty()) return;
  for (const int64_t parts : {2, 4}) {  // the last of two equal options counts, so it is added to the command line
    const int64_t batch = profile.batch_of_option / parts;
    if (batch < 1) continue;
    Change change = change_of(parts == 2 ? "half_batch" : fmt::format("batch_{}", batch));
    change.label = fmt::format("{} {}", profile.batch_option, batch);
    change.added = {profile.batch_option, std::to_string(batch)};
    change.lines = {change.label};
    changes.push_back(change);
  }
}

std::string to_lower(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return lower;
}

}  // namespace

Change change_of(std::string id) {
  const FixRow* const row = find_fix(id);
  if (row == nullptr) throw std::logic_error("no row of a fix: " + id);
  return {.id = std::move(id),
          .group = std::string(row->group),
          .label = std::string(row->label),
          .cost = row->cost,
          .changes_numerics = row->changes_numerics,
          .cures = row->cures_reason};
}

Change expandable_segments() {
  constexpr const char* kVariable = "PYTORCH_CUDA_ALLOC_CONF";
  const std::string value = with_setting(kVariable, "expandable_segments:True");
  Change change = change_of("expandable_segments");
  change.environment = {{kVariable, value}};
  change.lines = {fmt::format("export {}={}", kVariable, value)};
  return change;
}

ProgramProfile read_profile(const std::vector<nlohmann::json>& reported) try {
  ProgramProfile profile;
  for (const nlohmann::json& line : reported) {
    if (line.contains("keeps_gradients")) profile.keeps_gradients = true;
    if (line.contains("reads_input")) profile.reads_input = true;
    if (line.contains("output")) profile.outputs[line.value("rank", 0)].push_back(line["output"]);
    if (line.contains("loader") && line["loader"]["batch_size"].is_number_integer()) {
      profile.loader_batch = std::max(profile.loader_batch, line["loader"]["batch_size"].get<int64_t>());
    }
    if (line.contains("optimizer")) {
      const nlohmann::json& one = line["optimizer"];
      const auto is = [&](const char* name, bool value) { return one[name].is_boolean() && one[name] == value; };
      profile.has_optimizer |= one["of_torch"].get<bool>() && !is("foreach", false) && !is("fused", true);
      profile.has_adam |= one["of_torch"].get<bool>() && (one["kind"] == "Adam" || one["kind"] == "AdamW");
    }
    if (line.contains("ops")) {
      const auto block =
          std::ranges::find(profile.blocks, line["ops"]["path"].get<std::string>(), &ProgramProfile::Block::path);
      if (block != profile.blocks.end() && block->ops == 0) block->ops = line["ops"]["count"];
    }
    if (line.contains("argument")) {
      const std::string option = line["argument"]["option"];
      const int64_t value = line["argument"]["value"];
      if (value > 1 && names_batch(option)) profile.batch_option = option, profile.batch_of_option = value;
    }
    if (line.contains("logits")) profile.logits = std::max(profile.logits, line["logits"]["elements"].get<int64_t>());
    profile.has_8bit |= line.value("has_8bit", false);
    if (!line.contains("root")) continue;
    const nlohmann::json& root = line["root"];
    profile.has_root = true;
    profile.is_trained |= root["trained"].get<bool>();
    profile.has_autocast |= root["autocast"].get<bool>();
    for (const auto& [of_class, count] : root["modules"].items()) profile.modules[of_class] += count.get<int64_t>();
    profile.bytes_of_float32 += root["bytes_of_float32"].get<int64_t>();
    if (root["leaves"].get<int64_t>() <= profile.leaves)
      continue;  // of several networks the largest is cut into blocks
    profile.leaves = root["leaves"];
    if (root.contains("layers")) {
      profile.sequential = root["layers"]["path"];
      profile.layers = root["layers"]["count"];
    }
    profile.blocks.clear();
    for (const nlohmann::json& one : root["blocks"]) {
      profile.blocks.push_back({.container = one["container"], .path = one["path"], .leaves = one["leaves"]});
    }
  }
  return profile;
} catch (const nlohmann::json::exception&) {
  return {};  // nothing that can be relied on
}

bool same_shapes(const nlohmann::json& a, const nlohmann::json& b) {
  if (!a.is_object() || !b.is_object()) return a == b;
  return std::all_of(a.items().begin(), a.items().end(), [&](const auto& each) {
    return !b.contains(each.key()) || same_shapes(each.value(), b[each.key()]);
  });
}

bool take_prediction(Change& change, const Fix& fix) {
  if (fix.frees_bytes) return false;
  change.predicted_peak_bytes = fix.predicted_peak_bytes;
  change.predicted_at_least = fix.at_least;
  return true;
}

bool same_outputs(const ProgramProfile::Outputs& a, const ProgramProfile::Outputs& b) {
  return std::ranges::all_of(a, [&](const auto& of_rank) {
    const auto& [rank, outputs] = of_rank;
    const auto other = b.find(rank);
    if (other == b.end()) return true;
    const auto both = static_cast<std::ptrdiff_t>(std::min(outputs.size(), other->second.size()));
    return std::equal(outputs.begin(), outputs.begin() + both, other->second.begin(), same_shapes);
  });
}

std::vector<Change> list_changes(const Target& target, const ProgramProfile& profile, const Report& whole,
                                 const Before& before) {
  const ProgramFacts program = facts_of(target, profile, whole, before);
  std::vector<Change> changes;
  if (before.allocated_bytes <= before.available_bytes) changes.push_back(expandable_segments());
  add_of_modules(changes, program);
  add_of_blocks(changes, program);
  if (target.takes_amp) {
    Change change = change_of(autocast_of(target));
    const std::string type = change.id.substr(change.id.find('_') + 1);
    change.added = {"--amp", type};
    change.lines = {fmt::format("--amp {}", type)};
    changes.push_back(change);
  }
  add_of_batches(changes, profile, target);
  for (Change& change : changes) find_prediction(change, whole);
  std::ranges::stable_sort(changes, {}, &Change::cost);
  return changes;
}

// Names are those that training programs use: of argparse, click, fire, Hydra.
bool names_batch(std::string_view option) {
  const std::string name = to_lower(option.substr(std::min(option.find_first_not_of('-'), option.size())));
  const auto has = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (name == "b" || name == "bs" || name.ends_with(".bs")) return true;
  return has("batch") && !has("batches") && !has("num") && !has("eval") && !has("val_") && !has("test") &&
         !has("accum");
}

}  // namespace oomdiag
