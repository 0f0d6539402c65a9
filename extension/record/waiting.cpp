#include "extension/record/waiting.h"

#include <ATen/record_function.h>

#include <atomic>
#include <cstring>

#include "extension/record/session.h"

// The callbacks of a recorder that does not record yet. PyTorch keeps callbacks by scope: one that is installed for user
// scopes alone costs an op nothing.

namespace oomdiag {

namespace {

std::atomic<at::CallbackHandle> handle = 0;
std::atomic<int> steps_seen = 0;
int first_step = 1;

void stop_waiting() {
  if (const auto installed = handle.exchange(0); installed != 0) at::removeCallback(installed);
}

std::unique_ptr<at::ObserverContext> poll_at_start(const at::RecordFunction&) {
  poll();
  if (settled()) stop_waiting();
  return nullptr;
}

std::unique_ptr<at::ObserverContext> nothing_at_start(const at::RecordFunction&) { return nullptr; }

void count_at_end(const at::RecordFunction& scope, at::ObserverContext*) {
  constexpr char kStep[] = "Optimizer.step";
  if (std::strncmp(scope.name(), kStep, sizeof kStep - 1) != 0) return;
  if (steps_seen.fetch_add(1) + 2 != first_step) return;  // this one ended, the next begins
  stop_waiting();
  start_at_step(static_cast<uint32_t>(first_step - 1));
}

}  // namespace

void wait_in_ops() {
  auto callback = at::RecordFunctionCallback(poll_at_start);
  if (handle == 0) handle = at::addGlobalCallback(callback.scopes({at::RecordScope::FUNCTION}));
}

void wait_for_step(int first) {
  first_step = first;
  auto callback = at::RecordFunctionCallback(nothing_at_start, count_at_end);
  handle = at::addGlobalCallback(callback.scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace oomdiag
