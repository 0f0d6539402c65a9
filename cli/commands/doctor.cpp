#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands/commands.h"
#include "cli/device/device.h"
#include "cli/launch/checkup.h"
#include "cli/python/install.h"
#include "cli/terminal/help.h"
#include "cli/terminal/json_text.h"
#include "cli/terminal/sizes.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/report/words/printable.h"

namespace oomdiag {
namespace {

struct DoctorOptions {
  std::vector<std::string> program;
  DeviceOptions device;
  bool as_json = false;
};

nlohmann::json named(const std::vector<std::pair<std::string, std::string>>& pairs) {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [name, value] : pairs) json[name] = text_or_null(value);
  return json;
}

void print_json(const Checkup& checkup, const std::vector<Trouble>& troubles) {
  nlohmann::json json{{"schema", "oomdiag-doctor/1"},
                      {"gpu", checkup.has_gpu},
                      {"device",
                       {{"name", checkup.gpu},
                        {"virtual", checkup.virtual_device},
                        {"total_bytes", checkup.total_bytes},
                        {"free_bytes", checkup.free_bytes}}},
                      {"versions", named(checkup.versions)},
                      {"settings", named(checkup.settings)},
                      {"hooks", nlohmann::json::array()},
                      {"processes", nlohmann::json::array()},
                      {"troubles", nlohmann::json::array()}};
  json["cupti_holder"] = text_or_null(checkup.cupti_holder);
  for (const HookCheck& hook : checkup.hooks) {
    json["hooks"].push_back({{"name", hook.name}, {"works", hook.works}, {"tells", hook.detail}});
  }
  for (const ProcessCheck& one : checkup.processes) {
    json["processes"].push_back({{"pid", one.pid}, {"name", one.name}, {"bytes", one.bytes}});
  }
  for (const Trouble& trouble : troubles) json["troubles"].push_back({{"what", trouble.what}, {"fix", trouble.fix}});
  fmt::print("{}\n", to_text(json));
}

void print_pairs(const char* title, const std::vector<std::pair<std::string, std::string>>& pairs) {
  if (pairs.empty()) return;
  fmt::print("\n  {}\n", title);
  for (const auto& [name, value] : pairs) fmt::print("    {:<24} {}\n", name, value.empty() ? "not known" : value);
}

void print_text(const Checkup& checkup, const std::vector<Trouble>& troubles) {
  if (!checkup.gpu.empty()) {
    fmt::print("  GPU     {} ({}), {} GiB, {} free\n", checkup.gpu, checkup.virtual_device ? "virtual" : "real",
               to_gib(checkup.total_bytes), to_gib(checkup.free_bytes));
  }
  print_pairs("versions", checkup.versions);
  print_pairs("settings in force", checkup.settings);
  if (!checkup.hooks.empty()) fmt::print("\n  {:<28}{}\n", "what the recorder can see", "seen here");
  for (const HookCheck& hook : checkup.hooks) {
    fmt::print("    {:<26}{:<6}{}\n", hook.name, hook.works ? "yes" : "no", hook.detail);
  }
  if (checkup.asked_nvml) fmt::print("\n  {:<44}{:>9}\n", "other processes on the GPU", "GiB");
  for (const ProcessCheck& one : checkup.processes) {
    fmt::print("    {:<42}{:>9}\n", fmt::format("{} {}", one.pid, printable(one.name, 30)), to_gib(one.bytes));
  }
  if (checkup.asked_nvml && checkup.processes.empty()) fmt::print("    none\n");
  fmt::print("\n  {}\n", troubles.empty() ? "nothing limits a diagnosis" : "what limits a diagnosis");
  for (const Trouble& trouble : troubles) {
    fmt::print("    {}\n", trouble.what);
    if (!trouble.fix.empty()) fmt::print("      {}\n", trouble.fix);
  }
  fmt::print("\n  next: oomdiag run -- python train.py\n");
}

int run(const DoctorOptions& options) {
  if (options.program.size() > 1) {
    throw Error(ErrorKind::usage, "doctor takes a python and nothing else", "as in: oomdiag doctor -- python");
  }
  const Install install = find_install();
  const DeviceChoice device = choose_device(options.device, install);
  require_gpu(device);
  const std::string python = options.program.empty() ? install.python.string() : options.program.front();
  Checkup checkup;
  {
    const Progress progress("running a few lines of PyTorch");
    checkup = check_up(python, device, install);
  }
  const std::vector<Trouble> troubles = find_troubles(checkup);
  options.as_json ? print_json(checkup, troubles) : print_text(checkup, troubles);
  return checkup.failure.empty() ? 0 : 1;
}

}  // namespace

void add_doctor(CLI::App& app, Command& chosen, const std::vector<std::string>& from_separator) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App& command = *app.add_subcommand("doctor", "say what a diagnosis here can see, and what limits it");
  set_help(command,
           {.example = "oomdiag doctor -- python",
            .about = "Runs a few lines of PyTorch under the recorder and says what it saw: versions, hooks, other\n"
                     "processes on the GPU, settings, and what would limit a diagnosis. Works without a GPU.",
            .usage = "oomdiag doctor [OPTIONS] [-- PYTHON]"});
  add_device_options(command, options->device);
  command.add_flag("--json", options->as_json, "print JSON");
  command.callback([options, &chosen, &from_separator] {
    if (!from_separator.empty()) options->program.assign(from_separator.begin() + 1, from_separator.end());
    chosen = [options] { return run(*options); };
  });
}

}  // namespace oomdiag
