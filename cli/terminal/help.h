#pragma once

#include <cstdint>
#include <string>
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

/// Gives `app` this help.
void set_help(CLI::App& app, const Help& help);

}  // namespace oomdiag
