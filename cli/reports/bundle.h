#pragma once

#include <filesystem>
#include <string>

namespace oomdiag {

/// The ending of a bundle's name.
inline constexpr const char* kBundleEnding = ".bundle.tar.gz";

/// What a run left in `folder`, as one small file: a tar archive packed by gzip. A trace is mostly sparse, and 300 MB
/// of it become one or two. Throws Error(input) if there is no trace.
std::string make_bundle(const std::filesystem::path& folder);

/// The same with nothing but this report: where no name may come from the trace.
std::string make_bundle_of_report(const std::string& json);

/// Whether a file that is packed by gzip holds a bundle.
bool is_bundle(const std::filesystem::path& packed);

/// Puts what a run left back into `folder`, and nothing else: names that no run writes are left out. Throws Error(input) if it is
/// damaged, Error(environment) where the disk is full.
void unpack_bundle(const std::filesystem::path& packed, const std::filesystem::path& folder);

}  // namespace oomdiag
