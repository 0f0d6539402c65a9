#include "profiler/snapshot/compare.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands/commands.h"
#include "cli/device/device.h"
#include "cli/reports/reports.h"
#include "cli/terminal/help.h"
#include "cli/terminal/json_text.h"
#include "profiler/error.h"
#include "profiler/report/words/printable.h"
#include "profiler/snapshot/window.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

struct CompareOptions {
  std::string left, right;
  int device = 0;
  bool json = false;
};

Json to_json(const ComparedEvent& event) {
  if (event.what.empty()) return nullptr;
  return {{"number", event.number}, {"what", event.what}, {"bytes", event.bytes}, {"where", event.where}};
}

Json to_json(const ComparedSequence& sequence) {
  Json differences = Json::array();
  for (const Difference& one : sequence.first) {
    differences.push_back({{"left", to_json(one.left)}, {"right", to_json(one.right)}});
  }
  return {{"left_events", sequence.left_events},
          {"right_events", sequence.right_events},
          {"equal", sequence.equal},
          {"equal_percent", sequence.equal_percent()},
          {"changed", sequence.changed},
          {"only_left", sequence.only_left},
          {"only_right", sequence.only_right},
          {"left_rest", sequence.left_rest},
          {"right_rest", sequence.right_rest},
          {"version_difference", sequence.version_difference},
          {"differences", differences}};
}

Json to_json(const std::optional<Window>& window, bool left_begins_late) {
  if (!window) return nullptr;
  return {{"side", left_begins_late ? "left" : "right"},
          {"blocks_before", window->blocks_before},
          {"step", window->step},
          {"alive", window->alive},
          {"alive_bytes", window->alive_bytes},
          {"alive_elsewhere", window->alive_elsewhere}};
}

Json to_json(const Comparison& comparison) {
  return {
      {"schema", "oomdiag-comparison/1"},
      {"equal", comparison.is_equal()},
      {"blocks", to_json(comparison.blocks)},
      {"only_frees_differ", comparison.only_frees_differ},
      {"segments", to_json(comparison.segments)},
      {"window", to_json(comparison.window, comparison.left_begins_late)},
      {"left",
       {{"peak_allocated_bytes", comparison.left_peak_bytes}, {"peak_reserved_bytes", comparison.left_reserved_bytes}}},
      {"right",
       {{"peak_allocated_bytes", comparison.right_peak_bytes},
        {"peak_reserved_bytes", comparison.right_reserved_bytes}}},
      {"peak_agrees", comparison.peak_agrees()},
      {"reserved_tolerance", Comparison::kReservedTolerance},
      {"reserved_agrees", comparison.reserved_agrees()}};
}

std::string event_text(const ComparedEvent& event) {
  if (event.what.empty()) return "nothing";
  return fmt::format("{} {} bytes{}{}", event.what, event.bytes, event.where.empty() ? "" : "  ",
                     printable(event.where, 100));
}

void print_sequence(const char* title, const ComparedSequence& sequence) {
  fmt::print("  {:<10}{:>15}{:>15}   {:.3f} % equal", title, sequence.left_events, sequence.right_events,
             sequence.equal_percent());
  if (!sequence.is_equal()) {
    fmt::print(": {} changed, {} only left, {} only right", sequence.changed, sequence.only_left, sequence.only_right);
  }
  fmt::print("\n");
}

void print_differences(const char* title, const ComparedSequence& sequence) {
  if (sequence.first.empty()) return;
  fmt::print("\n  first differences of {}\n", title);
  for (const Difference& one : sequence.first) {
    const uint64_t number = one.left.what.empty() ? one.right.number : one.left.number;
    fmt::print("    {:>8}  left   {}\n              right  {}\n", number, event_text(one.left), event_text(one.right));
  }
}

const char* verdict_on_peak(const Comparison& comparison) {
  if (comparison.left_peak_bytes == comparison.right_peak_bytes) return "equal";
  return comparison.peak_agrees() ? "equal within 0.5 %: sizes of older blocks are guessed" : "different";
}

const char* verdict_on_reserved(const Comparison& comparison) {
  if (comparison.left_reserved_bytes == comparison.right_reserved_bytes) return "equal";
  return comparison.reserved_agrees() ? "equal within 1.5 %: addresses decide ties of best fit" : "different";
}

void print_window(const Comparison& comparison) {
  if (!comparison.window) return;
  const Window& window = *comparison.window;
  const char* const part = comparison.left_begins_late ? "left" : "right";
  const char* const whole = comparison.left_begins_late ? "right" : "left";
  const auto& [events, rest] = comparison.left_begins_late
                                   ? std::pair(comparison.blocks.right_events, comparison.blocks.right_rest)
                                   : std::pair(comparison.blocks.left_events, comparison.blocks.left_rest);
  fmt::print(
      "  the {} recording covers a part of the run only; compared with {} of {} allocs and frees of the {}, from "
      "number {} "
      "on",
      part, events, window.blocks_before + events + rest, whole, window.blocks_before + 1);
  if (window.step > 0) fmt::print(", in step {}", window.step);
  fmt::print("\n  in use where it begins: {} blocks of {} bytes, ", window.alive, window.alive_bytes);
  if (window.alive_elsewhere == 0) {
    fmt::print("the same in both\n\n");
  } else {
    fmt::print("{} of them or others only in one of the two\n\n", window.alive_elsewhere);
  }
}

void print(const Comparison& comparison) {
  fmt::print("oomdiag: the recordings are {}\n\n", comparison.is_equal() ? "equal" : "different");
  print_window(comparison);
  if (comparison.only_frees_differ)
    fmt::print(
        "  all allocs are the same, of the same sizes and in the same order: only when they are freed differs\n\n");
  fmt::print("  {:<10}{:>15}{:>15}\n", "", "left", "right");
  print_sequence("blocks", comparison.blocks);
  print_sequence("segments", comparison.segments);
  fmt::print("  {:<10}{:>15}{:>15}   {}\n", "peak", comparison.left_peak_bytes, comparison.right_peak_bytes,
             verdict_on_peak(comparison));
  fmt::print("  {:<10}{:>15}{:>15}   {}\n", "reserved", comparison.left_reserved_bytes, comparison.right_reserved_bytes,
             verdict_on_reserved(comparison));
  const std::string& known = comparison.blocks.version_difference;
  if (!known.empty()) fmt::print("\n  all differences of blocks are {}\n", known);
  print_differences("blocks", comparison.blocks);
  print_differences("segments", comparison.segments);
  const uint64_t rest = comparison.blocks.left_rest + comparison.blocks.right_rest;
  if (rest > 0) fmt::print("\n  not compared: {} allocs and frees after the snapshot was taken\n", rest);
}

int compare_files(const CompareOptions& options) {
  const Trace left = load_trace(options.left), right = load_trace(options.right);
  const Comparison comparison = compare(left, right, static_cast<uint8_t>(options.device));
  if (comparison.is_empty()) {
    throw Error(ErrorKind::usage, fmt::format("neither recording has allocations of GPU {}", options.device),
                "name another one with --gpu");
  }
  if (options.json) {
    fmt::print("{}\n", to_text(to_json(comparison)));
  } else {
    print(comparison);
  }
  return comparison.is_equal() ? 0 : 1;
}

}  // namespace

void add_compare(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App& command = *app.add_subcommand("compare", "compare two recordings, event by event");
  set_help(command,
           {.example = "oomdiag compare real.pickle oomdiag-4711",
            .about = "Says where two recordings of one program differ: memory snapshots of PyTorch, traces or run "
                     "folders. Exit code 0 if they are equal, 1 if not.",
            .usage = "oomdiag compare [OPTIONS] LEFT RIGHT"});
  command.add_option("LEFT", options->left, "a snapshot.pickle, a trace or a run folder")->type_name("")->required();
  command.add_option("RIGHT", options->right, "likewise")->type_name("")->required();
  command.add_option("--gpu", options->device, "which GPU to compare, by index")
      ->type_name("N")
      ->check(range(0, kMaxGpus - 1));
  command.add_flag("--json", options->json, "print the comparison as JSON");
  command.callback([options, &chosen] { chosen = [options] { return compare_files(*options); }; });
}

}  // namespace oomdiag
