#include "cli/experiments/match_program.h"

#include <fmt/format.h>

#include <utility>

#include "cli/device/device.h"
#include "cli/device/snapshot_device.h"
#include "cli/experiments/executor.h"
#include "cli/launch/diagnosis.h"
#include "cli/launch/programs.h"
#include "cli/process/temporary_folder.h"
#include "cli/python/install.h"
#include "cli/reports/reports.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/snapshot/compare.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

std::string describe_event(const ComparedEvent& event) {
  if (event.what.empty()) return "nothing";
  return fmt::format("{} of {} bytes{}", event.what, event.bytes, event.where.empty() ? "" : " at " + event.where);
}

void reject_other_program(const Comparison& found) {
  const ComparedSequence& blocks = found.blocks;
  if (found.is_same_program()) return;
  std::string difference = "it allocated nothing";
  if (!blocks.first.empty()) {
    const auto& [there, here] = blocks.first.front();
    difference =
        fmt::format("number {} is {} in the snapshot, and {} here", there.what.empty() ? here.number : there.number,
                    describe_event(there), describe_event(here));
  }
  throw Error(ErrorKind::input,
              fmt::format("the program does not do what the snapshot shows: {} of {} allocs and frees are equal; {}",
                          blocks.equal, blocks.left_events, difference),
              "give the command that the snapshot was taken of, with its batch size and its version of torch");
}

std::string summarise(const Comparison& found) {
  const std::string peaks =
      found.left_peak_bytes == found.right_peak_bytes
          ? fmt::format("the same peak, {} bytes", found.left_peak_bytes)
          : fmt::format("a peak of {} bytes, here {}", found.left_peak_bytes, found.right_peak_bytes);
  const std::string others =
      found.blocks.changed > 0 ? fmt::format(", {} have another size there", found.blocks.changed) : "";
  return fmt::format(
      "{} of {} allocs and frees of the snapshot ({:.3f} %) are those of a run on a virtual device, which is "
      "explained{}; "
      "the snapshot has {}, and {} bytes reserved, here {}",
      found.blocks.equal, found.blocks.left_events, found.blocks.equal_percent(), others, peaks,
      found.left_reserved_bytes, found.right_reserved_bytes);
}

DiagnosisRequest request_run(const Trace& snapshot, const SnapshotDevice& gpu, std::vector<std::string> program,
                             Install& install) {
  DeviceOptions device;
  device.device = gpu.device;
  device.memory = gpu.memory;
  DiagnosisRequest request;
  request.program = resolve_program(std::move(program), install);
  request.device = choose_device(device, install);
  request.keeps_output = true;
  const std::string& settings = snapshot.process.allocator_settings;
  if (!settings.empty()) request.environment.emplace_back("PYTORCH_CUDA_ALLOC_CONF", settings);
  return request;
}

}  // namespace

Explained match_program(const std::filesystem::path& snapshot, const SnapshotDevice& gpu,
                        std::vector<std::string> program) {
  if (gpu.device.empty()) {
    throw Error(ErrorKind::usage, "a snapshot does not name its GPU", "name it: --device rtx4090");
  }
  const Trace shown = load_trace(snapshot);
  Install install = find_install();
  DiagnosisRequest request = request_run(shown, gpu, std::move(program), install);
  const auto folder = std::make_shared<TemporaryFolder>();
  request.base = folder->path();
  Executor executor(install);
  const Executed done = executor.run({request}, [](std::size_t) {}).front();
  if (!done.has_report()) throw Error(ErrorKind::environment, "the program left no recording: " + done.why_no_report);

  const Comparison found = compare(shown, load_trace(done.folder), 0);
  reject_other_program(found);
  const std::string summary = summarise(found);
  say(summary);
  Explained explained = load_explained(done.folder);
  explained.report.folder.clear();  // it goes with this process
  explained.report.limitations.push_back(summary);
  explained.unpacked = folder;
  return explained;
}

}  // namespace oomdiag
