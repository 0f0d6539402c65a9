#include <fmt/format.h>

#include <algorithm>

#include "cli/experiments/fix.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "profiler/report/table.h"

namespace oomdiag {
namespace {

constexpr std::size_t kLabelColumns = 42;
constexpr std::size_t kMostWritten = 3;  ///< remedies whose lines are printed

std::string figure(const std::optional<int64_t>& bytes) { return bytes ? to_gib(*bytes) : "-"; }

std::string row(const Remedied& remedy) {
  const std::string extra =
      remedy.extra_forward() > 0 ? fmt::format("+{:.0f} %", 100 * remedy.extra_forward()) : std::string("none");
  return fmt::format(
      "    {} {:>9} {:>9} {:>9}   {:<5}  {:>7}   {}\n", padded(printable(remedy.label(), kLabelColumns), kLabelColumns),
      figure(remedy.predicted_peak_bytes()), figure(remedy.measured_peak_bytes), figure(remedy.measured_reserved_bytes),
      remedy.fits ? (remedy.still_grows ? "grows" : "yes") : "no", extra,
      remedy.changes_numerics() ? "changed" : "same");
}

std::string headline(const Fixed& fixed, const Patient& patient) {
  const std::string card = describe(patient.device);
  const Before& before = fixed.before;
  if (before.outcome == "ok") {
    return fmt::format("oomdiag: it fits on {}: there is nothing to fix\n", card);
  }
  if (before.grows) return fmt::format("oomdiag: on {} it grows from step to step: change the code\n", card);
  const auto fitting =
      std::count_if(fixed.remedies.begin(), fixed.remedies.end(), [](const Remedied& one) { return one.helps(); });
  const std::string found = fitting == 0
                                ? "nothing that was tried makes it fit"
                                : fmt::format("{} {} it fit", fitting, fitting == 1 ? "remedy makes" : "remedies make");
  return fmt::format("oomdiag: {} on {}\n", found, card);
}

std::string table(const Fixed& fixed) {
  std::string text =
      fmt::format("\n  {} {:>9} {:>9} {:>9}   {:<5}  {:>7}   {}\n", padded("what helps, GiB", kLabelColumns + 2),
                  "predicted", "measured", "reserved", "fits", "forward", "numerics");
  bool any = false;
  for (const Remedied& remedy : fixed.remedies) {
    if (!remedy.unproved.empty()) continue;
    text += row(remedy);
    any = true;
  }
  return any ? text : "";
}

std::string unproved(const Fixed& fixed) {
  std::string text;
  for (const Remedied& remedy : fixed.remedies) {
    if (remedy.unproved.empty()) continue;
    text += fmt::format("    {}: {}\n", printable(remedy.label(), kLabelColumns), printable(remedy.unproved, 120));
  }
  return text.empty() ? text : "\n  not proved\n" + text;
}

std::string lines_to_write(const Fixed& fixed) {
  std::string text;
  std::size_t written = 0;
  for (const Remedied& remedy : fixed.remedies) {
    if (!remedy.helps() || remedy.lines.empty() || written == kMostWritten) continue;
    ++written;
    text += fmt::format("\n  {}, as you would write it\n", remedy.label());
    for (const std::string& line : remedy.lines) text += "    " + printable(line, 200) + "\n";
  }
  return text;
}

}  // namespace

std::string to_text(const Fixed& fixed, const Patient& patient, const std::string& command) {
  const Before& before = fixed.before;
  std::string text = headline(fixed, patient) + "\n";
  const std::string whole = before.is_whole ? "measured: a whole run" : "at least: no whole run could be seen";
  text += fmt::format("  needs    {} GiB of card ({}): {} GiB allocated, {} GiB reserved at most\n",
                      to_gib(before.needs_bytes), whole, to_gib(before.allocated_bytes), to_gib(before.reserved_bytes));
  if (before.outcome != "ok") {
    text +=
        fmt::format("  runs out in {}; PyTorch may take {} GiB of the card\n", before.place, to_gib(before.room_bytes));
  }
  for (const std::string& change : before.code_changes) text += fmt::format("  change   {}\n", printable(change, 200));
  text += table(fixed) + unproved(fixed) + lines_to_write(fixed);
  text +=
      fmt::format("\n  {} runs, {:.0f} s; all figures but the predicted ones are measured{}\n", fixed.runs,
                  fixed.seconds, patient.proves_on_real ? ": what fits on the GPU, the rest on its virtual twin" : "");
  if (!command.empty() && before.outcome != "ok") text += fmt::format("\n  program: {}\n", printable(command, 200));
  return text;
}

std::string to_json(const Fixed& fixed, const Patient& patient, const std::string& command) {
  using Json = nlohmann::ordered_json;
  const auto optional = [](const std::optional<int64_t>& value) { return value ? Json(*value) : Json(nullptr); };
  const Before& before = fixed.before;
  Json json = {{"schema", "oomdiag-fix/1"}, {"command", command}, {"device", describe(patient.device)}};
  json["before"] = {{"outcome", before.outcome},
                    {"place", before.place},
                    {"cause", before.cause},
                    {"needs_bytes", before.needs_bytes},
                    {"peak_allocated_bytes", before.allocated_bytes},
                    {"peak_reserved_bytes", before.reserved_bytes},
                    {"room_bytes", before.room_bytes},
                    {"whole_run", before.is_whole},
                    {"code_changes", before.code_changes}};
  json["remedies"] = Json::array();
  for (const Remedied& remedy : fixed.remedies) {
    Json ids = Json::array();
    for (const Change& change : remedy.changes) ids.push_back(change.id);
    json["remedies"].push_back({{"ids", ids},
                                {"label", remedy.label()},
                                {"predicted_peak_bytes", optional(remedy.predicted_peak_bytes())},
                                {"measured_peak_bytes", optional(remedy.measured_peak_bytes)},
                                {"measured_reserved_bytes", optional(remedy.measured_reserved_bytes)},
                                {"fits", remedy.fits},
                                {"still_grows", remedy.still_grows},
                                {"extra_forward", remedy.extra_forward()},
                                {"recomputed_ops", optional(remedy.recomputed_ops())},
                                {"changes_numerics", remedy.changes_numerics()},
                                {"how", remedy.lines},
                                {"unproved", remedy.unproved.empty() ? Json(nullptr) : Json(remedy.unproved)}});
  }
  json["interrupted"] = fixed.interrupted_by != 0;
  json["runs"] = fixed.runs;
  json["seconds"] = fixed.seconds;
  return oomdiag::to_text(json);
}

}  // namespace oomdiag
