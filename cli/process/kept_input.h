#pragma once

#include <cstdint>
#include <filesystem>

namespace oomdiag {

/// What was taken of an input.
struct KeptInput {
  int64_t bytes = 0;
  bool is_whole = true;  ///< false: it has more than kMaxInput, or is a pipe that is still open
};

inline constexpr int64_t kMaxInput = int64_t{16} << 20;

/// Copies what `descriptor` has to `file`, so that many programs can read it: a file from where it stands, which it keeps, or a pipe
/// until its end, or until nothing has come for a second. Nothing of a terminal, or of a pipe that stays empty: then there is no `file`.
KeptInput keep_input(int descriptor, const std::filesystem::path& file);

}  // namespace oomdiag
