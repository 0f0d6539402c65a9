#include "cli/python/preload.h"

#include <fmt/format.h>

#include <string_view>

#include "cli/process/files.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

struct StandIn {
  const char* name;
  int cuda_major = 0;  ///< of the programs that ask for it; 0 = of all
};

// The recorder's shim goes before them: it defines cudaGetDeviceCount under the same symbol version.
constexpr StandIn kVirtualDeviceLibraries[] = {
    {"libcuda.so.1"},          {"libcudart.so.13", 13}, {"libcublas.so.13", 13},   {"libcublasLt.so.13", 13},
    {"liboomdiag_cudnn.so"},   {"libnvidia-ml.so.1"},   {"libcufft.so.12", 13},    {"libcusolver.so.12", 13},
    {"libcusparse.so.12"},     {"libcusparseLt.so.0"},  {"libnccl.so.2"},          {"libcupti.so.13", 13},
    {"libcudart.so.12", 12},   {"libcublas.so.12", 12}, {"libcublasLt.so.12", 12}, {"libcufft.so.11", 12},
    {"libcusolver.so.11", 12}, {"libcupti.so.12", 12},
};

void append(std::string& list, std::string_view entry) {
  if (entry.empty()) return;
  if (!list.empty()) list += ':';
  list += entry;
}

void append_if_there(std::string& list, const std::filesystem::path& library) {
  if (is_there(library)) append(list, library.string());
}

}  // namespace

std::string compose_preload(const PreloadParts& parts) {
  std::string list;
  append(list, parts.first);
  append_if_there(list, parts.libraries / "liboomdiag_preload.so");
  if (!parts.virtual_device.empty()) {
    for (const StandIn& library : kVirtualDeviceLibraries) {
      const bool is_asked_for =
          parts.cuda_major == 0 || library.cuda_major == 0 || library.cuda_major == parts.cuda_major;
      if (is_asked_for) append_if_there(list, parts.virtual_device / library.name);
    }
  }
  append(list, parts.users_own);
  return list;
}

bool can_be_preloaded(const std::filesystem::path& path) {
  return path.string().find_first_of(" :$\t\n") == std::string::npos;
}

PreloadFolder::PreloadFolder(const std::filesystem::path& folder) : path_(folder) {
  if (can_be_preloaded(folder)) return;
  std::error_code error;
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
  link_.emplace(!temporary.empty() && can_be_preloaded(temporary) ? temporary : "/tmp");
  path_ = link_->path() / "lib";
  std::filesystem::create_directory_symlink(folder, path_, error);
  if (error) {
    throw Error(
        ErrorKind::environment, fmt::format("cannot make a link in '{}': {}", link_->path().string(), error.message()),
        fmt::format("the loader cannot preload from '{}', whose path has a space, a colon or '$'; set TMPDIR to a "
                    "folder that can be written, or move oomdiag",
                    folder.string()));
  }
}

}  // namespace oomdiag
