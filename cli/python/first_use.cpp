// What depends on PyTorch's headers is the recorder and the contents library: virtual tables and structures change with nearly
// every release (none of what they use is in the stable ABI). So both go along as sources and are built when a program with a
// torch is first run, a few large files, half a minute on two processors. What is built is loaded beside that torch before it
// counts as built.
//
// Only from a folder that nobody else can write (cache.h).
//
//   ~/.cache/oomdiag/recorders/2.9.1+cu128-cpython-311-<sources>/    liboomdiag.so, liboomdiag_forget.so, architectures
//                              2.9.1+cu128-….lock                    held while it is built
//                              2.9.1+cu128-….building/               units and what the compiler said; stays where it failed

#include "cli/python/first_use.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <utility>

#include "cli/process/environment.h"
#include "cli/process/files.h"
#include "cli/process/launcher.h"
#include "cli/process/workers.h"
#include "cli/python/cache.h"
#include "cli/python/install.h"
#include "cli/python/python.h"
#include "cli/terminal/terminal.h"
#include "extension/environment.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

namespace fs = std::filesystem;

constexpr long kBytesOfCompiler = 1L << 30;  ///< that one unit takes

// NDEBUG is torch's own: without it some of its classes have members more (RecordFunction).
constexpr const char* kFlags[] = {"-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-w"};

/// Our sources are C++20, and so were torch's headers up to 2.15; where they want more, the second is tried.
constexpr const char* kStandards[] = {"-std=c++20", "-std=c++23"};

/// What conda's packages of CUDA call this machine.
#ifdef __aarch64__
constexpr const char* kCondaTarget = "sbsa-linux";
#else
constexpr const char* kCondaTarget = "x86_64-linux";
#endif

constexpr const char* kStillWorks =
    "without a recorder the virtual device still works, with PyTorch's own totals and errors, and so does oomdiag "
    "explain with "
    "snapshots of torch.cuda.memory._dump_snapshot()";

/// FNV-1a of flags, sources and headers: others are another recorder.
uint64_t hash_sources(const Install& install) {
  std::vector<fs::path> files{install.units};
  for (const char* folder : {"extension", "profiler/trace"}) {
    std::error_code ignored;
    for (fs::recursive_directory_iterator entry(install.sources / folder, ignored), end; !ignored && entry != end;
         entry.increment(ignored)) {
      const std::string extension = entry->path().extension();
      if (extension == ".h" || extension == ".cpp" || extension == ".map") files.push_back(entry->path());
    }
  }
  std::ranges::sort(files);
  uint64_t hash = 14695981039346656037u;
  const auto add = [&hash](std::string_view text) {
    for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211u;
  };
  for (const char* flag : kFlags) add(flag);
  for (const char* flag : kStandards) add(flag);
  for (const fs::path& file : files) add(read_file(file));
  return hash;
}

/// Held by the one that builds; the others wait.
class FileLock {
 public:
  explicit FileLock(const fs::path& file) : file_(open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (file_ >= 0) flock(file_, LOCK_EX);
  }
  ~FileLock() {
    if (file_ >= 0) close(file_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  bool is_held() const { return file_ >= 0; }

 private:
  int file_;
};

/// Throws Error(environment) if another user could have put it there.
std::optional<FirstUse> find_built(const fs::path& folder) {
  if (!is_there(folder / "architectures")) return std::nullopt;
  FirstUse built{.recorder = folder / "liboomdiag.so", .contents = folder / "liboomdiag_forget.so"};
  for (const fs::path& path : {folder, folder / "architectures", built.recorder, built.contents}) check_only_own(path);
  std::ifstream(folder / "architectures") >> built.architectures;
  return built;
}

Error cannot(const TorchOfPython& torch, const std::string& why, const std::string& fix) {
  return {ErrorKind::environment, fmt::format("no recorder for torch {}: {}", torch.version, why),
          fmt::format("{}; {}", fix, kStillWorks)};
}

std::string find_compiler(const TorchOfPython& torch) {
  std::vector<std::string> names{"g++", "c++", "g++-14", "g++-13", "g++-12", "clang++"};
  if (const std::string own = environment("CXX"); !own.empty()) names = {own};
  for (const std::string& name : names) {
    const auto version = output_of({name, "-dumpversion"});
    if (version && std::atoi(version->c_str()) >= 11) return name;
  }
  throw cannot(torch, "there is no C++ compiler to build it with",
               "install g++ 11 or newer (apt-get install g++), or name one in CXX");
}

/// A command whose output goes to a file.
struct LoggedCommand {
  std::vector<std::string> arguments;
  fs::path log;
};

/// In a process of its own: becomes the command.
[[noreturn]] void become(const LoggedCommand& command) {
  umask(S_IRWXG | S_IRWXO);  // what it makes will be loaded: check_only_own
  const int log = open(command.log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  exec_program(command.arguments);
  _exit(127);
}

/// One build, in a folder that takes its place when all is well.
class Build {
 public:
  Build(const TorchOfPython& torch, const Install& install, bool old_strings, fs::path folder)
      : torch_(torch), install_(install), old_strings_(old_strings), folder_(std::move(folder)) {}

  void run(const std::string& compiler) {
    std::error_code error;
    if (!fs::exists(torch_.folder / "include" / "ATen" / "record_function.h", error)) {
      throw cannot(torch_, fmt::format("its headers are missing from '{}'", torch_.folder.string()),
                   "install torch from a wheel or conda package, which brings them");
    }
    fs::remove_all(folder_, error);
    if (!error && mkdir(folder_.c_str(), S_IRWXU) != 0) error.assign(errno, std::generic_category());
    if (error) throw cannot(torch_, fmt::format("'{}': {}", folder_.string(), error.message()), "set XDG_CACHE_HOME");
    compile(compiler, read_units(read_file(install_.units)));
    link(compiler);
    check();
  }

 private:
  std::vector<std::string> flags(const std::string& compiler) const {
    std::vector<std::string> all{compiler};
    all.insert(all.end(), std::begin(kFlags), std::end(kFlags));
    all.push_back(fmt::format("-D_GLIBCXX_USE_CXX11_ABI={}", old_strings_ ? 0 : 1));
    all.push_back(fmt::format("-DOOMDIAG_TORCH_MINOR=\"{}\"", minor_of(torch_.version)));
    all.push_back("-I" + install_.sources.string());
    for (const char* own : {"include", "include/torch/csrc/api/include"}) {
      all.insert(all.end(), {"-isystem", (torch_.folder / own).string()});
    }
    for (const fs::path& folder : header_folders(torch_.folder)) all.insert(all.end(), {"-isystem", folder.string()});
    return all;
  }

  // The complaint about the first standard is what a user can do something about.
  void compile(const std::string& compiler, const std::vector<CompiledUnit>& units) const {
    const auto failed = try_all(compilations(compiler, units, kStandards[0]), "compiling");
    if (failed && try_all(compilations(compiler, units, kStandards[1]), "compiling, as C++23,")) throw Error(*failed);
  }

  std::vector<LoggedCommand> compilations(const std::string& compiler, const std::vector<CompiledUnit>& units,
                                          const std::string& standard) const {
    std::vector<LoggedCommand> commands;
    for (const CompiledUnit& unit : units) {
      std::ofstream file(folder_ / (unit.name + ".cpp"));
      for (const std::string& source : unit.sources) file << "#include \"" << source << "\"\n";
      std::vector<std::string> command = flags(compiler);
      command.insert(command.end(),
                     {standard, "-c", (folder_ / (unit.name + ".cpp")).string(), "-o", object(unit.name)});
      commands.push_back({.arguments = std::move(command), .log = folder_ / (unit.name + standard + ".log")});
    }
    return commands;
  }

  void link(const std::string& compiler) const {
    const std::string libraries = (torch_.folder / "lib").string();
    const std::vector<std::string> with_torch{"-L" + libraries,
                                              "-Wl,-rpath," + libraries,
                                              "-Wl,--disable-new-dtags",
                                              "-Wl,--no-as-needed",
                                              "-Wl,--allow-shlib-undefined",
                                              "-ltorch",
                                              "-ltorch_cuda",
                                              "-ltorch_cpu",
                                              "-lc10_cuda",
                                              "-lc10",
                                              "-ldl",
                                              "-pthread"};
    std::vector<std::string> recorder{compiler, "-shared", "-s", "-o", (folder_ / "liboomdiag.so").string()};
    recorder.push_back("-Wl,--version-script=" + (install_.sources / "extension" / "oomdiag.map").string());
    recorder.insert(recorder.end(), {"-Wl,-soname,liboomdiag.so", object("hooks"), object("session"), object("core")});
    recorder.insert(recorder.end(), with_torch.begin(), with_torch.end());
    std::vector<std::string> contents{
        compiler, "-shared", "-s", "-o", (folder_ / "liboomdiag_forget.so").string(), object("contents")};
    contents.insert(contents.end(), with_torch.begin(), with_torch.end());
    run_all({{std::move(recorder), folder_ / "link.log"}, {std::move(contents), folder_ / "link-contents.log"}},
            "linking");
  }

  /// Loads both beside that torch: the linker does not ask whether torch has all that they want of it.
  void check() const {
    const std::string code = fmt::format(
        "import ctypes, os, re, torch\n"
        "for name in ('liboomdiag.so', 'liboomdiag_forget.so'):\n"
        "    ctypes.CDLL(os.path.join({0}, name), mode=os.RTLD_NOW)\n"
        "open(os.path.join({0}, 'architectures'), 'w').write(','.join(re.findall(r'sm_(\\d+)', "
        "torch._C._cuda_getArchFlags() or '')) + '\\n')",
        quoted(folder_.string()));
    const fs::path driver = install_.virtual_device / "libcuda.so.1";
    run_all(
        {{{"env", "LD_PRELOAD=" + driver.string(), fmt::format("{}=", variables::kOutput), torch_.python, "-c", code},
          folder_ / "load.log"}},
        "loading");
  }

  static std::string quoted(const std::string& text) {
    std::string literal = "'";
    for (const char letter : text)
      literal += (letter == '\'' || letter == '\\') ? std::string("\\") + letter : std::string(1, letter);
    return literal + "'";
  }

  void run_all(const std::vector<LoggedCommand>& commands, const char* doing) const {
    if (const auto failed = try_all(commands, doing)) throw Error(*failed);
  }

  /// What is wrong with the first that fails.
  std::optional<Error> try_all(const std::vector<LoggedCommand>& commands, const char* doing) const {
    Steps steps(fmt::format("{} the recorder for torch {}", doing, torch_.version));
    std::vector<std::function<std::string()>> works;
    for (const LoggedCommand& command : commands) works.emplace_back([&]() -> std::string { become(command); });
    const auto ended = run_in_processes(works, programs_at_once(kBytesOfCompiler),
                                        [&](std::size_t over) { steps.show(over, commands.size()); });
    steps.hide();
    const auto failed = std::ranges::find_if(ended, [](const auto& answer) { return !answer; });
    if (failed == ended.end()) return std::nullopt;
    const fs::path& log = commands[static_cast<std::size_t>(failed - ended.begin())].log;
    return cannot(torch_, fmt::format("{} it failed: {}", doing, complaint_in(log)),
                  fmt::format("see {}, and please report it", log.string()));
  }

  /// The line that says what is wrong, of a compiler, a linker or Python.
  static std::string complaint_in(const fs::path& log) {
    std::istringstream lines(read_file(log));
    std::string last;
    for (std::string line; std::getline(lines, line);) {
      if (line.find("error:") != line.npos) return line;
      if (!line.empty()) last = line;
    }
    return last;
  }

  std::string object(const std::string& unit) const { return (folder_ / (unit + ".o")).string(); }

  const TorchOfPython& torch_;
  const Install& install_;
  bool old_strings_;
  fs::path folder_;
};

/// What only the build needed goes.
void keep_product(const fs::path& from, const fs::path& to) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(from, ignored)) {
    const std::string extension = entry.path().extension();
    if (extension == ".cpp" || extension == ".o" || extension == ".log") fs::remove(entry.path(), ignored);
  }
  fs::remove_all(to, ignored);
  fs::rename(from, to);
}

}  // namespace

std::vector<CompiledUnit> read_units(const std::string& text) {
  std::vector<CompiledUnit> units;
  std::istringstream lines(text);
  for (std::string name, source; lines >> name >> source;) {
    if (units.empty() || units.back().name != name) units.push_back({.name = name, .sources = {}});
    units.back().sources.push_back(source);
  }
  return units;
}

std::string name_of_build(const TorchOfPython& torch, bool old_strings, uint64_t sources) {
  return fmt::format("{}-{}{}-{:016x}", torch.version, torch.tag, old_strings ? "-old-strings" : "", sources);
}

std::vector<fs::path> header_folders(const fs::path& torch) {
  const fs::path packages = torch.parent_path();
  std::vector<fs::path> folders;
  std::error_code ignored;
  for (fs::directory_iterator entry(packages / "nvidia", ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    if (is_folder(entry->path() / "include")) folders.push_back(entry->path() / "include");
  }
  std::ranges::sort(folders);
  const std::string conda = environment("CONDA_PREFIX");
  for (const fs::path& last : {packages / "triton" / "backends" / "nvidia" / "include",
                               fs::path(conda.empty() ? "/nowhere" : conda) / "targets" / kCondaTarget / "include",
                               fs::path("/usr/local/cuda/include")}) {
    if (is_folder(last)) folders.push_back(last);
  }
  return folders;
}

bool has_interface(const std::string& version) {
  int major = 0, minor = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2) return true;  // somebody's own: it is tried
  return std::pair(major, minor) >= std::pair(2, 6);
}

bool has_old_strings(const fs::path& torch) {
  return read_file(torch / "lib" / "libc10.so").find("_ZN3c105ErrorC1ENS_14SourceLocationESs") != std::string::npos;
}

FirstUse provide_recorder(const TorchOfPython& torch, const Install& install) {
  if (!has_interface(torch.version)) throw cannot(torch, "it is older than torch 2.6", "install torch 2.6 or newer");
  const bool old_strings = has_old_strings(torch.folder);
  const fs::path cache = own_folder_in_cache("recorders");
  const std::string name = name_of_build(torch, old_strings, hash_sources(install));
  if (const auto built = find_built(cache / name)) return *built;
  const FileLock lock(cache / (name + ".lock"));
  if (!lock.is_held()) throw cannot(torch, fmt::format("'{}' cannot be written", cache.string()), "set XDG_CACHE_HOME");
  if (const auto built = find_built(cache / name)) return *built;  // by another, meanwhile
  const std::string compiler = find_compiler(torch);
  say(fmt::format("building the recorder for torch {}, which happens once: about a minute", torch.version));
  const auto begin = std::chrono::steady_clock::now();
  const fs::path folder = cache / (name + ".building");
  Build(torch, install, old_strings, folder).run(compiler);
  keep_product(folder, cache / name);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - begin);
  say(fmt::format("built in {} s, in {}", seconds.count(), (cache / name).string()));
  return find_built(cache / name).value();
}

}  // namespace oomdiag
