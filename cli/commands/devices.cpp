#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands/commands.h"
#include "cli/device/gpus.h"
#include "cli/process/launcher.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "cli/terminal/help.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "extension/virtual_device/device_files/gpu.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

struct DevicesOptions {
  bool as_json = false;
  bool all = false;      ///< the GPUs too that this wheel does not run on
  bool measure = false;  ///< no list: the GPU of this machine
  std::string output;    ///< of a measured GPU; empty = stdout
};

/// The marks of the device files: how a number is known.
std::string_view explain_mark(std::string_view mark) {
  if (mark == "S") return "seen on a GPU";
  if (mark == "M") return "measured";
  if (mark == "C") return "from a rounded figure";
  if (mark == "P") return "specification";
  if (mark == "U") return "uncertain";
  return mark;
}

nlohmann::json to_json(const GpuEntry& entry) {
  nlohmann::json object = {{"id", entry.id},
                           {"name", entry.name},
                           {"compute_capability", entry.capability.text()},
                           {"supported", entry.why_not.empty()}};
  if (!entry.why_not.empty()) object["why_not"] = entry.why_not;
  if (entry.file.empty()) return object;
  const Gpu& gpu = entry.gpu;
  object.update(
      {{"aliases", entry.aliases},
       {"total_bytes", entry.total_bytes},
       {"mark", entry.mark},
       {"older_total_bytes", gpu.older_total_bytes == 0 ? nlohmann::json() : nlohmann::json(gpu.older_total_bytes)},
       {"context_bytes", entry.context_bytes},
       {"multiprocessors", gpu.multiprocessors},
       {"threads_per_multiprocessor", gpu.threads_per_multiprocessor},
       {"blocks_per_multiprocessor", gpu.blocks_per_multiprocessor},
       {"registers_per_multiprocessor", gpu.registers_per_multiprocessor},
       {"shared_bytes_per_multiprocessor", gpu.shared_bytes_per_multiprocessor},
       {"shared_bytes_per_block", gpu.shared_bytes_per_block},
       {"shared_bytes_per_block_optin", gpu.shared_bytes_per_block_optin},
       {"l2_bytes", gpu.l2_bytes},
       {"file", entry.file.string()}});
  return object;
}

int print_json(const std::vector<GpuEntry>& catalogue, const std::vector<GpuEntry>& others) {
  nlohmann::json list = nlohmann::json::array();
  for (const GpuEntry& gpu : catalogue) list.push_back(to_json(gpu));
  for (const GpuEntry& gpu : others) list.push_back(to_json(gpu));
  fmt::print("{}\n", to_text(list));
  return 0;
}

/// By reason, as most share one of a few.
void print_unsupported(const std::vector<GpuEntry>& others) {
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const GpuEntry& gpu : others) by_reason[gpu.why_not].push_back(gpu.id);
  fmt::print("\nnot with this torch:\n");
  for (const auto& [reason, ids] : by_reason) fmt::print("  {}\n    {}\n", fmt::join(ids, ", "), reason);
}

/// Of how many it is known what older drivers leave of their memory.
auto count_older(const std::vector<GpuEntry>& catalogue) {
  return std::ranges::count_if(catalogue, [](const GpuEntry& entry) { return entry.gpu.older_total_bytes != 0; });
}

int64_t most_lost_mib(const std::vector<GpuEntry>& catalogue) {
  int64_t most = 0;
  for (const GpuEntry& entry : catalogue) most = std::max(most, entry.gpu.older_total_bytes - entry.total_bytes);
  return most >> 20;
}

int print_table(const std::vector<GpuEntry>& catalogue, const std::vector<GpuEntry>& others, bool all) {
  constexpr const char* kRow = "{:<17} {:<49} {:>11} {:>12} {:>5} {:>8}  {}\n";
  fmt::print(kRow, "device", "name", "memory, GiB", "context, GiB", "SMs", "compute", "memory is");
  for (const GpuEntry& gpu : catalogue) {
    fmt::print(kRow, gpu.id, gpu.name, to_gib(gpu.total_bytes), to_gib(gpu.context_bytes), gpu.gpu.multiprocessors,
               gpu.capability.text(), explain_mark(gpu.mark));
  }
  if (all) print_unsupported(others);
  fmt::print(
      "\n{} GPUs. memory: as the CUDA runtime reports it; context: what a process takes of it before PyTorch does, "
      "estimated\n",
      catalogue.size());
  fmt::print(
      "drivers up to {} leave up to {} MiB more of {} of them; with a torch for CUDA 12, --device rtx3090@{} is such a "
      "GPU\n",
      kOlderDrivers, most_lost_mib(catalogue), count_older(catalogue), kOlderDrivers);
  if (!all) fmt::print("{} more are known, but not supported by this torch: oomdiag devices --all\n", others.size());
  fmt::print("next: oomdiag train --model deepcnn --device rtx3060\n");
  return 0;
}

int list(const DevicesOptions& options) {
  const std::filesystem::path folder = find_install().gpus;
  const std::vector<GpuEntry> catalogue = read_catalogue(folder);
  const std::vector<GpuEntry> others = read_unsupported(folder);
  if (options.as_json) return print_json(catalogue, options.all ? others : std::vector<GpuEntry>{});
  return print_table(catalogue, others, options.all);
}

/// The device file of this machine's GPU, as oomdiag_measure prints it: in a process of its own, for the driver is foreign.
std::string measure_gpu() {
  const std::filesystem::path program = find_install().samples.parent_path() / "oomdiag_measure";
  const std::optional<std::string> text = output_of({program.string()});
  if (!text) throw Error(ErrorKind::environment, "oomdiag_measure did not run", "is it built? scripts/build");
  const nlohmann::json file = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) throw Error(ErrorKind::environment, "oomdiag_measure printed no GPU");
  if (file.contains("error")) {
    throw Error(ErrorKind::environment, "no GPU to measure: " + file["error"].get<std::string>(),
                "run it on a machine with an NVIDIA GPU and its driver");
  }
  return *text;
}

int measure(const DevicesOptions& options) {
  const std::string text = measure_gpu();
  if (options.output.empty()) {
    fmt::print("{}", text);
    return 0;
  }
  write_whole(text, options.output);
  fmt::print("{} written\nnext: oomdiag train --model deepcnn --device {}\n", options.output,
             options.output.find('/') == std::string::npos ? "./" + options.output : options.output);
  return 0;
}

}  // namespace

void add_devices(CLI::App& app, Command& chosen) {
  auto options = std::make_shared<DevicesOptions>();
  CLI::App& command = *app.add_subcommand("devices", "list the virtual devices");
  set_help(command, {.example = "oomdiag devices",
                     .about = "Lists the GPUs that a virtual device can be: what --device takes. --measure writes the\n"
                              "file of such a GPU on a machine that has the real one.",
                     .usage = "oomdiag devices [OPTIONS]"});
  command.add_flag("--json", options->as_json, "print JSON");
  command.add_flag("--all", options->all, "also the GPUs that this torch has no code for, and why");
  auto* const measures = command.add_flag("--measure", options->measure, "measure this machine's GPU instead");
  command.add_option("-o,--output", options->output, "with --measure: write the GPU to this file")
      ->type_name("FILE")
      ->needs(measures);
  command.callback(
      [options, &chosen] { chosen = [options] { return options->measure ? measure(*options) : list(*options); }; });
}

}  // namespace oomdiag
