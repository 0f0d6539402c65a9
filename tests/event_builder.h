#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "profiler/trace/trace.h"
#include "tests/caching_allocator.h"

namespace oomdiag {

constexpr int64_t operator""_KiB(unsigned long long n) { return static_cast<int64_t>(n) << 10; }
constexpr int64_t operator""_MiB(unsigned long long n) { return static_cast<int64_t>(n) << 20; }
constexpr int64_t operator""_GiB(unsigned long long n) { return static_cast<int64_t>(n) << 30; }

/// Where the events that follow happen, in words.
struct Place {
  std::string op{}, inner{}, module{}, source{}, scope{};
  bool grad = true;  ///< gradients are enabled
};

/// Builds traces as the recorder would write them. Blocks have names; a simulated allocator chooses their addresses. Each
/// event takes a microsecond.
class EventBuilder {
 public:
  explicit EventBuilder(SimulatedAllocator::Settings gpu = {});
  EventBuilder(const EventBuilder&) = delete;

  // The program.
  EventBuilder& op(const Place& place);  ///< begins a call of an operator (and ends the one before)
  EventBuilder& no_op();                 ///< what follows happens outside of any operator
  EventBuilder& node(std::string_view name, uint64_t sequence);  ///< begins an autograd node
  EventBuilder& end_node();
  EventBuilder& nodes(uint64_t first, int64_t count = 1);  ///< the op that runs made these autograd nodes
  EventBuilder& made_by_node(uint64_t sequence);           ///< says of the nodes before that this node ran the op
  EventBuilder& begin_scope(std::string_view name);
  EventBuilder& end_scope(std::string_view name);
  EventBuilder& thread(uint16_t thread);
  EventBuilder& device(uint8_t device);  ///< one more GPU, or back to another

  // The allocator.
  EventBuilder& segment(int64_t bytes);
  EventBuilder& alloc(const std::string& block, int64_t bytes, uint64_t stream = 0);
  EventBuilder& free(const std::string& block);
  EventBuilder& request_free(const std::string& block);
  EventBuilder& complete_free(const std::string& block);
  EventBuilder& empty_cache();
  EventBuilder& stats();                                      ///< memory_stats and device_memory
  EventBuilder& oom(int64_t bytes, bool with_layout = true);  ///< out_of_memory and its description
  EventBuilder& op_failed();

  // What the graph walk and the modules write.
  EventBuilder& walk(uint16_t flags = 0);
  EventBuilder& saved(const std::string& block, std::string_view node, uint64_t sequence, std::string_view shape = "");
  EventBuilder& names(EventKind kind, const std::string& block, std::string_view name, std::string_view shape = "");
  EventBuilder& requested_gradient(int64_t bytes, std::string_view shape, uint64_t sequence);
  EventBuilder& note(std::string_view kind, std::string_view name);
  /// The calls that led to `source`; without one, those of the OOM before.
  EventBuilder& stack(std::string_view calls, std::string_view source = {});
  EventBuilder& read_from_gpu();  ///< the op that runs looked at what no kernel computed

  /// What happens for OOMs in backward: the gradient of the block, say.
  uint64_t address_of(const std::string& block) const { return blocks_.at(block); }
  SimulatedAllocator& allocator();

  Trace& trace() { return trace_; }  ///< to change what the builder has no word for
  operator const Trace&() const { return trace_; }

 private:
  Event& add(Event event);
  uint32_t intern(std::string_view name);
  uint32_t intern(const Context& context);
  void enter(const Context& context);

  SimulatedAllocator::Settings gpu_;
  std::map<uint8_t, std::unique_ptr<SimulatedAllocator>> allocators_;
  Trace trace_;
  std::map<std::string, uint64_t> blocks_;
  Event now_;  ///< what the next event says about its place
  Context context_;
  uint32_t scope_ = 0;
  uint32_t call_ids_ = 0;
};

}  // namespace oomdiag
