#pragma once

#include <sys/types.h>

#include <array>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace oomdiag {

class TraceFollower;

/// In the current folder: where runs go that name no folder. Git ignores what is in it.
inline constexpr std::string_view kRunsFolder = "oomdiag-runs";

/// The folder in which run folders are made: `requested`, or kRunsFolder, which are created. Where the current folder
/// cannot be written, says so and takes the temporary folder. Throws Error(environment) if `requested` cannot be used.
std::filesystem::path choose_base(const std::string& requested);

/// Makes and returns `base`/oomdiag-<pid>, or …-<pid>-2 and so on where an older run has that name; for its owner
/// only, as traces hold command lines and paths. Throws
/// Error(environment) if it cannot.
std::filesystem::path make_run_folder(const std::filesystem::path& base, pid_t pid);

/// Whether a run folder may have this name: "oomdiag-4711", "oomdiag-4711-2".
bool is_run_folder_name(std::string_view name);

/// The run folder in kRunsFolder, or in the current folder, that was changed last; empty if there is none.
std::filesystem::path newest_run();

/// Files that a run, its report or a command over it (fix, explain --open) writes into its folder. Nothing else is ever
/// removed from there.
inline constexpr std::string_view kRunConfigFile = "run.json", kFixFile = "fix.json";
/// What a metered run did (extension/record/work_meter.h).
inline constexpr std::string_view kWorkFile = "work";
inline constexpr std::string_view kArgumentsFile = "arguments";  ///< see extension/record/op_arguments.h
inline constexpr std::array<std::string_view, 10> kRunFiles = {"trace",   "report.json", "report.html",  "output.txt",
                                                               "loaded",  "gpus",        kRunConfigFile, kFixFile,
                                                               kWorkFile, kArgumentsFile};
/// Whether this is the name of one of them, or of one that was being written.
bool is_run_file(std::string_view name);

/// In a run folder each rank has its own: this, its number, and perhaps a dash and a process id.
inline constexpr std::string_view kRankFolder = "rank-";

/// How a run was started (kRunConfigFile): that of its folder, and of the folder of a rank that lies beside it. Need not be there.
std::filesystem::path run_config_file(const std::filesystem::path& folder);

/// In a run folder, while a run lasts: files that ranks share (extension/virtual_device/nccl/unique_id.h).
inline constexpr std::string_view kSharedFolder = "ranks";

/// What a run left in its folder.
struct Leftovers {
  bool was_loaded = false;         ///< the shim was loaded into a process
  bool has_asked = false;          ///< a process with the recorder asked for CUDA
  bool has_trace = false;          ///< CUDA was used there, and the recorder wrote
  std::string why_not_writable{};  ///< why the folder takes no file, as on a full disk, or empty
  std::string why_not_recorded{};  ///< why a process was not recorded, or empty
};

/// The traces of all processes of a run: the one in the folder itself first, then those of ranks in their order, then others.
std::vector<std::filesystem::path> find_traces(const std::filesystem::path& folder);

/// Follows the first of them while the run lasts; null where there is none yet.
std::unique_ptr<TraceFollower> follow_run(const std::filesystem::path& folder);

Leftovers look_into(const std::filesystem::path& folder);

/// Removes what processes of a run shared while it lasted: the status file of the shim, the table of the virtual GPUs,
/// and what ranks that were killed have left.
void remove_shared_files(const std::filesystem::path& folder);

/// Takes the folder of a run without a trace away again, unless somebody else put something in; kRunsFolder too, if it was the
/// only one there.
void remove_empty_run(const std::filesystem::path& folder);

/// The last five lines of what a program printed, indented: what a program says of its own failure is worth more than what
/// we can say.
std::string last_lines(const std::filesystem::path& output);

/// The last line of it that says something: of a Python program the error, and that of a rank where torchrun says that one failed.
std::string last_line(const std::filesystem::path& output);

/// The path as somebody in the current folder would type it.
std::string as_typed(const std::filesystem::path& path);

}  // namespace oomdiag
