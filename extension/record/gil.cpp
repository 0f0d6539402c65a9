#include "extension/record/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "extension/interpreter_shutdown.h"
#include "extension/record/fork_and_exit.h"
#include "extension/record/python_api.h"

namespace oomdiag {

namespace {

const PythonApi* the_api = nullptr;
// Python ends, on `ending_thread`, which is set before.
std::atomic<bool> python_ends = false;
pthread_t ending_thread{};
std::atomic<int> waiting_for_gil = 0;
bool may_wait() { return !python_ends.load() || pthread_equal(pthread_self(), ending_thread) != 0; }

}  // namespace

void use_gil_of(const PythonApi& api) noexcept { the_api = &api; }

GilScope::GilScope() noexcept {
  if (the_api == nullptr || in_forked_child() || process_is_exiting()) return;
  const PythonApi& api = *the_api;
  if (api.is_initialized() == 0 || (api.is_finalizing != nullptr && api.is_finalizing() != 0)) return;
  if (api.this_thread() == nullptr || api.has_subinterpreters()) return;
  held_ = true;
  if (api.holds_gil()) return;
  waiting_for_gil.fetch_add(1);
  held_ = may_wait();
  if (held_) state_ = api.ensure();
  waiting_for_gil.fetch_sub(1);
  release_ = held_;
}

GilScope::~GilScope() {
  if (release_) the_api->release(state_);
}

void leave_gil_at_shutdown(const InterpreterShutdown& end) noexcept {
  ending_thread = pthread_self();
  python_ends.store(true);
  void* thread = end.release();
  for (int i = 0; i < 10'000 && waiting_for_gil.load() != 0; ++i) usleep(100);  // a second at most
  end.restore(thread);
}

}  // namespace oomdiag
