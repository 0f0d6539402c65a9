#include "cli/terminal/help.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <utility>

namespace oomdiag {
namespace {

constexpr std::size_t kOptionColumn = 28;

class ExampleFirst : public CLI::Formatter {
 public:
  explicit ExampleFirst(Help help) : help_(std::move(help)) { column_width(kOptionColumn); }

  std::string make_description(const CLI::App*) const override {
    return fmt::format("example: {}\n\n{}\n\n", help_.example, help_.about);
  }
  std::string make_usage(const CLI::App*, std::string) const override {
    return fmt::format("usage: {}\n", help_.usage);
  }

 private:
  Help help_;
};

}  // namespace

CLI::Validator range(int64_t least, int64_t most) {
  const auto check = [least, most](std::string& text) {
    int64_t number = 0;
    const bool is_number = CLI::detail::lexical_cast(text, number);
    return is_number && number >= least && number <= most
               ? std::string()
               : fmt::format("'{}' is not a number from {} to {}", text, least, most);
  };
  return {check, ""};
}

CLI::Validator number_in(double least, double most) {
  const auto check = [least, most](std::string& text) {
    double number = 0;
    const bool is_number = CLI::detail::lexical_cast(text, number);
    return is_number && number >= least && number <= most
               ? std::string()
               : fmt::format("'{}' is not a number from {} to {}", text, least, most);
  };
  return {check, ""};
}

CLI::Validator one_of(const std::vector<std::string>& words) {
  const auto check = [words](const std::string& text) {
    const bool is_known = std::find(words.begin(), words.end(), text) != words.end();
    return is_known ? std::string() : fmt::format("'{}' is not one of {}", text, fmt::join(words, ", "));
  };
  return {check, ""};
}

void set_help(CLI::App& app, const Help& help) { app.formatter(std::make_shared<ExampleFirst>(help)); }

}  // namespace oomdiag
