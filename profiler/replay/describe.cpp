#include "profiler/replay/describe.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <tuple>

#include "profiler/replay/beginning.h"
#include "profiler/replay/categories.h"
#include "profiler/replay/layout.h"
#include "profiler/replay/outside.h"

namespace oomdiag {
namespace {

// After an OOM the allocator's own layout follows, where the observer could take it: that is the state to describe.
uint64_t find_layout(const Trace& trace, const OutOfMemory& failure) {
  for (auto at = trace.events.from(failure.event); at != trace.events.end() && at.index() <= failure.end; ++at) {
    if (at->kind == EventKind::segment_state && at->device == failure.device) return at.index();
  }
  return failure.event;
}

Instant find_instant(const Trace& trace, const DeviceHistory& history) {
  const auto device = static_cast<uint8_t>(history.index);
  if (!history.failure) {
    const uint64_t after = history.peak.at_start ? 0 : history.peak.event + 1;
    const uint64_t end = std::min<uint64_t>(after, trace.events.size());
    return {device, history.peak.event, end, end, false, history.peak.phase};
  }
  const OutOfMemory& failure = *history.failure;
  return {device, failure.event, find_layout(trace, failure), failure.end + 1, true, failure.phase};
}

Blocks replay_until(const Trace& trace, const Instant& instant, const AllocatorSettings& settings) {
  Blocks blocks(settings);
  blocks.start_from(trace.initial, trace.initial_layout, instant.device);
  for (auto at = trace.events.begin(); at.index() < instant.state_end; ++at) {
    if (at->device != instant.device) continue;
    blocks.apply(*at, static_cast<uint32_t>(at.index()));
    if ((at->flags & kBeforeRecording) == 0 || at->kind != EventKind::segment_state) continue;
    const auto layout = find_beginning(trace.events, at.index());
    if (!layout.empty()) blocks.adopt(layout, instant.device);
  }
  if (instant.failed && trace.events[instant.state_end].kind == EventKind::segment_state) {
    blocks.adopt(trace.events.slice(instant.state_end, instant.description_end, kMostLayoutEvents), instant.device);
  }
  return blocks;
}

bool has_workspace_size(int64_t requested_bytes, const Device& device) {
  constexpr int64_t kCublasLtBytes = kMiB;  // CUBLASLT_WORKSPACE_SIZE by default
  return requested_bytes == kCublasLtBytes ||
         (device.cublas_workspace_bytes > 0 && requested_bytes == device.cublas_workspace_bytes);
}

Evidence gather(const Trace& trace, const Block& block, const Facts& facts, const FactSheet& sheet) {
  const Event maker = maker_of(trace, block);
  const Context& context = trace.context(maker.context);
  const bool initial = (block.event & Block::kInitial) != 0;
  const bool grad_mode = (context.flags & kGradMode) != 0;
  const bool optimizer_open = sheet.optimizer_open_since != Outline::kNever;
  return {.parameter = facts.parameter,
          .buffer = facts.buffer,
          .gradient = facts.gradient,
          .saved = !facts.saved_by.empty(),
          .ever_saved = facts.ever_saved,
          .phase = facts.phase,
          .in_node = in_node(maker) || context.node != 0,
          .recomputed = (context.flags & kRecomputation) != 0,
          .in_optimizer = is_optimizer_step(trace.name(context.scope)),
          .optimizer_is_open = optimizer_open && !initial && block.event > sheet.optimizer_open_since,
          .in_module = context.module != 0,
          // Of a block older than the trace it is not known whether its op made nodes: grad mode is the best guess.
          .op_made_nodes = facts.op_made_nodes || (initial && grad_mode),
          .grad_mode = grad_mode,
          .first_in_op = facts.first_in_op,
          .dies_in_op = facts.dies_in_op,
          .kept_workspace = false,
          .modules_known = false,
          .op = trace.name(context.op),
          .inner = trace.name(context.inner)};
}

// Blocks from before the trace: their phase follows from their context alone.
Phase phase_of_initial(const Trace& trace, const Evidence& evidence) {
  if (evidence.in_node) return Phase::backward;
  if (evidence.in_optimizer) return Phase::optimizer;
  if (trace.process.snapshot) return Phase::other;
  return evidence.grad_mode || evidence.in_module ? Phase::forward : Phase::setup;
}

// The recorder's list of steps knows them, but counts from the beginning of the program.
uint32_t step_of_initial(const Trace& trace, const Event& maker, Phase phase) {
  if (maker.sequence == 0 || trace.step_ends.empty()) return 0;
  const uint32_t step = trace.step_of(maker.sequence);
  return step == 1 && phase == Phase::setup ? 0 : step;
}

/// The blocks that cuBLAS keeps as workspace. A handle has one per stream, and a thread one handle: only the oldest block of
/// that size counts, and never the first of its op, which is the op's result.
std::set<uint64_t> find_kept_workspaces(const Trace& trace, const Device& device, std::span<const Block> blocks,
                                        const FactSheet& sheet) {
  std::map<std::tuple<uint16_t, uint64_t, int64_t>, std::pair<uint64_t, uint64_t>> oldest;  // sequence, address
  for (size_t b = 0; b < blocks.size(); ++b) {
    const Event maker = maker_of(trace, blocks[b]);
    const bool gemm = is_gemm(trace.name(trace.context(maker.context).inner));
    const bool result = sheet.blocks[b].first_in_op && (blocks[b].event & Block::kInitial) == 0;
    if (!gemm || result || !has_workspace_size(blocks[b].requested_bytes, device)) continue;
    const std::pair found{maker.sequence, blocks[b].address};
    const auto [place, fresh] = oldest.try_emplace({maker.thread, maker.detail, maker.bytes}, found);
    if (!fresh) place->second = std::min(place->second, found);
  }
  std::set<uint64_t> addresses;
  for (const auto& [key, found] : oldest) addresses.insert(found.second);
  return addresses;
}

/// Turns blocks and facts into the blocks that people read about.
class Describer {
 public:
  Describer(const Trace& trace, const NodeTable& nodes, const Device& device, std::span<const Block> blocks,
            const FactSheet& sheet)
      : trace_(trace), nodes_(nodes), sheet_(sheet), workspaces_(find_kept_workspaces(trace, device, blocks, sheet)) {
    const auto named = [](const Facts& facts) { return facts.parameter; };
    modules_known_ = trace.process.python && std::any_of(sheet.blocks.begin(), sheet.blocks.end(), named);
  }

  LiveBlock describe(const Block& block, const Facts& facts) {
    const Event maker = maker_of(trace_, block);
    Evidence evidence = gather(trace_, block, facts, sheet_);
    const bool initial = block.event != Block::kNone && (block.event & Block::kInitial) != 0;
    if (initial) evidence.phase = phase_of_initial(trace_, evidence);
    evidence.modules_known = modules_known_;
    evidence.kept_workspace = workspaces_.contains(block.address);
    if (block.event == Block::kNone) evidence.phase = Phase::other;
    LiveBlock live{.address = block.address,
                   .bytes = block.bytes,
                   .requested_bytes = block.requested_bytes,
                   .category = category_of(evidence),
                   .phase = evidence.phase,
                   .step = initial ? step_of_initial(trace_, maker, evidence.phase) : facts.step,
                   .pending_free = block.state == Block::State::pending_free,
                   .made = locate(trace_, nodes_, maker),
                   .name = trace_.name(facts.name),
                   .shape = trace_.name(facts.shape),
                   .group = trace_.name(facts.group),
                   .saved_by = {}};
    live.before_recording = block.event == Block::kNone;
    if (live.before_recording && live.name.empty()) live.name = "before recording";
    add_savers(facts, live);
    return live;
  }

 private:
  // Who keeps a block no snapshot tells; only what was made inside an optimizer's step is likely to be its state.
  Category category_of(const Evidence& evidence) const {
    const Category category = categorise(evidence);
    const bool known = !trace_.process.snapshot || category == Category::optimizer_state;
    return known ? category : Category::unknown;
  }

  // A node may keep one storage several times (x ∙ x), and an OOM in backward is described by two walks. Forward
  // numbers the nodes upwards.
  void add_savers(const Facts& facts, LiveBlock& live) {
    std::map<std::pair<uint64_t, uint16_t>, Event> savers;
    for (const uint64_t index : facts.saved_by) {
      const Event saver = trace_.events[index];
      savers.try_emplace({saver.node_sequence, saver.node_thread}, saver);
    }
    for (const auto& [node, saver] : savers) live.saved_by.push_back(locate(trace_, nodes_, saver));
  }

  const Trace& trace_;
  const NodeTable& nodes_;
  const FactSheet& sheet_;
  std::set<uint64_t> workspaces_;
  bool modules_known_ = false;
};

// The reading of free memory that tells most about the instant: at an OOM the allocator asked, else the newest one before,
// else the first after.
std::optional<OutsideReading> find_reading(const Trace& trace, const Measured& measured, const Instant& instant,
                                           int64_t total_bytes, int64_t reserved_bytes) {
  if (instant.failed) {
    const auto free = static_cast<int64_t>(std::min<uint64_t>(trace.events[instant.event].address, kMaxSaneBytes));
    return OutsideReading{instant.description_end, total_bytes - free - reserved_bytes};
  }
  if (measured.outside.empty()) return std::nullopt;
  OutsideReading reading = measured.outside.front();
  for (const OutsideReading& next : measured.outside) {
    if (next.event <= instant.event) reading = next;
  }
  return reading;
}

// Who holds what others have of the card. Between the reading and the instant only what is known may have changed, so what
// is unexplained at the one is unexplained at the other.
void describe_outside(const Trace& trace, const Measured& measured, const Instant& instant, int64_t total_bytes,
                      const Device& device, Moment& moment) {
  const auto known_before = [&](const OutsideState& state) {
    auto owners = list_owners(state, moment.segments);
    if (!state.steps.empty() || device.context_bytes <= 0) return owners;
    owners.insert(owners.begin(), {"context", "device", std::min(device.context_bytes, kMaxSaneBytes)});
    return owners;
  };
  const OutsideState state = read_outside(trace, measured.outside_events, instant.description_end);
  moment.outside = known_before(state);
  moment.host_memory = list_host_owners(state);
  const int64_t known = sum_of(moment.outside);
  int64_t outside = known;
  if (const auto reading = find_reading(trace, measured, instant, total_bytes, moment.reserved_bytes)) {
    const OutsideState then = read_outside(trace, measured.outside_events, reading->event);
    outside = reading->outside_bytes + known - sum_of(known_before(then));
  }
  moment.outside_bytes = std::clamp<int64_t>(outside, 0, total_bytes - moment.reserved_bytes);
  moment.free_bytes = total_bytes - moment.reserved_bytes - moment.outside_bytes;
  moment.outside.push_back({"unexplained", "", moment.outside_bytes - known});
}

}  // namespace

Moment describe(const Trace& trace, const Outline& outline, const Measured& measured, const NodeTable& nodes,
                const AllocatorSettings& settings) {
  const DeviceHistory& history = measured.history;
  const auto index = static_cast<size_t>(history.index);
  const Device device = index < trace.devices.size() ? trace.devices[index] : Device{};
  const Instant instant = find_instant(trace, history);
  const Blocks state = replay_until(trace, instant, settings);

  std::vector<Block> blocks = state.in_use();
  std::sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.address < b.address; });
  const FactSheet sheet = collect_facts(trace, outline, instant, blocks);

  Moment moment{.event = instant.event,
                .step = history.failure ? history.failure->step : history.peak.step,
                .phase = instant.phase,
                .allocated_bytes = state.allocated_bytes(),
                .pending_free_bytes = state.pending_bytes(),
                .reserved_bytes = state.reserved_bytes()};
  if (instant.event < trace.events.size() && (history.failure || !history.peak.at_start)) {
    moment.time_ns = trace.time_ns(trace.events[instant.event]);
    moment.where = locate(trace, nodes, trace.events[instant.event]);
  }
  moment.saved_by_likeness = sheet.saved_by_likeness;
  Describer describer(trace, nodes, device, blocks, sheet);
  for (size_t b = 0; b < blocks.size(); ++b) moment.blocks.push_back(describer.describe(blocks[b], sheet.blocks[b]));
  for (const auto& segment : state.by_segment()) moment.segments.push_back(lay_out(segment));

  const int64_t total = std::max(device.total_bytes, moment.reserved_bytes);
  describe_outside(trace, measured, instant, total, device, moment);
  return moment;
}

}  // namespace oomdiag
