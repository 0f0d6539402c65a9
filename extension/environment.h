#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

// All variables of the environment that are oomdiag's own; no other file of C++ spells their names. docs/environment.md is
// generated from the lines below by scripts/environment, and a test compares.

namespace oomdiag::variables {

// ## For users

/// `1`, or the name of a virtual device: a Python with an installed oomdiag goes on under `oomdiag run`; read by its oomdiag.pth
inline constexpr char kSwitch[] = "OOMDIAG";
/// libraries that are preloaded before oomdiag's own, for a sanitizer's runtime in a program that defines `__asan_default_options` itself
inline constexpr char kPreloadFirst[] = "OOMDIAG_PRELOAD_FIRST";
/// `1`: allocations are recorded with the C++ frames that made them, as by `run --native-stacks`
inline constexpr char kNativeStacks[] = "OOMDIAG_NATIVE_STACKS";
/// not empty: calls of the driver that take or give memory are recorded with the names of the functions that made them
inline constexpr char kDriverStacks[] = "OOMDIAG_DRIVER_STACKS";
/// MiB of the trace that hold the newest events; 256 where it is not set
inline constexpr char kTraceMib[] = "OOMDIAG_TRACE_MIB";
inline constexpr int64_t kUsualTraceMib = 256, kMaxTraceMib = int64_t{1} << 20;
/// `1`: each step is recorded operator by operator, also where steps repeat
inline constexpr char kEveryStep[] = "OOMDIAG_EVERY_STEP";
/// `0`: neither CUPTI nor NVML is used: non-PyTorch memory is not recorded
inline constexpr char kCupti[] = "OOMDIAG_CUPTI";
/// the links between the GPUs of a job, which decide the size of NCCL's buffers: the second part of `run --topology`
inline constexpr char kTopology[] = "OOMDIAG_TOPOLOGY";
/// `1`: a virtual device says on stderr what it notes for the report: what is estimated, and what it does not serve
inline constexpr char kDeviceLog[] = "OOMDIAG_DEVICE_LOG";
/// the recorder that `import oomdiag` loads; `oomdiag env` prints it
inline constexpr char kLibrary[] = "OOMDIAG_LIBRARY";

// ## Set by oomdiag for the program that it runs

/// the run folder; empty or not set: nothing is recorded
inline constexpr char kOutput[] = "OOMDIAG_OUTPUT";
/// the recorder that the preloaded shim loads
inline constexpr char kRecorder[] = "OOMDIAG_RECORDER";
/// the version of torch that the recorder is for
inline constexpr char kRecorderFor[] = "OOMDIAG_RECORDER_FOR";
/// why there is no recorder for the program's torch
inline constexpr char kNoRecorder[] = "OOMDIAG_NO_RECORDER";
/// the library that makes reports inside the program
inline constexpr char kReports[] = "OOMDIAG_REPORTS";
/// the step with which recording begins
inline constexpr char kAttachAtStep[] = "OOMDIAG_ATTACH_AT_STEP";
/// `1`: the shapes of operators are written beside the trace, as by `run --meter`; that slows the program
inline constexpr char kMeter[] = "OOMDIAG_METER";
/// `1`: the arguments of each operator call are written beside the trace, from which `oomdiag fit` makes single calls again
inline constexpr char kArguments[] = "OOMDIAG_ARGUMENTS";
/// the Python that oomdiag was installed for
inline constexpr char kPython[] = "OOMDIAG_PYTHON";
/// a JSON list of [id, settings] of what `oomdiag fix` applies to the program
inline constexpr char kFixes[] = "OOMDIAG_FIXES";

/// the virtual device on which `pytest --oomdiag-device` runs the tests
inline constexpr char kPytest[] = "OOMDIAG_PYTEST";

// ## Set by oomdiag for a virtual device

/// device files, one a line: one for each GPU
inline constexpr char kGpu[] = "OOMDIAG_DEVICE_FILES";
/// bytes of each GPU, instead of those in its file
inline constexpr char kMemory[] = "OOMDIAG_MEMORY";
/// the driver: a branch as 550, or Windows' driver model, as wddm or wddm+16GiB
inline constexpr char kDriver[] = "OOMDIAG_DRIVER";
/// `1`: work takes the time that it would take on the GPU
inline constexpr char kClocked[] = "OOMDIAG_CLOCKED";
/// compute capabilities that the program's torch has code for, as `75,80`
inline constexpr char kArchitectures[] = "OOMDIAG_ARCHITECTURES";
/// the library by which the virtual device knows what memory holds; `0`: it is to know nothing
inline constexpr char kContents[] = "OOMDIAG_CONTENTS";

// ## Set by oomdiag for a rank whose others are not there

/// the folder that the ranks of the job share
inline constexpr char kRankJob[] = "OOMDIAG_RANK_JOB";
/// the working folder in which other ranks are started
inline constexpr char kRankFolder[] = "OOMDIAG_RANK_FOLDER";
/// `1` in a rank that was started for what only it makes
inline constexpr char kRankSummoned[] = "OOMDIAG_RANK_SUMMONED";
/// the process that started such ranks, with which they end
inline constexpr char kRankOwner[] = "OOMDIAG_RANK_OWNER";

// ## For tests

/// processes that a virtual device reports beside the program, as `999:trainer:1073741824,…`
inline constexpr char kOtherProcesses[] = "OOMDIAG_OTHER_PROCESSES";
/// a tool that holds CUPTI on a virtual device from the start
inline constexpr char kCuptiHolder[] = "OOMDIAG_CUPTI_HOLDER";

// What a variable of any name says.

/// The environment that this process was started with: variables, each begun by a NUL.
inline std::string environment_at_start() {
  std::string all(1, '\0');
  const int file = open("/proc/self/environ", O_RDONLY | O_CLOEXEC);
  std::array<char, 4096> part{};
  for (ssize_t count = 0; (count = read(file, part.data(), part.size())) > 0;) {
    all.append(part.data(), static_cast<std::size_t>(count));
  }
  if (file >= 0) close(file);
  return all;
}

/// Where a program has cleared its environment before it uses CUDA, as unittest.mock.patch.dict(os.environ, clear=True) does,
/// what one of our variables was as the process was started; null where it was not set.
inline const char* text_if_cleared(const char* name) noexcept try {
  if (!std::string_view(name).starts_with("OOMDIAG_")) return nullptr;
  for (const char* ours : {kOutput, kRecorder, kGpu}) {
    if (std::getenv(ours) != nullptr) return nullptr;
  }
  static const auto& all = *new std::string(environment_at_start());
  const std::string begin = '\0' + std::string(name) + '=';
  const std::size_t found = all.find(begin);
  return found == std::string::npos ? nullptr : all.c_str() + found + begin.size();
} catch (...) {
  return nullptr;
}

/// Empty where it is not set.
inline const char* text(const char* name) noexcept {
  const char* value = std::getenv(name);
  if (value == nullptr) value = text_if_cleared(name);
  return value == nullptr ? "" : value;
}
/// `otherwise` where it is not set or no number.
inline int64_t number(const char* name, int64_t otherwise) noexcept {
  const char* const written = text(name);
  char* end = nullptr;
  const int64_t value = std::strtoll(written, &end, 10);
  return end == written ? otherwise : value;
}
/// Whether it is set to anything but 0.
inline bool is_on(const char* name) noexcept { return *text(name) != '\0' && *text(name) != '0'; }

}  // namespace oomdiag::variables
