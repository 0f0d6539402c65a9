#include "extension/virtual_device/torch/rest.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "extension/interpreter_shutdown.h"

namespace oomdiag {
namespace {

/// What the system reports of the engine's threads: empty while one of them runs, else how often they went to sleep so
/// far.
struct EngineThreads {
  bool exist = false;
  std::string sleeps{};
};

EngineThreads look_at_engine() {
  EngineThreads threads;
  bool all_sleep = true;
  std::error_code ignored;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    std::ifstream file(thread.path() / "status");
    std::string line;
    std::getline(file, line);
    if (line.find("pt_autograd_") == line.npos) continue;
    threads.exist = true;
    while (std::getline(file, line)) {
      if (line.starts_with("State:"))
        all_sleep = all_sleep && line.find('S') != line.npos && line.find("sleeping") != line.npos;
      if (line.find("ctxt_switches") != line.npos) threads.sleeps += line + ' ';
    }
  }
  if (!all_sleep) threads.sleeps.clear();
  return threads;
}

// A thread that waits for the GIL gets it, since we let go of it here, or, where somebody else holds it, wakes every 5 ms to
// ask again. Who sleeps for longer waits for work.
void wait_for_engine() {
  constexpr int kLooks = 4;
  constexpr auto kBetween = std::chrono::milliseconds(2);
  constexpr auto kLongest = std::chrono::seconds(2);
  const auto begin = std::chrono::steady_clock::now();
  std::string before;
  for (int alike = 0; alike < kLooks && std::chrono::steady_clock::now() - begin < kLongest;) {
    const EngineThreads now = look_at_engine();
    if (!now.exist) return;
    alike = !now.sleeps.empty() && now.sleeps == before ? alike + 1 : 0;
    before = now.sleeps;
    std::this_thread::sleep_for(kBetween);
  }
}

void rest_at_shutdown(const InterpreterShutdown& python) noexcept {
  void* state = python.release();
  try {
    wait_for_engine();
  } catch (...) {
  }
  python.restore(state);
}

}  // namespace

void rest_before_interpreter_shutdown() noexcept { call_at_interpreter_shutdown<rest_at_shutdown>(); }

}  // namespace oomdiag
