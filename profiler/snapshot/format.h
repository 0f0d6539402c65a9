#pragma once

#include <filesystem>
#include <string>

namespace oomdiag {

/// What a file is, by its first bytes.
enum class FileFormat : unsigned char {
  trace,
  pickle,
  report,
  timeline,  ///< a Chrome trace or a JSON list: what read_timeline() reads, or may reject
  gzip,
  other,
  empty
};

FileFormat find_format(const std::filesystem::path& file);

/// Whether it is a timeline, packed by gzip or not.
bool is_timeline(const std::filesystem::path& file);

/// The format of a file that is none of ours in words, for whoever gave it by mistake: "a zip archive, as torch.save
/// writes".
std::string describe_format(const std::filesystem::path& file);

}  // namespace oomdiag
