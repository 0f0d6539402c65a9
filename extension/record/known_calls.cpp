#include "extension/record/known_calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <atomic>
#include <memory>

#include "profiler/trace/mix.h"

namespace oomdiag {

namespace {

std::atomic<uint64_t> departures = 0;

/// Called with PyTorch's list locked.
class Departures : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override { departures.fetch_add(1); }
};

uint64_t hash_of(const char* text, uint32_t outside) { return mix(reinterpret_cast<uintptr_t>(text), outside); }

}  // namespace

const KnownCall* KnownCalls::find(const char* text, uint32_t outside) {
  if (departures_ != departures.load(std::memory_order_relaxed)) return nullptr;
  const auto is_it = [&](const KnownCall& call) { return call.text == text && call.outside == outside; };
  return calls_.find(hash_of(text, outside), is_it);
}

void KnownCalls::add(const KnownCall& call) {
  const uint64_t now = departures.load(std::memory_order_relaxed);
  if (now != departures_) calls_ = {};
  departures_ = now;
  calls_.add(hash_of(call.text, call.outside), call);
}

void watch_departures_of_ops() {
  // Never destroyed: ops leave until the process ends.
  static const auto* const watch = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Departures>()));
  static_cast<void>(watch);
}

bool is_registered(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name) return false;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  return op && op->schema().name().c_str() == call.name();
}

}  // namespace oomdiag
