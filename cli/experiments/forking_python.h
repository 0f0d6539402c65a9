#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/launch/diagnosis.h"
#include "cli/launch/prepared_program.h"
#include "cli/process/temporary_folder.h"
#include "cli/python/install.h"

namespace oomdiag {

/// The words of `python [-u] [-B] train.py …` up to the script, which are all that its imports depend on; nullopt for
/// another program.
std::optional<std::vector<std::string>> python_and_script(const std::vector<std::string>& program);

/// A process that has made the imports of a Python program and forks it for each run; see cli/process/forked_program.h. It
/// ends with this object.
class ForkingPython {
 public:
  /// For runs like this one; nullptr where it is no such program, a rank of a job or on a real GPU, or cannot be started.
  static std::unique_ptr<ForkingPython> start(const DiagnosisRequest& request, const Install& install);
  ~ForkingPython();
  ForkingPython(const ForkingPython&) = delete;
  ForkingPython& operator=(const ForkingPython&) = delete;

  /// Whether it can fork this one: of the same script, with no other variables than ours.
  bool serves(const DiagnosisRequest& request) const;
  std::string socket() const;

 private:
  ForkingPython(const DiagnosisRequest& request, const Install& install);
  void spawn(int listener);

  TemporaryFolder folder_;
  PreparedProgram prepared_;
  std::vector<std::string> command_;  ///< python_and_script
  bool has_fixes_ = false;
  int stdin_ = -1;
  pid_t child_ = -1;
};

}  // namespace oomdiag
