#include "profiler/snapshot/places.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>

#include "profiler/one_of.h"
#include "profiler/package_paths.h"
#include "profiler/replay/evidence/stack_rules.h"
#include "profiler/replay/steps/prescan.h"
#include "profiler/trace/mix.h"

namespace oomdiag {
namespace {

constexpr const char* kBackward = "backward";  ///< in place of a node's name
constexpr size_t kMaxCalls = 256;              ///< of a stack

/// Windows' paths as those of other systems.
std::string with_slashes(std::string_view file) {
  std::string slashed(file);
  std::ranges::replace(slashed, '\\', '/');
  return slashed;
}

bool is_python(std::string_view file) {
  return file.ends_with(".py") || file.starts_with('<') || contains(file, "ipython");
}

// Of Windows a path begins with a drive, and Python's own library lies in a folder Lib beside python.exe.
bool is_of_windows_library(std::string_view file) {
  const bool drive = file.size() > 2 && file[1] == ':' && file[2] == '/';
  return drive && (contains(file, "/Lib/") || contains(file, "/lib/"));
}

// What is installed is not the user's: torch itself, other packages, Python's own library.
bool is_users(std::string_view file) {
  constexpr std::array<std::string_view, 6> kInstalled = {"/lib/python3",  "<frozen ",         "/torch/nn/",
                                                          "/torch/optim/", "/torch/autograd/", "/torch/_"};
  const auto in_path = [&](std::string_view part) { return contains(file, part); };
  return find_packages_folder(file) == file.npos && std::none_of(kInstalled.begin(), kInstalled.end(), in_path) &&
         !is_of_windows_library(file);
}

/// Where the path inside of the installed packages begins, torch's apart; npos of all else.
size_t find_other_package(std::string_view file) {
  const size_t package = find_package(file);
  return package == file.npos || file.substr(package).starts_with("torch/") ? file.npos : package;
}

// What the autograd engine calls in Python: custom Functions, the recomputation of checkpoints, hooks. On its own threads that
// is the outermost frame.
bool is_called_by_engine(std::string_view file) {
  return file.ends_with("/torch/autograd/function.py") || file.ends_with("/torch/utils/checkpoint.py") ||
         file.ends_with("/torch/autograd/graph.py");
}

// "train.py:31" of the last `File "train.py", line 31, in forward`; empty of other texts.
std::string innermost_line(std::string_view trace) {
  constexpr std::string_view kFile = "File \"", kLine = "\", line ";
  const size_t begin = trace.rfind(kFile), end = trace.find(kLine, begin == trace.npos ? 0 : begin);
  if (begin == trace.npos || end == trace.npos) return {};
  const std::string_view number = trace.substr(end + kLine.size());
  const std::string_view file = trace.substr(begin + kFile.size(), end - begin - kFile.size());
  return fmt::format("{}:{}", file, number.substr(0, number.find_first_not_of("0123456789")));
}

// "aten::convolution" of "at::_ops::convolution::call(at::Tensor const&, …)".
std::string operator_of(std::string_view symbol) {
  constexpr std::string_view kPrefix = "at::_ops::";
  if (!symbol.starts_with(kPrefix)) return {};
  symbol.remove_prefix(kPrefix.size());
  const size_t end = symbol.find("::call(");
  return end == symbol.npos ? std::string() : fmt::format("aten::{}", symbol.substr(0, end));
}

// "ReluBackward0" of "torch::autograd::generated::ReluBackward0::apply(std::vector<…>&&)".
std::string_view node_of(std::string_view symbol) {
  const size_t end = symbol.find("::apply(");
  if (end == symbol.npos || !symbol.starts_with("torch::autograd::")) return {};
  const std::string_view path = symbol.substr(0, end);
  const std::string_view node = path.substr(path.rfind("::") + 2);
  const bool is_node = contains(node, "Backward") || node == "AccumulateGrad";
  return is_node ? node : std::string_view();
}

}  // namespace

void PlaceFinder::see(const SnapshotFrame& frame) {
  const std::string slashed = contains(frame.filename, "\\") ? with_slashes(frame.filename) : std::string();
  const std::string_view file = slashed.empty() ? std::string_view(frame.filename) : slashed;
  const bool python = is_python(file);
  now_.marks |= marks_of(frame.name, file, python);
  if (calls_.size() < kMaxCalls && (python || frame.name != "??")) calls_.push_back(frame);
  if (!python) {
    see_exported(frame);
    if (contains(frame.name, "torch::autograd::Engine::")) in_engine_ = true;
    if (const std::string op = operator_of(frame.name); !op.empty() && now_.node == 0) now_.op = name(op);
    if (const std::string_view node = node_of(frame.name); !node.empty() && now_.node == 0) now_.node = name(node);
    return;
  }
  any_python_ = true;
  now_.calls = mix(now_.calls, std::hash<std::string_view>{}(file) ^ static_cast<uint64_t>(frame.line));
  outermost_ = file;
  if (now_.source == 0 && !frame.original.empty()) now_.source = name(innermost_line(frame.original));
  if (now_.source == 0 && is_users(file)) now_.source = name(fmt::format("{}:{}", file, frame.line));
  if (const size_t package = find_other_package(file);
      now_.source == 0 && now_.inner_source == 0 && package != file.npos) {
    now_.inner_source = name(fmt::format("{}:{}", file.substr(package), frame.line));
  }
  if (now_.scope == 0 && (now_.marks & kStepsOptimizer) != 0) now_.scope = name("Optimizer.step");
  now_.in_module = (now_.marks & kCallsModule) != 0;
}

// What oomdiag wrote itself, by `export --to snapshot`.
void PlaceFinder::see_exported(const SnapshotFrame& frame) {
  if (frame.filename == "autograd" && now_.node == 0) now_.node = name(frame.name);
  if (frame.filename == "op") now_.op = name(frame.name);
  if (frame.filename == "scope" && is_optimizer_step(frame.name)) now_.marks |= kStepsOptimizer;
  if (now_.scope == 0 && (now_.marks & kStepsOptimizer) != 0) now_.scope = name("Optimizer.step");
  if (frame.filename != "module") return;
  now_.module = name(frame.name);
  now_.marks |= kCallsModule;
  now_.in_module = true;
}

uint32_t PlaceFinder::within(uint32_t place, std::string_view part) {
  SnapshotPlace inside = places_[place];
  inside.module = name(part);
  return add(inside);
}

uint32_t PlaceFinder::finish() {
  const bool bare = calls_.empty() && !in_engine_ && now_ == SnapshotPlace{};
  if ((in_engine_ || is_called_by_engine(outermost_)) && now_.node == 0) now_.node = name(kBackward);
  now_.frameless = bare;
  if (!bare) now_.marks |= kFramesKnown;
  const uint32_t place = add(now_);
  if (places_[place].stack == 0 && places_[place].native_stack == 0) set_stacks(places_[place]);
  now_ = {};
  calls_.clear();
  outermost_.clear();
  in_engine_ = false;
  return place;
}

void PlaceFinder::set_stacks(SnapshotPlace& place) {
  std::string python, native;
  for (const SnapshotFrame& call : calls_) {
    const std::string file = with_slashes(call.filename);
    if (is_python(file)) {
      python += fmt::format("{}{}:{} in {}", python.empty() ? "" : "\n", file, call.line, call.name);
    } else {
      const size_t library = std::min(file.rfind("torch/lib/"), file.rfind('/') + 1);
      native += fmt::format("{}{}+{:#x} in {}", native.empty() ? "" : "\n", file.substr(library), call.line, call.name);
    }
  }
  place.stack = name(python);
  place.native_stack = name(native);
}

std::vector<SnapshotPlace> PlaceFinder::places() && {
  for (size_t i = 1; i < places_.size() && any_python_; ++i) {
    if (places_[i].frameless) places_[i].node = name(kBackward);
  }
  return std::move(places_);
}

uint32_t PlaceFinder::name(std::string_view text) {
  const auto [found, fresh] = name_index_.try_emplace(std::string(text), static_cast<uint32_t>(names_.size()));
  if (fresh) names_.emplace_back(text);
  return found->second;
}

uint32_t PlaceFinder::add(const SnapshotPlace& place) {
  const auto [found, fresh] =
      place_index_.try_emplace({place.source, place.inner_source, place.op, place.node, place.scope, place.module,
                                place.marks, place.calls, place.frameless},
                               static_cast<uint32_t>(places_.size()));
  if (fresh) places_.push_back(place);
  return found->second;
}

}  // namespace oomdiag
