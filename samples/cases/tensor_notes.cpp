// Cases about single tensors: copies, temporaries, duplicates, precision.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "profiler/explain/words/bytes_text.h"
#include "profiler/explain/words/shape.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "samples/cases/bytes.h"
#include "samples/cases/case_run.h"
#include "samples/cases/note.h"
#include "samples/cases/notes.h"
#include "samples/cases/scopes.h"

namespace oomdiag {
namespace {

/// The dimensions in ascending order: a copy may be saved transposed.
std::vector<int64_t> sorted(std::vector<int64_t> shape) {
  std::sort(shape.begin(), shape.end());
  return shape;
}

/// Bytes of 16-bit tensors that backward keeps and that have the shape of a parameter: what autocast made of weights.
int64_t weight_copies_of(const CaseRun& run) {
  std::set<std::vector<int64_t>> parameters;
  for (const ReportOwner& owner : gpu_of(run).allocations) {
    if (owner.category == Category::parameter) parameters.insert(sorted(parse_shape(owner.shape)));
  }
  int64_t bytes = 0;
  for (const ReportSavedTensor& saved : gpu_of(run).saved_tensors) {
    const bool half = saved.dtype == "float16" || saved.dtype == "bfloat16";
    if (half && parameters.contains(sorted(saved.shape))) bytes += saved.bytes;
  }
  return bytes;
}

Column column_of(Category category, const char* name) {
  return {name, [category](const CaseRun& run) { return category_of(run, category); }};
}

}  // namespace

void note_mixed_precision(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of},
                      column_of(Category::activation, "activations"),
                      column_of(Category::parameter, "parameters"),
                      column_of(Category::activation_gradient, "in flight")});
  const CaseRun* full = find_run(runs, "float32");
  if (const CaseRun* autocast = find_run(runs, "autocast"); autocast != nullptr && full != nullptr) {
    const int64_t copies = weight_copies_of(*autocast);
    note.figure("autocast.weight_copies_bytes", copies);
    note.say(
        fmt::format("Autocast saves {} of activations. It adds {} of float16 copies of the weights, which live until "
                    "backward is through; the weights themselves stay float32.",
                    with_unit(category_of(*full, Category::activation) - category_of(*autocast, Category::activation)),
                    with_unit(copies)));
  }
  if (const CaseRun* half = find_run(runs, "half"); half != nullptr && !raised_of(*half).empty()) {
    note.say(
        fmt::format("The float16 model peaks at {}, and the first step never happens: the GradScaler raises \"{}\".",
                    with_unit(peak_of(*half)), raised_of(*half)));
  }
}

void note_copy(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of}});
  const CaseRun* copy = find_run(runs, "copy");
  const CaseRun* in_place = find_run(runs, "in_place");
  if (copy == nullptr || in_place == nullptr) return;
  const int64_t x = last_call(*copy, "x").kept_bytes;
  const int64_t y = last_call(*copy, "y").peak_bytes - last_call(*copy, "y").begin_bytes;
  const int64_t added = last_call(*in_place, "y").peak_bytes - last_call(*in_place, "y").begin_bytes;
  note.figure("x_bytes", x);
  note.figure("copy.added_bytes", y);
  note.figure("in_place.added_bytes", added);
  note.say(fmt::format(
      "x takes {}. x + 1 takes {} more: the peak is {:.2f} times the tensor, because the result and x are "
      "both alive.",
      with_unit(x), with_unit(y), static_cast<double>(peak_of(*copy)) / static_cast<double>(std::max<int64_t>(x, 1))));
  note.say(fmt::format("x.add_(1) takes {} more{}.", with_unit(added),
                       fact_of(*in_place, "same_storage") == 1 ? ", and its result lies where x lies" : ""));
}

void note_small_model(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of}, {"data", [](const CaseRun& run) {
                                            return last_call(run, "data_set").kept_bytes +
                                                   last_call(run, "labels").kept_bytes;
                                          }}});
  const CaseRun& first = runs.front();
  const int64_t total = gpu_of(first).device.total_bytes;
  if (first.report.outcome == "ok") {
    note.say(
        fmt::format("Folklore: a batch of {} is not too large for this layer. It needs {} of this GPU's {}, of which "
                    "{} are the workspace of cuBLAS.",
                    gpu_of(first).batch ? gpu_of(first).batch->batch : 0, with_unit(peak_of(first)), with_unit(total),
                    with_unit(category_of(first, Category::workspace))));
  }
  if (const CaseRun* all = find_run(runs, "whole_data_set")) {
    const int64_t data = last_call(*all, "data_set").kept_bytes + last_call(*all, "labels").kept_bytes;
    note.figure("data_set_bytes", data);
    note.say(fmt::format("All of the data on the GPU takes {}.", with_unit(data)));
  }
}

void note_temporaries(Note& note, Runs runs) {
  const CaseRun* named = find_run(runs, "named");
  const CaseRun* rebound = find_run(runs, "rebound");
  if (named == nullptr || rebound == nullptr) return;
  std::vector<std::pair<std::string, std::vector<int64_t>>> rows;
  int64_t by_name = 0;
  for (const char* layer : {"fc1", "relu1", "fc2", "relu2", "fc3"}) {
    const int64_t with = last_call(*named, layer).kept_bytes;
    const int64_t without = last_call(*rebound, layer).kept_bytes;
    rows.emplace_back(layer, std::vector{with, without});
    note.figure(fmt::format("named.{}.kept_bytes", layer), with);
    note.figure(fmt::format("rebound.{}.kept_bytes", layer), without);
    by_name += with - without;
  }
  note.table("alive at the end of forward", {"named", "rebound"}, rows);
  note.figure("kept_by_name_only_bytes", by_name);
  note.say(
      fmt::format("What one name that is used again does not free, autograd keeps (or the caller gets). The names "
                  "alone keep {}, the inputs of the ReLUs: a ReLU needs its output only.",
                  with_unit(by_name)));
  note.say(fmt::format("Once forward has returned its names are gone: backward begins with {} against {}.",
                       with_unit(last_call(*named, "backward").begin_bytes),
                       with_unit(last_call(*rebound, "backward").begin_bytes)));
}

void note_needless_gradients(Note& note, Runs runs) {
  const auto peak = [](const CaseRun& run) { return last_call(run, "generate").peak_bytes; };
  const auto after = [](const CaseRun& run) { return last_call(run, "generate").end_bytes; };
  note.compare(runs, {{"peak", peak_of}, {"in forward", peak}, {"after it", after}});
  const CaseRun* with = find_run(runs, "with_gradients");
  if (with == nullptr) return;
  for (const char* variant : {"no_grad", "detach"}) {
    const CaseRun* without = find_run(runs, variant);
    if (without == nullptr) continue;
    note.figure(fmt::format("{}.saves_in_forward_bytes", variant), peak(*with) - peak(*without));
    note.figure(fmt::format("{}.saves_after_forward_bytes", variant), after(*with) - after(*without));
    note.say(fmt::format("{} saves {} inside of forward and {} after it.", variant,
                         with_unit(peak(*with) - peak(*without)), with_unit(after(*with) - after(*without))));
  }
  const auto largest_of = [](const CaseRun* run) {
    return run == nullptr || run->scopes.transients.empty() ? Transient{} : run->scopes.transients.front();
  };
  const Transient largest = largest_of(with);
  if (largest.most_bytes > 0 && largest == largest_of(find_run(runs, "no_grad"))) {
    note.say(fmt::format("The largest block that its op alone uses is {}, of {}: the same with gradients and without.",
                         with_unit(largest.most_bytes), largest.op));
  }
  note.say(fmt::format(
      "No backward ever runs, so the optimizer has nothing to do: {} of gradients, {} of optimizer state.",
      with_unit(category_of(*with, Category::gradient)), with_unit(category_of(*with, Category::optimizer_state))));
}

void note_duplicates(Note& note, Runs runs) {
  note.compare(runs, {{"peak", peak_of}});
  std::map<int64_t, std::vector<const ReportOwner*>> by_bytes;
  for (const ReportOwner& owner : gpu_of(runs.front()).allocations) {
    if (owner.bytes >= 1 << 20) by_bytes[owner.bytes].push_back(&owner);
  }
  for (const auto& [bytes, owners] : by_bytes) {
    if (owners.size() < 2) continue;
    std::vector<std::string> places;
    for (const ReportOwner* owner : owners) places.push_back(owner->name);
    std::sort(places.begin(), places.end());
    std::string text;
    for (const std::string& place : places) text += (text.empty() ? "" : " and ") + place;
    note.figure("duplicates", static_cast<int64_t>(owners.size()));
    note.figure("duplicate_bytes", bytes);
    note.say(fmt::format("{} blocks of {} each, made by {}: copies of one host tensor, one of them is enough.",
                         owners.size(), with_unit(bytes), text));
  }
  const CaseRun* twice = find_run(runs, "twice");
  const CaseRun* once = find_run(runs, "once");
  if (twice == nullptr || once == nullptr) return;
  note.say(fmt::format("Moved once, the peak is {} lower.", with_unit(peak_of(*twice) - peak_of(*once))));
}

void note_shrunk_weights(Note& note, Runs runs) {
  const auto weights = [](const CaseRun& run) {
    const auto found = run.scopes.most_alive.find("weights");
    return found == run.scopes.most_alive.end() ? 0 : found->second;
  };
  const auto activations = [](const CaseRun& run) {
    int64_t bytes = 0;
    std::map<std::string, int64_t> last;
    for (const ScopeCall& call : run.scopes.calls) {
      if (call.name.starts_with("frozen")) last[call.name] = call.kept_bytes;
    }
    for (const auto& [name, kept] : last) bytes += kept;
    return bytes;
  };
  note.compare(runs, {{"weights", weights}, {"activations", activations}, {"peak", peak_of}});
  const CaseRun* full = find_run(runs, "float32");
  if (full == nullptr) return;
  for (const char* variant : {"half_zeros", "int8"}) {
    const CaseRun* shrunk = find_run(runs, variant);
    if (shrunk == nullptr) continue;
    const int64_t saved = weights(*full) - weights(*shrunk);
    note.figure(fmt::format("{}.saves_bytes", variant), saved);
    note.say(fmt::format("{} saves {} of {} of weights, and {} of {} of activations.", variant, with_unit(saved),
                         with_unit(weights(*full)), with_unit(activations(*full) - activations(*shrunk)),
                         with_unit(activations(*full))));
  }
}

}  // namespace oomdiag
