#include "cli/terminal/help.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <sstream>
#include <string_view>
#include <utility>

#include "cli/terminal/terminal.h"

namespace oomdiag {
namespace {

constexpr std::size_t kOptionColumn = 28;
constexpr std::size_t kWidth = 100, kMinWidth = 60;

struct OptionGroup {
  std::string_view title;
  std::vector<std::string_view> options;
};

/// Options that several commands have, as the help lists them below the command's own.
const std::array kGroups = {
    OptionGroup{"Device", {"--device", "--devices", "--memory", "--count", "--clocked"}},
    OptionGroup{"Job of several ranks",
                {"--world-size", "--rank", "--ranks", "--local-world-size", "--topology", "--print-jobs", "--collect"}},
    OptionGroup{"Reference model", {"--model", "--variant", "--optimizer", "--amp", "--accumulate"}},
    OptionGroup{"Output",
                {"--json", "--output", "--html", "--folder", "--all", "--redact", "--open", "--junit", "--github",
                 "--no-progress"}},
};

bool is_in(const OptionGroup& group, const CLI::Option& option) {
  return std::ranges::any_of(group.options,
                             [&](std::string_view name) { return option.check_lname(std::string(name)); });
}

/// Columns of the terminal, within what reads well.
std::size_t help_width() {
  const std::size_t columns = terminal_size(STDOUT_FILENO).columns;
  return columns > 0 ? std::clamp(columns, kMinWidth, kWidth) : kWidth;
}

/// Breaks lines between words, so that each has at most `width` bytes where its words allow.
std::string wrap(const std::string& text, std::size_t width) {
  std::istringstream words(text);
  std::string word, line, wrapped;
  while (words >> word) {
    if (!line.empty() && line.size() + 1 + word.size() > width) {
      wrapped += line + '\n';
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return wrapped + line;
}

class ExampleFirst : public CLI::Formatter {
 public:
  explicit ExampleFirst(Help help) : help_(std::move(help)) { column_width(kOptionColumn); }

  std::string make_description(const CLI::App*) const override {
    return fmt::format("example: {}\n\n{}\n\n", help_.example, help_.about);
  }
  std::string make_usage(const CLI::App*, std::string) const override {
    return fmt::format("usage: {}\n", help_.usage);
  }
  std::string make_group(std::string title, bool is_positional, std::vector<const CLI::Option*> own) const override {
    if (is_positional) return Formatter::make_group(title, is_positional, own);
    std::string below;
    for (const OptionGroup& group : kGroups) {
      const auto listed =
          std::stable_partition(own.begin(), own.end(), [&](const CLI::Option* o) { return !is_in(group, *o); });
      if (listed == own.end()) continue;
      below += Formatter::make_group(std::string(group.title), false, {listed, own.end()});
      own.erase(listed, own.end());
    }
    return Formatter::make_group(std::move(title), false, own) + below;
  }
  /// Without the options that it needs: the description names them.
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string text = Formatter::make_option_opts(option);
    return text.substr(0, text.find(" Needs:"));
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrap(option->get_description(), help_width() - kOptionColumn);
  }

 private:
  Help help_;
};

}  // namespace

namespace {

template <class Number>
CLI::Validator between(Number least, Number most) {
  const auto check = [least, most](std::string& text) {
    Number number = 0;
    const bool is_number = CLI::detail::lexical_cast(text, number);
    return is_number && number >= least && number <= most
               ? std::string()
               : fmt::format("'{}' is not a number from {} to {}", text, least, most);
  };
  return {check, ""};
}

}  // namespace

CLI::Validator range(int64_t least, int64_t most) { return between(least, most); }
CLI::Validator number_in(double least, double most) { return between(least, most); }

CLI::Validator one_of(const std::vector<std::string>& words) {
  const auto check = [words](const std::string& text) {
    const bool is_known = std::find(words.begin(), words.end(), text) != words.end();
    return is_known ? std::string() : fmt::format("'{}' is not one of {}", text, fmt::join(words, ", "));
  };
  return {check, ""};
}

void add_json_file(CLI::App& command, std::string& file, std::string_view what) {
  command.add_option("-o,--output", file, fmt::format("write {} as JSON to this file", what))->type_name("FILE");
}

void add_page_file(CLI::App& command, std::string& file, std::string_view what) {
  command.add_option("--html", file, fmt::format("write {} as a page to this file", what))->type_name("FILE");
}

void add_runs_folder(CLI::App& command, std::string& folder) {
  command.add_option("--folder", folder, "where to make the run folder oomdiag-<pid>; default: oomdiag-runs")
      ->type_name("DIR");
}

void add_no_fork(CLI::App& command, bool& never_forks) {
  command.add_flag("--no-fork", never_forks,
                   "start Python anew for each run, instead of forking it from a process that has made its imports");
}

void set_help(CLI::App& app, const Help& help) { app.formatter(std::make_shared<ExampleFirst>(help)); }

}  // namespace oomdiag
