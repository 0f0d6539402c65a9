#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace oomdiag {

/// Help that begins with what people came for.
struct Help {
  std::string example;  ///< "oomdiag devices"
  std::string about;    ///< a sentence or two
  std::string usage;    ///< "oomdiag devices [OPTIONS]"
};

/// Accepts whole numbers from `least` to `most`, and says so otherwise.
CLI::Validator range(int64_t least, int64_t most);

/// Accepts numbers from `least` to `most`, fractions too, and says so otherwise.
CLI::Validator number_in(double least, double most);

/// Accepts these words, and lists them otherwise.
CLI::Validator one_of(const std::vector<std::string>& words);

/// -o and --html: files that `what` is written to as JSON and as a page, "the report".
void add_json_file(CLI::App& command, std::string& file, std::string_view what = "the report");
void add_page_file(CLI::App& command, std::string& file, std::string_view what = "the report");

/// --folder: where a run's folder is made.
void add_runs_folder(CLI::App& command, std::string& folder);

/// --no-fork, of verbs that run a program many times.
void add_no_fork(CLI::App& command, bool& never_forks);

/// Gives `app` this help.
void set_help(CLI::App& app, const Help& help);

}  // namespace oomdiag
