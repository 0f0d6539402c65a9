#include "cli/reports/reports.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "cli/device/snapshot_device.h"
#include "cli/process/files.h"
#include "cli/process/launcher.h"
#include "cli/process/temporary_folder.h"
#include "cli/reports/alive.h"
#include "cli/reports/bundle.h"
#include "cli/reports/run_folder.h"
#include "cli/reports/run_work.h"
#include "cli/terminal/terminal.h"
#include "profiler/error.h"
#include "profiler/report/json/json.h"
#include "profiler/report/make/job.h"
#include "profiler/report/make/make_report.h"
#include "profiler/report/make/whole_run.h"
#include "profiler/report/report.h"
#include "profiler/snapshot/format.h"
#include "profiler/snapshot/packed.h"
#include "profiler/snapshot/snapshot.h"
#include "profiler/snapshot/to_trace.h"
#include "profiler/trace/format.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace fs = std::filesystem;
namespace {

constexpr const char* kTraces = "give a run folder (oomdiag-<pid>), its trace, or a snapshot.pickle of PyTorch";

[[noreturn]] void reject_format(const fs::path& file, FileFormat format, const char* hint) {
  if (format == FileFormat::empty) throw Error(ErrorKind::input, fmt::format("'{}' is empty", file.string()), hint);
  throw Error(ErrorKind::input, fmt::format("'{}' is {}", file.string(), describe_format(file)), hint);
}

// Errors name the file that was given.
template <class Read>
auto named(const fs::path& file, const fs::path& as, const Read& read) {
  try {
    return read(file);
  } catch (const Error& error) {
    std::string text = error.what();
    if (const size_t at = text.find(file.string()); file != as && at != text.npos) {
      text.replace(at, file.string().size(), as.string());
    }
    throw Error(error.kind(), text, error.hint());
  }
}

// Reports are small; a profiler's trace.json, which begins with '{' too, may have many GiB.
constexpr uintmax_t kMaxReportBytes = 64 << 20;

Report read_report(const fs::path& file) {
  std::error_code ignored;
  if (const uintmax_t bytes = fs::file_size(file, ignored); bytes != ~uintmax_t{0} && bytes > kMaxReportBytes) {
    throw Error(ErrorKind::input,
                fmt::format("'{}' is no report of oomdiag: it has {} MiB", file.string(), bytes >> 20), kTakes);
  }
  try {
    return from_json(read_file(file));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("'{}': {}", file.string(), error.what()), error.hint());
  }
}

/// The report on a run made anew, with what the one that lies there has from other runs.
Report with_measured(Report report, const fs::path& earlier) {
  if (!is_there(earlier)) return report;
  try {
    keep_measured(report, read_report(earlier));
  } catch (const Error&) {  // the trace alone will do
  }
  return report;
}

/// A program that has not ended may still run: then its trace is not that of one that was killed.
bool still_runs(const Trace& trace, const fs::path& file, const RunFacts& facts) {
  return !facts.ending && trace.process.end_state == EndState::running && has_mapped(trace.process.pid, file);
}

/// What the report of a run remembers and its trace does not know.
RunFacts remembered_facts(const fs::path& file) {
  if (!is_there(file)) return {};
  try {
    const Report report = read_report(file);
    RunFacts facts;
    if (report.exit_code) facts.ending = Ending{.exit_code = *report.exit_code, .signal = 0};
    facts.reference_case = report.reference_case;
    for (const ReportOfDevice& device : report.devices) {
      if (device.batch && !device.batch->inferred) facts.batch = device.batch->batch;
    }
    return facts;
  } catch (const Error&) {
    return {};  // the trace alone will do
  }
}

}  // namespace

namespace {

/// The report on `trace`, which stays in `kept` with its history.
void explain_into(Explained& kept, Trace trace, const ReportInputs& inputs) {
  kept.trace = std::make_unique<Trace>(std::move(trace));
  kept.report = make_report(*kept.trace, inputs, kept.history);
}

Explained explain_kept(const fs::path& file, const RunFacts& facts) {
  ReportInputs inputs{.batch = facts.batch, .judged_bytes = facts.judged_bytes};
  if (facts.ending && facts.ending->signal != 0) inputs.signal = facts.ending->signal;
  if (facts.ending && facts.ending->signal == 0) inputs.exit_code = facts.ending->exit_code;
  if (file.filename() == "trace") inputs.folder = as_typed(file.parent_path());
  Trace recorded = read_trace(file);
  inputs.still_runs = still_runs(recorded, file, facts);
  Explained kept;
  kept.file = file;
  explain_into(kept, std::move(recorded), inputs);
  if (file.filename() == "trace") kept.report.work = read_run_work(file, *kept.trace, kept.report);
  kept.report.reference_case = facts.reference_case;
  return kept;
}

}  // namespace

void add_source(CLI::App& command, std::string& path, const char* name) {
  command.add_option(name, path, "a run folder, a trace, a report, a bundle or a snapshot.pickle")
      ->type_name("")
      ->required();
}

void add_optional_source(CLI::App& command, std::string& path) {
  command
      .add_option("FILE", path,
                  "a run folder, a trace, a report, a bundle or a snapshot.pickle; default: the newest run here")
      ->type_name("");
}

std::string source_or_newest_run(const std::string& path) {
  if (!path.empty()) return path;
  const fs::path newest = newest_run();
  if (newest.empty()) {
    throw Error(ErrorKind::usage, fmt::format("no run here, neither in {} nor in this folder", kRunsFolder), kTakes);
  }
  say(fmt::format("the newest run: {}", newest.string()));
  return newest.string();
}

void check_exists(const fs::path& path, const char* hint) {
  if (access(path.c_str(), F_OK) == 0) return;
  const int error = errno;
  if (error == ENOENT || error == ENOTDIR) {
    throw Error(ErrorKind::usage, fmt::format("no such file or directory: '{}'", path.string()), hint);
  }
  throw Error(ErrorKind::usage, fmt::format("cannot look at '{}': {}", path.string(), std::strerror(error)));
}

Report explain_run(const fs::path& folder, const RunFacts& facts, bool write_each) {
  const std::vector<fs::path> traces = find_traces(folder);
  if (traces.empty()) {
    if (access(folder.c_str(), R_OK | X_OK) != 0) {
      throw Error(ErrorKind::input, fmt::format("cannot read '{}': {}", folder.string(), std::strerror(errno)));
    }
    throw Error(ErrorKind::input, fmt::format("'{}' holds neither a trace nor a report", folder.string()), kTakes);
  }
  if (traces.size() == 1) return explain_kept(traces.front(), facts).report;
  std::vector<JobMember> members;
  for (const fs::path& file : traces) {
    const Trace trace = read_trace(file);
    const ReportInputs inputs{
        .judged_bytes = facts.judged_bytes, .still_runs = still_runs(trace, file, facts), .folder = as_typed(folder)};
    JobMember member{.report = make_report(trace, inputs),
                     .folder = file.parent_path().lexically_relative(folder).string(),
                     .pid = trace.process.pid,
                     .start_time_ns = trace.process.start_time_ns};
    if (member.folder == ".") member.folder.clear();
    if (write_each && !member.folder.empty()) keep_json(member.report, file.parent_path());
    members.push_back(std::move(member));
  }
  std::optional<int> exit_code;
  if (facts.ending) exit_code = facts.ending->code();
  return merge_job(members, exit_code);
}

Trace load_trace(const fs::path& path) {
  check_exists(path, kTraces);
  if (is_folder(path)) {
    if (is_there(path / "trace")) return read_trace(path / "trace");
    throw Error(ErrorKind::input, fmt::format("'{}' holds no trace", path.string()), kTraces);
  }
  const FileFormat format = find_format(path);
  if (format == FileFormat::gzip && is_bundle(path)) {
    const TemporaryFolder unpacked;
    unpack_bundle(path, unpacked.path());
    return named(unpacked.path(), path, load_trace);
  }
  if (format == FileFormat::gzip) return named(UnpackedFile(path).path(), path, load_trace);
  if (format == FileFormat::pickle) return to_trace(read_snapshot(path));
  if (format != FileFormat::trace) reject_format(path, format, kTraces);
  return read_trace(path);
}

namespace {

Explained explain_snapshot(const fs::path& path, const fs::path& as, const SnapshotDevice& gpu) {
  Trace trace = to_trace(read_snapshot(path));
  set_device_of_snapshot(gpu, trace);
  Explained kept;
  explain_into(kept, std::move(trace), {.folder = as.string()});
  return kept;
}

[[noreturn]] void reject_gpu(const fs::path& path) {
  throw Error(ErrorKind::usage, "--device and --memory are for snapshots of PyTorch, which do not name their GPU",
              fmt::format("'{}' names it: leave them out", path.string()));
}

Explained only(Report report) {
  Explained kept;
  kept.report = std::move(report);
  return kept;
}

std::vector<fs::path> by_start(const std::vector<fs::path>& traces) {
  std::vector<std::pair<uint64_t, fs::path>> started;
  for (const fs::path& file : traces) started.emplace_back(read_process(file).start_time_ns, file);
  std::sort(started.begin(), started.end());
  std::vector<fs::path> sorted;
  for (auto& [start, file] : started) sorted.push_back(std::move(file));
  return sorted;
}

Explained load_folder(const fs::path& path) {
  const fs::path earlier = path / "report.json";
  const std::vector<fs::path> traces = find_traces(path);
  if (traces.empty() && is_there(earlier)) return only(read_report(earlier));
  const RunFacts facts = remembered_facts(earlier);
  if (traces.size() != 1) {
    Explained job = only(with_measured(explain_run(path, facts), earlier));
    job.processes = by_start(traces);
    return job;
  }
  Explained kept = explain_kept(traces.front(), facts);
  kept.report = with_measured(std::move(kept.report), earlier);
  return kept;
}

Explained load_bundle(const fs::path& path) {
  auto unpacked = std::make_shared<TemporaryFolder>();
  unpack_bundle(path, unpacked->path());
  Explained kept = load_folder(unpacked->path());
  kept.report.folder = path.string();
  kept.unpacked = std::move(unpacked);
  return kept;
}

Explained load_file(const fs::path& path, const fs::path& as, const SnapshotDevice& gpu) {
  const FileFormat format = find_format(path);
  if (format == FileFormat::gzip && is_bundle(path)) {
    if (gpu.is_given()) reject_gpu(as);
    return load_bundle(path);
  }
  if (format == FileFormat::gzip && path == as) {
    const UnpackedFile unpacked(path);
    return named(unpacked.path(), path, [&](const fs::path& file) { return load_file(file, path, gpu); });
  }
  if (format == FileFormat::pickle) return explain_snapshot(path, as, gpu);
  if (gpu.is_given()) reject_gpu(as);
  if (format == FileFormat::report) return only(read_report(path));
  if (format != FileFormat::trace) reject_format(path, format, kTakes);
  const bool is_of_a_run = path.filename() == "trace";
  return explain_kept(path, is_of_a_run ? remembered_facts(path.parent_path() / "report.json") : RunFacts{});
}

}  // namespace

Explained load_explained(const fs::path& path, const SnapshotDevice& gpu) {
  check_exists(path);
  if (!is_folder(path)) return load_file(path, path, gpu);
  if (gpu.is_given()) reject_gpu(path);
  return load_folder(path);
}

Report load_report(const fs::path& path, const SnapshotDevice& gpu) { return load_explained(path, gpu).report; }

}  // namespace oomdiag
