#include "cli/launch/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <new>
#include <optional>

#include "cli/device/device.h"
#include "cli/launch/live_line.h"
#include "cli/launch/prepared_program.h"
#include "cli/launch/ranks.h"
#include "cli/launch/run_config.h"
#include "cli/launch/steady.h"
#include "cli/process/files.h"
#include "cli/process/launcher.h"
#include "cli/process/temporary_folder.h"
#include "cli/process/workers.h"
#include "cli/python/install.h"
#include "cli/python/python.h"
#include "cli/reports/reports.h"
#include "cli/reports/run_folder.h"
#include "profiler/error.h"
#include "profiler/host.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

void check_virtual_device(const Install& install) {
  if (is_there(install.virtual_device / "libcuda.so.1")) return;
  throw Error(ErrorKind::environment,
              fmt::format("the virtual device is missing from '{}'", install.libraries.string()),
              "build it: scripts/build");
}

constexpr const char* kNoMemory = "no report: the host has not enough memory to read the trace";

std::string explain_absence(const Leftovers& left, const DiagnosisRequest& request, const Install& install) {
  if (!left.why_not_recorded.empty()) return fmt::format("no report: {}", left.why_not_recorded);
  if (!left.why_not_writable.empty())
    return fmt::format("no report: the folder of the run cannot be written: {}", left.why_not_writable);
  if (left.was_loaded && request.attach_at_step > 1) {
    return fmt::format(
        "no report: recording was to begin with step {}, and the program ended before it, or its optimizers "
        "open no Optimizer.step scopes",
        request.attach_at_step);
  }
  if (left.was_loaded) {
    constexpr const char* kNothing = "no CUDA memory was used; nothing to report";
    if (left.has_asked || is_python(request.program.front())) return kNothing;
    return fmt::format(
        "{}. If '{}' starts its program where LD_PRELOAD or the run folder do not reach it (env -i, sudo, another "
        "user, a container), run oomdiag there",
        kNothing, request.program.front());
  }
  if (!is_there(install.libraries / "liboomdiag_preload.so")) {
    return fmt::format("no report: the recorder is missing from '{}'; build it: scripts/build",
                       install.libraries.string());
  }
  return fmt::format(
      "no report: the recorder was not loaded into '{}'. LD_PRELOAD does not reach setuid and static programs, "
      "what they start, or a container; inside one, run oomdiag there",
      request.program.front());
}

// Processes whose launcher sets no RANK learn their rank late: until then their traces lie in the run folder itself, or in
// folders named after their pids.
void name_ranks(const std::filesystem::path& folder) {
  for (const std::filesystem::path& file : find_traces(folder)) {
    const std::filesystem::path place = file.parent_path();
    if (place.filename().string().starts_with(kRankFolder)) continue;
    const ProcessInfo process = read_process(file);
    const std::filesystem::path named = folder / fmt::format("{}{}", kRankFolder, process.rank);
    std::error_code ignored;
    if (process.world_size < 2 || is_there(named)) continue;
    if (place != folder) {
      std::filesystem::rename(place, named, ignored);
    } else if (std::filesystem::create_directory(named, ignored)) {
      std::filesystem::rename(file, named / "trace", ignored);
    }
  }
}

/// What the report says beside the trace; in a process of its own.
std::string make_report_apart(const Diagnosis& diagnosis, const DiagnosisRequest& request) {
  std::string why;
  std::optional<Report> report;
  try {
    write_run_config(run_config_of(request), diagnosis.folder);
    name_ranks(diagnosis.folder);
    report = explain_run(diagnosis.folder,
                         {.ending = diagnosis.ending,
                          .batch = request.batch,
                          .reference_case = {},
                          .judged_bytes = request.judged_bytes},
                         /*write_each=*/true);
    keep_json(*report, diagnosis.folder);
    remove_shared_files(diagnosis.folder);
  } catch (const std::bad_alloc&) {
    why = kNoMemory;
  } catch (const std::exception& error) {
    why = fmt::format("no report: {}", error.what());
  }
  std::ranges::replace(why, '\n', ' ');
  return why + '\n' + (report ? pack(*report) : "");
}

// The program has ended: whatever goes wrong from here on, a report that cannot be made for want of memory too, leaves its
// exit code alone. So a process of its own makes it, and comes to no harm but its own.
void read_outcome(Diagnosis& diagnosis, const DiagnosisRequest& request, const Install& install) {
  try {
    const Leftovers left = look_into(diagnosis.folder);
    if (!left.has_trace) {
      diagnosis.why_no_report = explain_absence(left, request, install);
      return;
    }
    const auto answer = run_apart([&] { return make_report_apart(diagnosis, request); });
    if (!answer) {
      diagnosis.why_no_report = kNoMemory;
      return;
    }
    const std::size_t line = answer->find('\n');
    diagnosis.why_no_report = answer->substr(0, line);
    if (line + 1 < answer->size()) diagnosis.report = unpack(std::string_view(*answer).substr(line + 1));
  } catch (const Interrupted&) {
    diagnosis.why_no_report = "no report: interrupted before it was made; oomdiag explain makes it from the run folder";
  } catch (const std::bad_alloc&) {
    diagnosis.why_no_report = kNoMemory;
  } catch (const std::exception& error) {
    diagnosis.why_no_report = fmt::format("no report: {}", error.what());
  }
}

/// Why a program ended by SIGKILL that nobody here sent; empty for others. `kills` counted the kernel's before the run.
std::string explain_kill(const Ending& ending, std::optional<int64_t> kills) {
  if (ending.signal != SIGKILL) return {};
  const std::string killed = "the program was killed by SIGKILL (exit code 137)";
  const std::optional<int64_t> now = count_oom_kills();
  if (kills && now && *now > *kills) {
    return killed + ": the kernel's OOM killer ended it, as the host's memory or the limit of its cgroup was used up";
  }
  return killed + ", often by the kernel's OOM killer: host memory was used up; see dmesg";
}

}  // namespace

Diagnosis diagnose(const DiagnosisRequest& request, const Install& install) {
  if (request.device.is_virtual()) check_virtual_device(install);
  check_driver(request.device, install.torch_version);
  PreparedProgram prepared(request, install);
  Program& program = prepared.program();
  std::optional<TemporaryFolder> job_folder;
  if (request.rank) {
    job_folder.emplace();
    const Environment variables = environment_of_rank(*request.rank, job_folder->path(), install);
    program.environment.insert(program.environment.end(), variables.begin(), variables.end());
  }
  Diagnosis diagnosis;
  const std::optional<int64_t> kills = count_oom_kills();
  LiveLine line;
  std::optional<Tick> tick;
  if (request.shows_progress && line.is_shown()) tick = Tick{.work = [&] { line.update(diagnosis.folder); }};
  SteadyWatch watch(request.steady.value_or(SteadyRule{}));
  if (request.steady) {
    tick = Tick{.every = std::chrono::milliseconds(100),
                .work = [&] { watch.look(diagnosis.folder); },
                .is_enough = [&] { return watch.is_over(); }};
  }
  try {
    diagnosis.ending = launch(
        program, [&](pid_t child) { return diagnosis.folder = make_run_folder(request.base, child); }, tick);
  } catch (const Error&) {
    if (!diagnosis.folder.empty()) remove_empty_run(diagnosis.folder);
    throw;
  }
  diagnosis.why_killed = explain_kill(diagnosis.ending, kills);
  if (job_folder) diagnosis.stages = read_stages(job_folder->path());
  if (watch.is_over()) {
    diagnosis.stopped_at_step = watch.step();
    diagnosis.ending = {};  // it was we who ended it: what was seen counts as a run that passed
    diagnosis.why_killed.clear();
  }
  read_outcome(diagnosis, request, install);
  return diagnosis;
}

}  // namespace oomdiag
