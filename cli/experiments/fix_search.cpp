#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>

#include "cli/experiments/complete.h"
#include "cli/experiments/fix.h"
#include "cli/process/workers.h"
#include "cli/terminal/sizes.h"
#include "profiler/error.h"
#include "profiler/explain/framework_lines.h"
#include "profiler/report/whole_run.h"

// The program as it is, once on the card and once with room; then each change alone; then, where none is enough, changes
// together. A change that is expected to fit is run on the card: if it passes there, that is the proof and the figure.
// One that is not is run with room, for the figure; if that turns out to fit, it is proved on the card after all.

namespace oomdiag {
namespace {

constexpr std::size_t kMaxTogether = 8;

class Search {
 public:
  Search(const Target& target, Experiments& experiments, const std::function<void(std::size_t, std::size_t)>& tell)
      : target_(target), experiments_(experiments), tell_(tell) {}

  Fixed run();

 private:
  enum class Where { card, with_room };

  ExperimentRequest request(const std::vector<Change>& changes, Where where) const;
  std::vector<Experiment> make(const std::vector<ExperimentRequest>& requests);
  void profile_the_complete_run();
  void measure(const std::vector<std::vector<Change>>& candidates);
  void run_and_take(const std::vector<std::size_t>& which, const std::vector<Where>& places);
  void search();
  void take(MeasuredFix& fix, const Experiment& experiment, bool on_card) const;
  std::optional<std::vector<std::string>> lines_of_framework(const MeasuredFix& fix) const;
  std::string why_unproved(const MeasuredFix& fix, const Experiment& experiment) const;
  void use_fewer_checkpoints();
  bool any_fits() const;

  const Target& target_;
  Experiments& experiments_;
  const std::function<void(std::size_t, std::size_t)>& tell_;
  Before before_;
  ProgramProfile profile_;
  Report whole_;
  std::vector<MeasuredFix> fixes_;
};

std::string replace_batch(std::string word, int64_t batch) {
  const std::string name = "{batch}";
  for (size_t at = 0; (at = word.find(name, at)) != word.npos;) word.replace(at, name.size(), std::to_string(batch));
  return word;
}

ExperimentRequest Search::request(const std::vector<Change>& changes, Where where) const {
  ExperimentRequest request{.program = target_.program,
                            .device = {.device = target_.device},
                            .environment = target_.environment,
                            .rank = target_.rank};
  request.is_metered = true;
  request.batch = target_.batch;
  request.fixes = nlohmann::json::array();
  for (const Change& change : changes) {
    request.environment.insert(request.environment.end(), change.environment.begin(), change.environment.end());
    request.program.insert(request.program.end(), change.added.begin(), change.added.end());
    if (change.batch) request.batch = change.batch;
    if (!change.settings.is_null()) {
      const std::string module = change.id.starts_with("accumulate") ? "accumulate" : change.id;
      request.fixes.push_back({module, change.settings});
    }
  }
  request.fixes.push_back({"look", nlohmann::json::object()});
  if (request.batch) {
    for (std::string& word : request.program) word = replace_batch(word, *request.batch);
  }
  if (where == Where::card && target_.proves_on_real) request.device = {};
  if (where == Where::with_room) {
    request.judged_bytes = target_.device.bytes_of_device();
    request.device = {.device = with_room(target_.device)};
    request.steady.most = kMaxSteps;
  }
  return request;
}

std::vector<Experiment> Search::make(const std::vector<ExperimentRequest>& requests) {
  return experiments_.run(requests, [&](std::size_t over) { tell_(over, experiments_.count() + requests.size()); });
}

bool grows(const Report& report) {
  return std::any_of(report.devices.begin(), report.devices.end(),
                     [](const ReportOfDevice& device) { return !device.growth.empty(); });
}

/// What only a change to the code cures: the reason with its lines, else what keeps from step to step.
std::vector<std::string> list_code_changes(const ReportOfDevice& device) {
  if (device.reason) {
    std::vector<std::string> changes{device.reason->text};
    changes.insert(changes.end(), device.reason->how.begin(), device.reason->how.end());
    return changes;
  }
  std::vector<std::string> changes;
  for (const ReportGrowth& growth : device.growth) {
    const std::string place = !growth.source.empty()   ? growth.source
                              : !growth.module.empty() ? growth.module
                                                       : growth.op;
    changes.push_back(
        fmt::format("{} keeps {} GiB from step to step: keep a number in place of a tensor (.item(), .detach())", place,
                    to_gib(growth.bytes_per_step)));
  }
  return changes;
}

// A program that grows from step to step has no steady need: it is run as far as it came before, and a little further.
void Search::profile_the_complete_run() {
  std::vector<Experiment> experiments = make({request({}, Where::card), request({}, Where::with_room)});
  const Experiment &first = experiments[0], &whole = experiments[1];
  if (!first.passed() && !first.ran_out()) {
    throw Error(ErrorKind::environment, fmt::format("the program fails, and not for want of memory: {}", first.why),
                "all that it says is shown by: oomdiag run -- PROGRAM");
  }
  before_.outcome = first.outcome;
  before_.place = first.place;
  const bool was_cut_short = whole.stopped_at_step > 0 && whole.passed() && grows(*whole.report);
  before_.is_whole = whole.passed() && !was_cut_short && !is_share_of_card(whole.allocated_bytes, whole.total_bytes);
  const Experiment& seen = before_.is_whole ? whole : first;
  before_.allocated_bytes = seen.allocated_bytes;
  before_.reserved_bytes = seen.reserved_bytes;
  before_.room_bytes = first.total_bytes - first.outside_bytes;
  before_.step = cost_of_step(*seen.report);
  before_.required_bytes = seen.allocated_bytes + first.outside_bytes;
  whole_ = *seen.report;
  profile_ = read_profile(whole.told);
  weigh_blocks(profile_, whole_);
  if (!first.ran_out()) return;
  const ReportOfDevice& device = first.report->devices[first.report->main_device];
  if (device.cause) before_.cause = name_of(device.cause->kind);
  before_.grows = !device.growth.empty();
  before_.reason = device.reason;
  if (device.failure) {
    before_.stack = device.failure->stack;
    before_.failing_step = device.failure->step;
  }
  before_.code_changes = list_code_changes(device);
}

std::string Search::why_unproved(const MeasuredFix& fix, const Experiment& experiment) const {
  for (const Change& change : fix.changes) {
    const std::string module = change.id.starts_with("accumulate") ? "accumulate" : change.id;
    if (change.settings.is_null()) continue;
    bool applied = false;
    for (const nlohmann::json& line : experiment.told) {
      if (!line.contains("id") || line["id"] != module) continue;
      if (line.contains("refused")) return line["refused"].get<std::string>();
      applied = true;
    }
    if (!applied) return fmt::format("{} found nothing to change", change.label);
  }
  if (!experiment.passed() && !experiment.ran_out()) return experiment.why;
  const bool same_batch =
      std::none_of(fix.changes.begin(), fix.changes.end(), [](const Change& change) { return change.changes_batch; });
  const std::vector<nlohmann::json> outputs = read_profile(experiment.told).outputs;
  const std::size_t both = std::min(outputs.size(), profile_.outputs.size());
  if (same_batch && !std::equal(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(both),
                                profile_.outputs.begin(), same_shapes)) {
    return "the outputs of the model have other shapes with it";
  }
  return {};
}

/// What a user of the framework writes, where it has an argument for the one change.
std::optional<std::vector<std::string>> Search::lines_of_framework(const MeasuredFix& fix) const {
  if (fix.changes.size() != 1) return std::nullopt;
  const std::string_view framework = find_framework(fmt::format("{}", fmt::join(before_.stack, "\n")));
  const Change& change = fix.changes.front();
  return lines_in_framework(framework, change.id, change.batch);
}

void Search::take(MeasuredFix& fix, const Experiment& experiment, bool on_card) const {
  fix.unproved = why_unproved(fix, experiment);
  if (!fix.unproved.empty() || !experiment.passed()) return;
  fix.measured_peak_bytes = experiment.allocated_bytes;
  fix.measured_reserved_bytes = experiment.reserved_bytes;
  fix.step = cost_of_step(*experiment.report);
  fix.fits = on_card;
  fix.still_grows = before_.grows && grows(*experiment.report);
  fix.lines.clear();
  for (const Change& change : fix.changes) {
    fix.lines.insert(fix.lines.end(), change.lines.begin(), change.lines.end());
  }
  if (const auto lines = lines_of_framework(fix)) {
    fix.lines = *lines;
    return;
  }
  for (const nlohmann::json& line : experiment.told) {
    if (!line.contains("lines")) continue;
    const auto lines = line["lines"].get<std::vector<std::string>>();
    const bool known = std::search(fix.lines.begin(), fix.lines.end(), lines.begin(), lines.end()) != fix.lines.end();
    if (!known) fix.lines.insert(fix.lines.end(), lines.begin(), lines.end());
  }
}

/// Runs these of fixes_, each at its place.
void Search::run_and_take(const std::vector<std::size_t>& which, const std::vector<Where>& places) {
  std::vector<ExperimentRequest> requests;
  for (std::size_t i = 0; i < which.size(); ++i) requests.push_back(request(fixes_[which[i]].changes, places[i]));
  const auto take_one = [&](std::size_t i, const Experiment& experiment) {
    take(fixes_[which[i]], experiment, places[i] == Where::card);
  };
  try {
    const std::vector<Experiment> experiments = make(requests);
    for (std::size_t i = 0; i < which.size(); ++i) take_one(i, experiments[i]);
  } catch (const Interrupted&) {
    for (std::size_t i = 0; i < which.size(); ++i) {
      MeasuredFix& fix = fixes_[which[i]];
      if (experiments_.finished()[i]) {
        take_one(i, *experiments_.finished()[i]);
      } else if (fix.measured_peak_bytes) {
        fix.unproved = fmt::format("{} GiB with more memory; it was not run on the device itself",
                                   to_gib(*fix.measured_peak_bytes));
      }
    }
    throw;
  }
}

/// Runs each where it is expected to pass first, and once more where that was wrong.
void Search::measure(const std::vector<std::vector<Change>>& candidates) {
  std::vector<std::size_t> which, again;
  std::vector<Where> places, places_again;
  for (const std::vector<Change>& changes : candidates) {
    const auto& predicted = changes.front().predicted_peak_bytes;
    const bool should_fit = changes.size() > 1 || changes.front().cures ||
                            changes.front().id == "expandable_segments" ||
                            (predicted && *predicted < before_.room_bytes);
    places.push_back(should_fit ? Where::card : Where::with_room);
    which.push_back(fixes_.size());
    fixes_.push_back({.changes = changes, .unproved = "it was not run"});
  }
  run_and_take(which, places);
  for (std::size_t i = 0; i < which.size(); ++i) {
    const MeasuredFix& fix = fixes_[which[i]];
    const bool on_card = places[i] == Where::card;
    const bool wants_figure = on_card && fix.unproved.empty() && !fix.measured_peak_bytes;
    const bool wants_proof = !on_card && fix.measured_peak_bytes.value_or(kRoomBytes) <= before_.room_bytes;
    if (!wants_figure && !wants_proof) continue;
    again.push_back(which[i]);
    places_again.push_back(on_card ? Where::with_room : Where::card);
  }
  run_and_take(again, places_again);
}

// Checkpoints of all blocks were measured; most programs need fewer. The fewest that should do, by what was reserved, are tried
// along with one less; if both fail, two between them and all.
void Search::use_fewer_checkpoints() {
  const auto all = std::find_if(fixes_.begin(), fixes_.end(), [](const MeasuredFix& one) {
    return one.changes.size() == 1 && one.changes.front().id == "checkpoint";
  });
  if (all == fixes_.end() || !all->helps() || profile_.blocks.empty()) return;
  const int64_t reserved = *all->measured_reserved_bytes;
  std::size_t enough = profile_.blocks.size(), too_few = 0;
  std::size_t guess = fewest_checkpoints(profile_, before_.reserved_bytes, reserved, before_.room_bytes);
  std::optional<MeasuredFix> best;
  for (int rounds = 0; rounds < 2 && too_few + 1 < enough; ++rounds) {
    guess = std::clamp(guess, too_few + 1, enough - 1);
    std::vector<std::size_t> counts = {guess};
    if (guess - 1 > too_few) counts.insert(counts.begin(), guess - 1);
    std::vector<ExperimentRequest> requests;
    for (const std::size_t count : counts)
      requests.push_back(request({checkpoint_blocks(profile_, count)}, Where::card));
    const std::vector<Experiment> experiments = make(requests);
    for (std::size_t i = 0; i < counts.size() && counts[i] < enough; ++i) {
      MeasuredFix fix{.changes = {checkpoint_blocks(profile_, counts[i])}};
      take(fix, experiments[i], /*on_card=*/true);
      if (fix.fits) {
        enough = counts[i];
        best = std::move(fix);
      } else {
        too_few = counts[i];
      }
    }
    guess = best ? enough - 1 : (too_few + enough + 1) / 2;
  }
  if (best) fixes_.push_back(std::move(*best));
}

bool Search::any_fits() const {
  return std::any_of(fixes_.begin(), fixes_.end(), [](const MeasuredFix& one) { return one.helps(); });
}

void Search::search() {
  std::vector<std::vector<Change>> singles;
  std::vector<MeasuredFix> missing;
  for (const Change& change : list_changes(target_, profile_, whole_, before_)) {
    if (change.missing.empty()) {
      singles.push_back({change});
    } else {
      missing.push_back({.changes = {change}, .unproved = change.missing});
    }
  }
  measure(singles);
  fixes_.insert(fixes_.end(), missing.begin(), missing.end());
  use_fewer_checkpoints();
  if (any_fits() || before_.grows) return;
  auto together = combine(fixes_, before_);
  if (together.size() > kMaxTogether) together.resize(kMaxTogether);
  for (std::size_t i = 0; i < together.size() && !any_fits(); i += 2) {
    const auto last = std::min(together.size(), i + 2);
    measure({together.begin() + static_cast<std::ptrdiff_t>(i), together.begin() + static_cast<std::ptrdiff_t>(last)});
  }
}

Fixed Search::run() {
  const auto begin = std::chrono::steady_clock::now();
  int interrupted_by = 0;
  profile_the_complete_run();
  try {
    if (before_.outcome != "ok") search();
  } catch (const Interrupted& interrupted) {
    interrupted_by = interrupted.signal;
  }
  const auto slowdown = [this](const MeasuredFix& fix) { return fix.slowdown(before_.step, target_.batch); };
  std::stable_sort(fixes_.begin(), fixes_.end(), [&](const MeasuredFix& a, const MeasuredFix& b) {
    if (a.helps() != b.helps()) return a.helps();
    if (a.helps() && slowdown(a) && slowdown(b)) return *slowdown(a) < *slowdown(b);
    if (a.helps())
      return slowdown(a).has_value() != slowdown(b).has_value() ? slowdown(a).has_value() : a.cost() < b.cost();
    return a.measured_peak_bytes.value_or(kRoomBytes) < b.measured_peak_bytes.value_or(kRoomBytes);
  });
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  return {.before = before_,
          .fixes = fixes_,
          .runs = experiments_.count(),
          .seconds = time.count(),
          .interrupted_by = interrupted_by};
}

}  // namespace

Fixed search_fix(const Target& target, Experiments& experiments,
                 const std::function<void(std::size_t, std::size_t)>& tell) {
  return Search(target, experiments, tell).run();
}

}  // namespace oomdiag
