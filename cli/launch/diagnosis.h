#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/device/device.h"
#include "cli/launch/ranks.h"
#include "cli/launch/steady.h"
#include "cli/process/launcher.h"
#include "cli/python/install.h"
#include "profiler/report/report.h"

namespace oomdiag {

/// A program to run under the recorder.
struct DiagnosisRequest {
  std::vector<std::string> program;
  DeviceChoice device;
  std::filesystem::path base;          ///< where the run folder is made
  std::optional<int64_t> batch{};      ///< batch size, where it is known
  int attach_at_step = 1;              ///< optimizer step to begin with
  bool shows_progress = false;         ///< a live line on the terminal, where there is one
  bool native_stacks = false;          ///< C++ calls of failed requests as well
  bool is_metered = false;             ///< the shapes of its operators are recorded, too, which slows it
  bool keeps_arguments = false;        ///< the arguments of its operator calls are recorded, too
  bool keeps_output = false;           ///< the program's output goes to output.txt in the run folder
  Environment environment{};           ///< variables of the program over our own
  std::filesystem::path input{};       ///< as of a Program
  std::string forked_by{};             ///< as of a Program
  std::optional<SingleRank> rank{};    ///< of a job whose others are not there
  std::optional<SteadyRule> steady{};  ///< end it when its peak does not rise any more
  int64_t judged_bytes = 0;            ///< fixes are judged as on a GPU of this size; 0 = the one that it runs on
};

/// What came of it.
struct Diagnosis {
  uint32_t stopped_at_step = 0;  ///< its peak was steady, so we ended it; 0 = it ended by itself
  Ending ending;
  std::filesystem::path folder;
  std::optional<Report> report;  ///< also in folder/report.json
  std::string why_no_report;     ///< one line, where there is none, or it could not be written into the folder
  std::string why_killed{};      ///< one line, where the program ended by SIGKILL
  std::vector<int> stages{};     ///< the ranks of the first pipeline that a single rank was in
};

/// Runs the program with the recorder and, on a virtual device, its libraries preloaded, then reads the trace. Throws
/// Error only if the program was not started; what goes wrong later is in why_no_report.
Diagnosis diagnose(const DiagnosisRequest& request, const Install& install);

}  // namespace oomdiag
