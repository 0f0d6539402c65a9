#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/python/install.h"
#include "cli/python/python.h"

namespace oomdiag {

/// What was built for one torch.
struct FirstUse {
  std::filesystem::path recorder;
  std::filesystem::path contents;
  std::string architectures{};  ///< that this torch has code for: "75,80"

  bool operator==(const FirstUse&) const = default;
};

/// The recorder and the contents library for `torch`, from the cache, else built from our sources with the headers of that
/// torch, with a line on stderr. Two that start at once build once. Throws Error(environment) where that cannot be done, as of a torch that is
/// too old; the hint says what works without.
FirstUse provide_recorder(const TorchOfPython& torch, const Install& install);

/// One file to compile, with the sources that it includes.
struct CompiledUnit {
  std::string name;
  std::vector<std::string> sources;

  bool operator==(const CompiledUnit&) const = default;
};

/// The units of recorder_units.txt: lines of a unit's name and a source.
std::vector<CompiledUnit> read_units(const std::string& text);

/// The folder in the cache: the torch, the interface of its strings, the interpreter, and the sources that it is built from.
std::string name_of_build(const TorchOfPython& torch, bool old_strings, uint64_t sources);

/// Folders with the headers that torch's own want: those of the packages beside it, then those that Triton brings, which
/// complete them.
std::vector<std::filesystem::path> header_folders(const std::filesystem::path& torch);

/// Whether a torch of this version, as "2.5.1+cu124", may have what the recorder is written for: 2.6 and newer do.
bool has_interface(const std::string& version);

/// Whether the libraries of torch were compiled with the strings of before C++11, as wheels up to 2.6 are.
bool has_old_strings(const std::filesystem::path& torch);

}  // namespace oomdiag
