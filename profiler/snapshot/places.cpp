#include "profiler/snapshot/places.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace oomdiag {
namespace {

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

bool is_python(const SnapshotFrame& frame) {
  return frame.filename.ends_with(".py") || frame.filename.starts_with('<') || contains(frame.filename, "ipython");
}

// What is installed is not the user's: torch itself, other packages, Python's own library.
bool is_users(const SnapshotFrame& frame) {
  constexpr std::array<std::string_view, 8> kInstalled = {"/site-packages/",  "/dist-packages/", "/lib/python3",
                                                          "<frozen ",         "/torch/nn/",      "/torch/optim/",
                                                          "/torch/autograd/", "/torch/_"};
  const auto in_path = [&](std::string_view part) { return contains(frame.filename, part); };
  return is_python(frame) && std::none_of(kInstalled.begin(), kInstalled.end(), in_path);
}

/// Where the path inside of the installed packages begins, torch's apart; npos of all else.
size_t find_package(std::string_view file) {
  constexpr std::string_view kFolder = "/site-packages/";  // as long as "/dist-packages/"
  const size_t folder = std::min(file.rfind(kFolder), file.rfind("/dist-packages/"));
  if (folder == file.npos || file.substr(folder + kFolder.size()).starts_with("torch/")) return file.npos;
  return folder + kFolder.size();
}

bool is_optimizer_step(const SnapshotFrame& frame) {
  const bool optimizer = contains(frame.filename, "/torch/optim/") || contains(frame.filename, "\\torch\\optim\\");
  return optimizer && frame.name.ends_with("step");
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
  if (now_.source == 0 && is_users(frame)) now_.source = name(fmt::format("{}:{}", frame.filename, frame.line));
  if (const size_t package = find_package(frame.filename);
      now_.source == 0 && now_.inner_source == 0 && is_python(frame) && package != frame.filename.npos) {
    now_.inner_source = name(fmt::format("{}:{}", frame.filename.substr(package), frame.line));
  }
  if (now_.scope == 0 && is_optimizer_step(frame)) now_.scope = name("Optimizer.step");
  if (is_python(frame)) return;
  if (const std::string op = operator_of(frame.name); !op.empty() && now_.node == 0) now_.op = name(op);
  if (const std::string_view node = node_of(frame.name); !node.empty() && now_.node == 0) now_.node = name(node);
}

uint32_t PlaceFinder::finish() {
  const SnapshotPlace place = now_;
  now_ = {};
  return add(place);
}

uint32_t PlaceFinder::name(std::string_view text) {
  const auto [found, fresh] = name_index_.try_emplace(std::string(text), static_cast<uint32_t>(names_.size()));
  if (fresh) names_.emplace_back(text);
  return found->second;
}

uint32_t PlaceFinder::add(const SnapshotPlace& place) {
  const auto [found, fresh] = place_index_.try_emplace(
      {place.source, place.inner_source, place.op, place.node, place.scope}, static_cast<uint32_t>(places_.size()));
  if (fresh) places_.push_back(place);
  return found->second;
}

}  // namespace oomdiag
