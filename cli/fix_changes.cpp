#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "cli/fix.h"

// What there is to try. Which change makes sense is read from a look at the whole run; how much it should save, where the
// report knows it, comes from there.

namespace oomdiag {
namespace {

constexpr int kNoWork = 0, kLessPrecise = 1, kForwardAgain = 2, kSmallerBatches = 3;

std::optional<int64_t> predicted(const Report& whole, std::string_view id) {
  for (const ReportOfDevice& device : whole.devices) {
    for (const ReportRemedy& remedy : device.remedies) {
      if (remedy.id == id) return remedy.predicted_peak_bytes;
    }
  }
  return std::nullopt;
}

Change injected(std::string id, std::string group, std::string label, int cost) {
  return {.id = std::move(id),
          .group = std::move(group),
          .label = std::move(label),
          .cost = cost,
          .settings = nlohmann::json::object()};
}

std::string with_setting(const char* variable, const std::string& setting) {
  const char* const before = std::getenv(variable);
  return before == nullptr || *before == '\0' ? setting : fmt::format("{},{}", before, setting);
}

bool has_bfloat16(const DeviceChoice& device) {
  return !device.cards.empty() && device.cards.front().compute_capability >= "8";
}

bool runs_backward(const Report& whole) {
  for (const ReportOfDevice& device : whole.devices) {
    for (const ReportPhase& phase : device.phases) {
      if (phase.phase == "backward") return true;
    }
  }
  return false;
}

void add_of_modules(std::vector<Change>& changes, const Look& look, const Report& whole, const Patient& patient) {
  const bool backward = runs_backward(whole);
  if (!backward) changes.push_back(injected("no_grad", "grad", "torch.no_grad()", kNoWork));
  if (look.relus > 0 && backward) changes.push_back(injected("relu_in_place", "relu", "ReLU in place", kNoWork));
  if (look.bytes_of_float32 > 0 && !look.has_autocast) {
    const bool bf16 = has_bfloat16(patient.device);
    changes.push_back(bf16 ? injected("autocast_bf16", "autocast", "bf16 autocast", kLessPrecise)
                           : injected("autocast_fp16", "autocast", "fp16 autocast, loss scaled", kLessPrecise));
    changes.back().changes_numerics = true;
  }
  if (!look.containers.empty() && backward) {
    int64_t blocks = 0;
    for (const Look::Container& container : look.containers) blocks += container.count;
    changes.push_back(checkpoint_parts(look, blocks));
  }
  if (look.convolutions > 0) {
    changes.push_back(injected("channels_last", "layout", "channels_last", kNoWork));
  }
}

void add_of_batches(std::vector<Change>& changes, const Look& look, const Patient& patient) {
  if (look.loader_batch > 1 && look.loader_batch % 2 == 0 && look.has_optimizer) {
    Change change = injected("accumulate_2", "batch", "2 micro-batches, accumulated", kSmallerBatches);
    change.settings = {{"batches", 2}};
    change.changes_batch = true;
    changes.push_back(change);
  }
  for (const int64_t parts : {2, 4}) {
    if (!patient.batch || *patient.batch / parts < 1) continue;
    const int64_t batch = *patient.batch / parts;
    changes.push_back({.id = parts == 2 ? "half_batch" : fmt::format("batch_{}", batch),
                       .group = "batch",
                       .label = fmt::format("batch {}", batch),
                       .cost = kSmallerBatches,
                       .changes_numerics = true,
                       .changes_batch = true,
                       .batch = batch,
                       .lines = {fmt::format("batch = {}", batch)}});
  }
}

}  // namespace

Change expandable_segments() {
  constexpr const char* kVariable = "PYTORCH_CUDA_ALLOC_CONF";
  const std::string value = with_setting(kVariable, "expandable_segments:True");
  return {.id = "expandable_segments",
          .group = "segments",
          .label = "expandable_segments:True",
          .cost = kNoWork,
          .environment = {{kVariable, value}},
          .lines = {fmt::format("export {}={}", kVariable, value)}};
}

Look read_look(const std::vector<nlohmann::json>& told) try {
  Look look;
  for (const nlohmann::json& line : told) {
    if (line.contains("keeps_gradients")) look.keeps_gradients = true;
    if (line.contains("output")) look.outputs.push_back(line["output"]);
    if (line.contains("loader") && line["loader"]["batch_size"].is_number_integer()) {
      look.loader_batch = std::max(look.loader_batch, line["loader"]["batch_size"].get<int64_t>());
    }
    if (line.contains("optimizer")) {
      const nlohmann::json& one = line["optimizer"];
      const auto is = [&](const char* name, bool value) { return one[name].is_boolean() && one[name] == value; };
      look.has_optimizer |= one["of_torch"].get<bool>() && !is("foreach", false) && !is("fused", true);
    }
    if (!line.contains("root")) continue;
    const nlohmann::json& root = line["root"];
    look.has_root = true;
    look.is_trained |= root["trained"].get<bool>();
    look.has_autocast |= root["autocast"].get<bool>();
    look.relus += root["relus"].get<int64_t>();
    look.convolutions += root["convolutions"].get<int64_t>();
    look.bytes_of_float32 += root["bytes_of_float32"].get<int64_t>();
    if (root["leaves"].get<int64_t>() <= look.leaves) continue;  // of several networks the largest is cut into blocks
    look.leaves = root["leaves"];
    look.containers.clear();
    for (const nlohmann::json& one : root["containers"]) {
      look.containers.push_back({.path = one["path"], .count = one["count"], .leaves = one["leaves"]});
    }
  }
  return look;
} catch (const nlohmann::json::exception&) {
  return {};  // nothing that can be relied on
}

Change checkpoint_parts(const Look& look, int64_t blocks) {
  int64_t all = 0, leaves = 0;
  for (const Look::Container& container : look.containers) all += container.count;
  Change change = injected("checkpoint", "checkpoint", "", kForwardAgain);
  change.settings = {{"parts", nlohmann::json::array()}};
  int64_t left = blocks;
  std::string names;
  for (const Look::Container& container : look.containers) {
    const int64_t count = std::min(left, container.count);
    if (count == 0) break;
    change.settings["parts"].push_back({container.path, count});
    leaves += container.leaves * count / container.count;
    left -= count;
    names += (names.empty() ? "" : ", ") + container.path + ".*";
  }
  if (look.containers.size() > 2)
    names = fmt::format("{}.* ... {}.*", look.containers.front().path, look.containers.back().path);
  change.label = blocks == all ? "checkpoint " + names : fmt::format("checkpoint {} of {} blocks", blocks, all);
  if (look.leaves > 0) change.extra_forward = static_cast<double>(leaves) / static_cast<double>(look.leaves);
  return change;
}

std::optional<Change> checkpoint_fewer(const Change& all, const Look& look, int64_t before, int64_t peak,
                                       int64_t room) {
  int64_t blocks = 0;
  for (const auto& part : all.settings.at("parts")) blocks += part[1].get<int64_t>();
  if (peak >= before || before <= room || blocks < 2) return std::nullopt;
  const double share = static_cast<double>(before - room) / static_cast<double>(before - peak);
  const auto fewer = static_cast<int64_t>(share * static_cast<double>(blocks)) + 1;
  if (fewer >= blocks) return std::nullopt;
  return checkpoint_parts(look, fewer);
}

std::vector<Change> list_changes(const Patient& patient, const Look& look, const Report& whole, const Before& before) {
  std::vector<Change> changes;
  if (before.allocated_bytes <= before.room_bytes) changes.push_back(expandable_segments());
  if (look.keeps_gradients) {
    changes.push_back(injected("set_to_none", "zero_grad", "zero_grad(set_to_none=True)", kNoWork));
  }
  if (look.has_optimizer) {
    changes.push_back(injected("foreach_off", "optimizer", "optimizer with foreach=False", kNoWork));
    changes.push_back(injected("fused_optimizer", "optimizer", "fused optimizer", kNoWork));
  }
  if (look.has_root) add_of_modules(changes, look, whole, patient);
  if (patient.takes_amp) {
    const char* const type = has_bfloat16(patient.device) ? "bf16" : "fp16";
    changes.push_back({.id = fmt::format("autocast_{}", type),
                       .group = "autocast",
                       .label = fmt::format("{} autocast", type),
                       .cost = kLessPrecise,
                       .changes_numerics = true,
                       .added = {"--amp", type},
                       .lines = {fmt::format("--amp {}", type)}});
  }
  add_of_batches(changes, look, patient);
  for (Change& change : changes) {
    const std::string id = change.id == "autocast_fp16" ? "autocast_bf16" : change.id;  // of the same size
    change.predicted_peak_bytes = predicted(whole, id);
  }
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.cost < b.cost; });
  return changes;
}

}  // namespace oomdiag
