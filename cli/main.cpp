// The command line. The only place where errors become exit codes: usage 2, anything else 1.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <vector>

#include "cli/commands/commands.h"
#include "cli/process/files.h"
#include "cli/process/launcher.h"
#include "cli/process/own_process.h"
#include "cli/process/workers.h"
#include "cli/terminal/help.h"
#include "cli/terminal/nearest.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"

// OOMDIAG_VERSION comes from CMakeLists.txt.

namespace oomdiag {
namespace {

/// The words of the command line, cut at the first "--".
struct Words {
  std::vector<std::string> ours;
  std::vector<std::string> from_separator;
};

Words split(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const auto separator = std::find(words.begin(), words.end(), "--");
  Words result{{words.begin(), separator}, {separator, words.end()}};
  return result;
}

/// The subcommand that the command line names, or `app`.
const CLI::App& subcommand_of(const CLI::App& app, const Words& words) {
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!words.ours.empty() && command->get_name() == words.ours.front()) return *command;
  }
  return app;
}

/// "help", "help run" and "version", as other programs have them.
void understand_habits(Words& words) {
  std::vector<std::string>& ours = words.ours;
  if (ours.empty()) return;
  if (ours.front() == "version") ours.front() = "--version";
  if (ours.front() != "help") return;
  ours.erase(ours.begin());
  ours.emplace_back("--help");
}

/// "oomdiag train.py" and "oomdiag python train.py" are run: a file, or an interpreter, in the place of a command.
void understand_programs(const CLI::App& app, Words& words) {
  if (words.ours.empty() || words.ours.front().starts_with('-') || &subcommand_of(app, words) != &app) return;
  const std::string& first = words.ours.front();
  const bool is_interpreter = first.starts_with("python") || first == "torchrun";
  if (is_interpreter || is_file(first)) words.ours.insert(words.ours.begin(), "run");
}

void check_command(const CLI::App& app, const Words& words) {
  if (words.ours.empty() || words.ours.front().starts_with('-') || &subcommand_of(app, words) != &app) return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  throw Error(ErrorKind::usage, fmt::format("unknown command '{}'", words.ours.front()),
              did_you_mean(words.ours.front(), names, "oomdiag --help lists the commands"));
}

/// What the parser did not expect: an option, with the nearest known ones, or an argument too many.
Error explain_extra(const std::string& word, const CLI::App& command, const std::string& help) {
  if (!word.starts_with('-')) return {ErrorKind::usage, fmt::format("unexpected argument '{}'", word), help};
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) names.push_back(option->get_name());
  return {ErrorKind::usage, fmt::format("unknown option '{}'", word), did_you_mean(word, names, help)};
}

Error explain_usage(const CLI::ParseError& error, const CLI::App& app, const Words& words) {
  const CLI::App& command = subcommand_of(app, words);
  const std::string help = &command == &app ? "oomdiag --help" : fmt::format("oomdiag {} --help", command.get_name());
  const std::vector<std::string> extra = app.remaining(true);
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError) && !extra.empty()) {
    return explain_extra(extra.front(), command, help);
  }
  return {ErrorKind::usage, error.what(), help};
}

/// All commands, in the groups and in the order in which --help lists them.
void add_commands(CLI::App& app, Command& chosen, const Words& words) {
  auto group = [&app, known = std::size_t{0}](const char* name) mutable {
    const std::vector<CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
    for (; known < commands.size(); ++known) commands[known]->group(name);
  };
  add_run(app, chosen, words.from_separator);
  add_train(app, chosen);
  add_explain(app, chosen, words.from_separator);
  add_watch(app, chosen);
  group("Diagnose");
  add_fix(app, chosen, words.from_separator);
  add_fit(app, chosen, words.from_separator);
  group("Search, by running the program");
  add_export(app, chosen);
  add_diff(app, chosen);
  add_check(app, chosen);
  add_compare(app, chosen);
  group("Share and compare");
  add_devices(app, chosen);
  add_models(app, chosen);
  add_doctor(app, chosen, words.from_separator);
  add_clean(app, chosen);
  add_env(app, chosen);
  add_mcp(app, chosen);
  add_recorder(app, chosen);
  add_shell_completion(app, chosen);
  group("Look up and maintain");
}

int parse_and_run(int argc, char** argv) {
  Words words = split(argc, argv);
  Command chosen;
  CLI::App app("", "oomdiag");
  set_help(
      app,
      {.example = "oomdiag train --model deepcnn --device rtx3060 --batch 6720",
       .about = "Explains CUDA out-of-memory errors of PyTorch: where, who holds the memory, why, and what fixes it.",
       .usage = "oomdiag COMMAND [OPTIONS]"});
  app.require_subcommand(1);
  app.set_version_flag("-v,-V,--version", "oomdiag " OOMDIAG_VERSION, "print the version");
  add_commands(app, chosen, words);
  understand_habits(words);
  understand_programs(app, words);
  check_command(app, words);
  if (words.ours.empty()) words.ours.emplace_back("--help");
  try {
    app.parse(std::vector<std::string>(words.ours.rbegin(), words.ours.rend()));
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", subcommand_of(app, words).help());
    return 0;
  } catch (const CLI::CallForVersion&) {
    fmt::print("{}\n", app.version());
    return 0;
  } catch (const CLI::ParseError& error) {
    throw explain_usage(error, app, words);
  }
  try {
    return chosen();
  } catch (const Interrupted& interrupted) {  // a command that had measured something has said it
    return 128 + interrupted.signal;
  } catch (const KilledBySignal& killed) {
    std::fflush(nullptr);
    end_by(killed.signal);
    return 128 + killed.signal;
  }
}

void print(const Error& error) {
  complain(fmt::format("oomdiag: error: {}\n", error.what()));
  if (!error.hint().empty()) complain(fmt::format("hint: {}\n", error.hint()));
}

int print_and_end(const Error& error) {
  print(error);
  return error.kind() == ErrorKind::usage ? kUsage : kFailed;
}

}  // namespace
}  // namespace oomdiag

int main(int argc, char** argv) try {
  oomdiag::open_missing_streams();
  oomdiag::keep_ended_children();
  const int code = oomdiag::parse_and_run(argc, argv);
  oomdiag::finish_output();
  return code;
} catch (const oomdiag::NotStarted& error) {
  oomdiag::print(error);
  return error.exit_code();
} catch (const oomdiag::Error& error) {
  return oomdiag::print_and_end(error);
} catch (const std::system_error& error) {  // a full disk, as fmt::print and std::filesystem report it
  return oomdiag::print_and_end({oomdiag::ErrorKind::environment, error.what()});
} catch (const std::exception& error) {
  return oomdiag::print_and_end(
      {oomdiag::ErrorKind::internal, error.what(), "this is a fault of oomdiag itself; please report it"});
}
