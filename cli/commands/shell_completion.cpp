#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands/commands.h"
#include "cli/terminal/help.h"
#include "cli/terminal/terminal.h"

// Completion for shells, written from the commands and options themselves. Behind "--" it is the program's turn.

namespace oomdiag {
namespace {

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::vector<std::string> options_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::string names_of(const CLI::App& app) {
  std::string names;
  for (const CLI::App* command : commands_of(app)) names += (names.empty() ? "" : " ") + command->get_name();
  return names;
}

constexpr const char* kBash = R"(_oomdiag() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    if [[ ${{COMP_WORDS[i]}} == -- ]]; then _command_offset $((i + 1)) 2>/dev/null || COMPREPLY=($(compgen -f -- "$word")); return; fi
  done
  if ((COMP_CWORD == 1)); then COMPREPLY=($(compgen -W "{}" -- "$word")); return; fi
  local options=
  case ${{COMP_WORDS[1]}} in
{}  esac
  if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$word")); else COMPREPLY=($(compgen -f -- "$word")); fi
}}
complete -F _oomdiag oomdiag
)";

std::string for_bash(const CLI::App& app) {
  std::string cases;
  for (const CLI::App* command : commands_of(app)) {
    cases += fmt::format("    {}) options=\"{}\" ;;\n", command->get_name(), fmt::join(options_of(*command), " "));
  }
  return fmt::format(kBash, names_of(app), cases);
}

std::string for_fish(const CLI::App& app) {
  std::string lines = fmt::format("complete -c oomdiag -f -n __fish_use_subcommand -a '{}'\n", names_of(app));
  for (const CLI::App* command : commands_of(app)) {
    for (const std::string& option : options_of(*command)) {
      lines += fmt::format("complete -c oomdiag -n '__fish_seen_subcommand_from {}' -l {}\n", command->get_name(),
                           option.substr(2));
    }
  }
  return lines;
}

std::string script_for(const std::string& shell, const CLI::App& app) {
  if (shell == "fish") return for_fish(app);
  const std::string bash = for_bash(app);
  return shell == "bash" ? bash : "autoload -U +X bashcompinit && bashcompinit\n" + bash;
}

}  // namespace

void add_shell_completion(CLI::App& app, Command& chosen) {
  auto shell = std::make_shared<std::string>();
  CLI::App& command = *app.add_subcommand("completion", "print what makes a shell complete our commands and options");
  set_help(command,
           {.example = "eval \"$(oomdiag completion bash)\"",
            .about = "Prints a script for bash, zsh or fish: evaluate it in the file that the shell reads first.",
            .usage = "oomdiag completion bash|zsh|fish"});
  command.add_option("SHELL", *shell, "bash, zsh or fish")
      ->required()
      ->type_name("")
      ->check(one_of({"bash", "zsh", "fish"}));
  command.callback([shell, &app, &chosen] {
    chosen = [shell, &app] {
      write_out(script_for(*shell, app));
      return 0;
    };
  });
}

}  // namespace oomdiag
