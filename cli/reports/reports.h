#pragma once

#include <sys/types.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/device/snapshot_device.h"
#include "cli/process/launcher.h"
#include "cli/process/temporary_folder.h"
#include "profiler/replay/history.h"
#include "profiler/report/report.h"
#include "profiler/trace/trace.h"

namespace CLI {
class App;
}

namespace oomdiag {

/// What load_report() and load_explained() read, as a hint.
inline constexpr const char* kTakes =
    "give a run folder (oomdiag-<pid>), its trace, a report.json, a bundle, or a snapshot.pickle of PyTorch";

/// Throws Error(usage), with `hint`, if there is nothing at `path`.
void check_exists(const std::filesystem::path& path, const char* hint = kTakes);

/// Adds the argument that names what load_report() and load_explained() read.
void add_source(CLI::App& command, std::string& path, const char* name = "FILE");

/// The same where it may be left out; source_or_newest_run() then gives what is read.
void add_optional_source(CLI::App& command, std::string& path);

/// `path`, or where it is empty the newest run here, which is said on stderr. Throws Error(usage) if there is none.
std::string source_or_newest_run(const std::string& path);

/// What is known of a run besides its trace.
struct RunFacts {
  std::optional<Ending> ending{};
  std::optional<int64_t> batch{};              ///< batch size
  std::optional<ReportCase> reference_case{};  ///< explained by runs that are gone
  int64_t judged_bytes = 0;  ///< fixes are judged as on a GPU of this size; 0 = the one that it ran on
};

/// The trace at `path`: a trace, the trace of a run folder, or a PyTorch memory snapshot read as one. Throws Error(input)
/// for anything else.
Trace load_trace(const std::filesystem::path& path);

/// The report on all processes of a run, given its folder. Of several it is a merged one; `write_each` leaves their own reports
/// beside their traces. Throws Error(input) if there is no trace.
Report explain_run(const std::filesystem::path& folder, const RunFacts& facts, bool write_each = false);

/// The report in or on `path`: a trace, a report, a PyTorch memory snapshot, or a run folder. Of a folder the trace is explained anew, with the
/// exit code and the batch size that its report remembers. `gpu`: of a snapshot, given by the user. Throws Error(input)
/// for anything else, Error(usage) if a GPU is given for what names its own.
Report load_report(const std::filesystem::path& path, const SnapshotDevice& gpu = {});

/// A report and, where it was made here, what it was made from.
struct Explained {
  Report report{};
  std::unique_ptr<Trace> trace{};                  ///< null where there was a report only, or several processes
  History history{};                               ///< its names are views into `trace`
  std::vector<std::filesystem::path> processes{};  ///< their traces, where there are several, the first to record first
  bool is_redacted = false;                        ///< only the report may be shown
  std::filesystem::path source{};                  ///< what the user named
  std::filesystem::path file{};                    ///< of `trace`
  std::string at{};                                ///< the moment that an exported snapshot shows; empty: the end
  std::string work_device{};                       ///< whose rates are asked for; empty: those of the GPU of the report
  std::shared_ptr<TemporaryFolder> unpacked{};     ///< of a bundle: where `processes` lie
};

/// The same with what it was made from.
Explained load_explained(const std::filesystem::path& path, const SnapshotDevice& gpu = {});

/// Writes `text` to `file`: whole or not at all; what is no regular file (/dev/stdout, a pipe) is written and stays what it is.
/// Throws Error(environment).
void write_whole(const std::string& text, const std::filesystem::path& file, mode_t mode = 0666);
/// Writes the JSON to `file` likewise.
void write_json(const Report& report, const std::filesystem::path& file, mode_t mode = 0666);
/// The same as `folder`/report.json, for its owner only: it holds command lines and paths.
void keep_json(const Report& report, const std::filesystem::path& folder);

/// A report as text for another process of oomdiag, and back: with what its JSON leaves out.
std::string pack(const Report& report);
Report unpack(std::string_view text);

/// Throws Error(usage) if a report could not be written to `file`, which `option` names: before a long run, not after it.
/// Empty is fine.
void check_writable(const std::filesystem::path& file, const char* option = "-o");

/// Writes the text as people read it, its headline in bold where `stream` is a terminal that may be coloured. Throws
/// Error(environment) if stdout does not take it. `all`: every table, not the first screen only. `next`: the command to go on with, where
/// it is none about the report.
void print_text(const Report& report, std::FILE* stream, bool all = false, const std::string& next = {});

/// Writes the JSON to stdout. Throws likewise.
void print_json(const Report& report);

}  // namespace oomdiag
