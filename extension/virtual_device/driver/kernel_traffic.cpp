// Reads PTX: for each kernel, through which of its arguments it loads and stores. An address is followed from its argument through
// registers (cvta, add, mad, selp, mov, …), in the order of the text. A load whose predicate is never true is none.

#include "extension/virtual_device/driver/kernel_traffic.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>

#include "extension/virtual_device/driver/ptx_types.h"

namespace oomdiag {
namespace {

std::string_view trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.remove_suffix(1);
  return text;
}

/// The lines, without comments and blanks around them.
std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    lines.push_back(trim(line.substr(0, line.find("//"))));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

/// The words of a line: what lies between blanks and the signs , [ ] { } ( ) ; + and words themselves.
std::vector<std::string_view> words_of(std::string_view line) {
  constexpr std::string_view kBetween = " \t,[]{}();+";
  std::vector<std::string_view> words;
  for (size_t begin = line.find_first_not_of(kBetween); begin != line.npos;) {
    const size_t end = std::min(line.find_first_of(kBetween, begin), line.size());
    words.push_back(line.substr(begin, end - begin));
    begin = line.find_first_not_of(kBetween, end);
  }
  return words;
}

struct Instruction {
  std::string_view guard{};  ///< "@%p1", "@!%p1", or nothing
  std::string_view opcode{};
  std::vector<std::string_view> operands{};
};

std::optional<Instruction> instruction_of(std::string_view line) {
  std::vector<std::string_view> words = words_of(line);
  Instruction instruction;
  if (!words.empty() && words[0].starts_with('@')) {
    instruction.guard = words[0];
    words.erase(words.begin());
  }
  if (words.empty() || words[0].starts_with('.') || words[0].ends_with(':')) return std::nullopt;
  instruction.opcode = words[0];
  instruction.operands.assign(words.begin() + 1, words.end());
  return instruction;
}

bool has_part(std::string_view opcode, std::string_view part) {
  for (size_t begin = 0; begin <= opcode.size();) {
    const size_t end = std::min(opcode.find('.', begin), opcode.size());
    if (opcode.substr(begin, end - begin) == part) return true;
    begin = end + 1;
  }
  return false;
}

/// Of "ld.global.v4.b32" four.
size_t elements_of_access(std::string_view opcode) {
  if (has_part(opcode, "v8")) return 8;
  if (has_part(opcode, "v4")) return 4;
  return has_part(opcode, "v2") ? 2 : 1;
}

/// "ld.global.v4.b32" moves 16.
int64_t bytes_of_access(std::string_view opcode) {
  constexpr int64_t kOfAsynchronousCopy = 16;  // cp.async takes 4, 8 or 16
  const int64_t bytes = bytes_of_ptx_type(opcode.substr(std::min(opcode.rfind('.'), opcode.size())));
  return bytes == 0 ? kOfAsynchronousCopy : bytes * static_cast<int64_t>(elements_of_access(opcode));
}

struct Access {
  bool reads = false, writes = false;
};

Access access_of(std::string_view opcode) {
  if (!has_part(opcode, "global")) return {};
  if (opcode.starts_with("ld.") || opcode.starts_with("cp.async")) return {.reads = true};
  if (opcode.starts_with("st.")) return {.writes = true};
  const bool is_atomic = opcode.starts_with("atom.") || opcode.starts_with("red.");
  return {.reads = is_atomic, .writes = is_atomic};
}

bool is_product(std::string_view opcode) {
  return opcode.starts_with("mma.") || opcode.starts_with("wmma.mma") || opcode.starts_with("wgmma.mma") ||
         opcode.starts_with("tcgen05.mma");
}

struct Loop {
  size_t begin, end;  ///< lines: of the label, and of the branch back to it
  auto operator<=>(const Loop&) const = default;
};

/// Which lines of a kernel may follow each other.
class ControlFlow {
 public:
  /// `instructions` are those of the lines.
  ControlFlow(std::span<const std::string_view> body, const std::vector<std::optional<Instruction>>& instructions)
      : targets_(body.size()), ends_(body.size()) {
    std::unordered_map<std::string_view, size_t> labels;
    for (size_t i = 0; i < body.size(); ++i) {
      if (body[i].ends_with(':')) labels[body[i].substr(0, body[i].size() - 1)] = i;
    }
    for (size_t i = 0; i < body.size(); ++i) {
      const auto& instruction = instructions[i];
      if (!instruction) continue;
      const bool is_branch = instruction->opcode.starts_with("bra") && !instruction->operands.empty();
      const bool is_end = instruction->opcode == "ret" || instruction->opcode == "exit";
      ends_[i] = (is_branch || is_end) && instruction->guard.empty();
      const auto label = is_branch ? labels.find(instruction->operands.back()) : labels.end();
      if (label == labels.end()) continue;
      targets_[i] = label->second;
      if (label->second < i) loops_.push_back({label->second, i});
    }
  }

  std::optional<Loop> innermost_loop(size_t line) const {
    std::optional<Loop> innermost;
    for (const Loop& loop : loops_) {
      if (line < loop.begin || line > loop.end) continue;
      if (!innermost || loop.end - loop.begin < innermost->end - innermost->begin) innermost = loop;
    }
    return innermost;
  }

  /// The most of these loops that one thread goes through: others may stand in another branch.
  int most_in_turn(const std::set<Loop>& loops) const {
    std::map<Loop, int> from;  // that loop on
    int most = 0;
    for (const Loop& loop : loops) most = std::max(most, most_from(loop, loops, from));
    return most;
  }

 private:
  int most_from(const Loop& loop, const std::set<Loop>& loops, std::map<Loop, int>& from) const {
    const auto [known, is_new] = from.try_emplace(loop, 1);
    if (!is_new) return known->second;
    int most = 1;
    for (const Loop& other : loops) {
      if (reaches(loop, other) && !reaches(other, loop)) most = std::max(most, 1 + most_from(other, loops, from));
    }
    return from[loop] = most;
  }

  bool reaches(const Loop& from, const Loop& to) const {
    std::vector<bool> seen(targets_.size());
    std::vector<size_t> open{from.begin};
    while (!open.empty()) {
      const size_t line = open.back();
      open.pop_back();
      if (line >= seen.size() || seen[line]) continue;
      if (line == to.begin) return true;
      seen[line] = true;
      if (targets_[line]) open.push_back(*targets_[line]);
      if (!ends_[line]) open.push_back(line + 1);
    }
    return false;
  }

  std::vector<std::optional<size_t>> targets_;  ///< of branches, by line
  std::vector<bool> ends_;                      ///< the next line does not follow
  std::vector<Loop> loops_;
};

/// Reads the lines of one kernel, those between its braces.
class KernelReader {
 public:
  /// `parameters` is what stands between the parentheses: ".param .u64 .ptr .global .align 1 kernel_param_0, …".
  explicit KernelReader(std::string_view parameters) {
    while (!parameters.empty()) {
      const size_t end = std::min(parameters.find(','), parameters.size());
      read_parameter(words_of(parameters.substr(0, end)));
      parameters.remove_prefix(std::min(end + 1, parameters.size()));
    }
    traffic_.arguments.resize(parameters_.size());
    read_in_.resize(parameters_.size());
    written_in_.resize(parameters_.size());
  }

  KernelTraffic read(std::span<const std::string_view> body) {
    std::vector<std::optional<Instruction>> instructions;
    for (const std::string_view line : body) instructions.push_back(instruction_of(line));
    const ControlFlow flow(body, instructions);
    for (size_t i = 0; i < body.size(); ++i) {
      if (instructions[i]) read_instruction(*instructions[i], flow.innermost_loop(i));
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      traffic_.arguments[i].reads.loops = flow.most_in_turn(read_in_[i]);
      traffic_.arguments[i].writes.loops = flow.most_in_turn(written_in_[i]);
    }
    return std::move(traffic_);
  }

 private:
  /// LLVM says which parameters are pointers (.ptr), nvcc does not.
  void read_parameter(const std::vector<std::string_view>& words) {
    if (words.empty()) return;
    const bool is_array = std::isdigit(static_cast<unsigned char>(words.back().front())) != 0;  // "name[16]"
    if (std::ranges::find(words, ".ptr") != words.end()) pointers_.insert(parameters_.size());
    parameters_.push_back(words[words.size() - (is_array && words.size() > 1 ? 2 : 1)]);
  }

  void read_instruction(const Instruction& instruction, const std::optional<Loop>& loop) {
    const std::string_view opcode = instruction.opcode;
    traffic_.computes_products = traffic_.computes_products || is_product(opcode);
    if (opcode.starts_with("cp.async.bulk")) traffic_.is_complete = false;
    const Access access = access_of(opcode);
    if (access.reads || access.writes) return note(instruction, access, loop);
    if (instruction.operands.empty()) return;
    const std::string_view target = instruction.operands[0];
    const std::optional<size_t> origin = origin_of_sources(instruction);
    if (opcode == "mov.pred" && instruction.operands.size() > 1 && instruction.operands[1] == "0")
      never_true_.insert(target);
    if (opcode.starts_with("st.shared") && origin) exchanged_ = origin;
    if (!opcode.starts_with("ld.") || opcode.starts_with("ld.param")) return set_origin(target, origin);
    const bool may_be_address = opcode.starts_with("ld.shared") && opcode.ends_with(".b64");
    set_loaded(instruction, may_be_address ? exchanged_ : std::nullopt);
  }

  std::optional<size_t> origin_of_sources(const Instruction& instruction) const {
    for (size_t i = 1; i < instruction.operands.size(); ++i) {
      if (const auto origin = origin_of(instruction.operands[i])) return origin;
    }
    return std::nullopt;
  }

  /// The argument that an operand comes from: a parameter by its name, a register by what was written to it.
  std::optional<size_t> origin_of(std::string_view operand) const {
    if (const auto found = origins_.find(operand); found != origins_.end()) return found->second;
    const auto parameter = std::ranges::find(parameters_, operand);
    if (parameter == parameters_.end()) return std::nullopt;
    const auto place = static_cast<size_t>(parameter - parameters_.begin());
    if (!pointers_.empty() && !pointers_.contains(place)) return std::nullopt;
    return place;
  }

  void set_origin(std::string_view of_register, std::optional<size_t> origin) {
    origins_.erase(of_register);
    if (origin) origins_[of_register] = *origin;
  }

  /// What is loaded is data, and no address.
  void note(const Instruction& instruction, Access access, const std::optional<Loop>& loop) {
    if (instruction.guard.starts_with("@%") && never_true_.contains(instruction.guard.substr(1))) return;
    const bool is_load = instruction.opcode.starts_with("ld.");
    for (size_t i = is_load ? elements_of_access(instruction.opcode) : 0; i < instruction.operands.size(); ++i) {
      const auto origin = origin_of(instruction.operands[i]);
      if (!origin) continue;
      ArgumentTraffic& of = traffic_.arguments[*origin];
      if (access.reads) add(of.reads, read_in_[*origin], instruction.opcode, loop);
      if (access.writes) add(of.writes, written_in_[*origin], instruction.opcode, loop);
      break;
    }
    if (is_load) set_loaded(instruction, std::nullopt);
  }

  void set_loaded(const Instruction& load, std::optional<size_t> origin) {
    const size_t loaded = std::min(elements_of_access(load.opcode), load.operands.size());
    for (size_t i = 0; i < loaded; ++i) set_origin(load.operands[i], origin);
  }

  static void add(Passes& passes, std::set<Loop>& loops, std::string_view opcode, const std::optional<Loop>& loop) {
    if (loop) {
      loops.insert(*loop);
    } else {
      passes.bytes_of_thread += bytes_of_access(opcode);
    }
  }

  std::vector<std::string_view> parameters_;
  std::set<size_t> pointers_;                             ///< of them; empty: not said
  std::unordered_map<std::string_view, size_t> origins_;  ///< of registers
  std::optional<size_t> exchanged_;  ///< of addresses that threads hand each other in shared memory
  std::set<std::string_view> never_true_;
  std::vector<std::set<Loop>> read_in_, written_in_;  ///< by argument
  KernelTraffic traffic_;
};

/// Where the braces that are open before line `begin` closes are closed again.
size_t end_of_body(const std::vector<std::string_view>& lines, size_t begin) {
  int64_t depth = 0;
  for (size_t i = begin; i < lines.size(); ++i) {
    depth += std::ranges::count(lines[i], '{') - std::ranges::count(lines[i], '}');
    if (depth == 0 && lines[i].find('}') != std::string_view::npos) return i;
  }
  return lines.size();
}

}  // namespace

std::map<std::string, KernelTraffic> read_kernel_traffic(std::string_view ptx) {
  constexpr std::string_view kEntry = ".entry";
  std::map<std::string, KernelTraffic> kernels;
  const std::vector<std::string_view> lines = lines_of(ptx);
  for (size_t i = 0; i < lines.size(); ++i) {
    const size_t entry = lines[i].find(kEntry);
    if (entry == std::string_view::npos) continue;
    std::string head(lines[i].substr(entry + kEntry.size()));
    while (head.find(')') == std::string::npos && i + 1 < lines.size() && !lines[i + 1].starts_with('{'))
      head += lines[++i];
    const size_t open = std::min(head.find('('), head.size()), close = std::min(head.find(')', open), head.size());
    while (i < lines.size() && lines[i].find('{') == std::string_view::npos) ++i;
    const size_t end = end_of_body(lines, i);
    const std::string_view parameters = open < close ? std::string_view(head).substr(open + 1, close - open - 1) : "";
    const std::span body = std::span(lines).subspan(std::min(i, lines.size()), end - std::min(i, end));
    kernels.emplace(trim(std::string_view(head).substr(0, open)), KernelReader(parameters).read(body));
    i = end;
  }
  return kernels;
}

}  // namespace oomdiag
