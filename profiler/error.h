#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace oomdiag {

/// Whose fault it is; decides the exit code.
enum class ErrorKind { usage, input, environment, internal };

/// What went wrong: the thing, the reason, and (in `hint`) the fix. Thrown on cold paths only.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, std::string hint = {})
      : std::runtime_error(message), kind_(kind), hint_(std::move(hint)) {}

  ErrorKind kind() const { return kind_; }
  const std::string& hint() const { return hint_; }

 private:
  ErrorKind kind_;
  std::string hint_;
};

}  // namespace oomdiag
