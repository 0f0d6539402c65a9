#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/experiments/fix.h"
#include "profiler/explain/evaluation.h"
#include "profiler/trace/stack_call.h"

// Cures of the reason that the failing run has (kReasons), as far as an unchanged program can be run with them.

namespace oomdiag {
namespace {

Change cure(const char* id) {
  Change change = injected(id);
  change.cures = true;
  return change;
}

/// Where no graph is needed: the function that evaluates, else the line of the program that calls the model.
nlohmann::json settings_of_no_grad(const Before& before) {
  nlohmann::json settings{{"lines", before.reason->how}};
  for (const std::string& line : before.stack) {
    const StackCall call = parse_call(line);
    if (call.function.empty()) continue;
    if (is_evaluation(call.function)) {
      settings["function"] = call.function;
      return settings;
    }
    if (!settings.contains("line")) settings["line"] = call.short_place();
  }
  return settings;
}

}  // namespace

std::vector<Change> list_cures(const Before& before) {
  std::vector<Change> cures;
  const std::string fix = before.reason ? before.reason->fix : "";
  if (fix == "no_grad_in_evaluation") {
    cures.push_back(cure("no_grad_in_evaluation"));
    cures.back().settings = settings_of_no_grad(before);
  }
  for (const char* const id : {"delete_outputs", "load_to_host"}) {
    if (fix == id) cures.push_back(cure(id));
  }
  if (before.grows || (before.failing_step > 1 && !before.reason)) cures.push_back(cure("collect_garbage"));
  return cures;
}

}  // namespace oomdiag
