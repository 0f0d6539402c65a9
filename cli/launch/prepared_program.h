#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/launch/diagnosis.h"
#include "cli/process/launcher.h"
#include "cli/process/temporary_folder.h"
#include "cli/python/install.h"
#include "cli/python/preload.h"

namespace oomdiag {

/// Where Inductor and Triton keep what they make for virtual GPUs: in the cache, or, where that is not the user's alone, in a
/// folder that goes with the run.
class VirtualCaches {
 public:
  VirtualCaches();

  /// Inductor and Triton keep what they tuned by the name of the GPU and would take it for a real one's of that name: times
  /// of a virtual GPU mean nothing. They have folders of their own beside the user's.
  std::vector<std::pair<const char*, std::string>> variables() const;

 private:
  std::optional<TemporaryFolder> for_this_run_;
  std::filesystem::path folder_;
};

/// The program of a request with the environment in which the recorder and, where one was asked for, the virtual device
/// reach it. What that environment names lives as long as this object.
class PreparedProgram {
 public:
  /// Throws Error(environment) where a folder cannot be made.
  PreparedProgram(const DiagnosisRequest& request, const Install& install);

  Program& program() { return program_; }

 private:
  PreloadFolder libraries_;
  std::optional<VirtualCaches> caches_;
  Program program_;
};

}  // namespace oomdiag
