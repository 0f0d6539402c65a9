// Programs that end, fail or start others in a dozen ways, each as small as can be: oomdiag_test_endings NAME [MiB]. Each prints
// the most that was ever allocated, which must be the same with and without oomdiag.

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>
#include <sys/wait.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/cuda.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <map>
#include <string>
#include <thread>

namespace {

constexpr int64_t kMiB = 1 << 20;

at::Tensor make(int64_t mib) { return at::empty({mib * kMiB / 4}, at::device(at::kCUDA).dtype(at::kFloat)); }

void train(int64_t mib) {
  const at::Tensor x = make(mib).set_requires_grad(true);
  (x * 2).relu().sum().backward();
  RECORD_USER_SCOPE("Optimizer.step#SGD.step");
}

void say_peak() {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  std::printf("%ld\n", stats.allocated_bytes[0].peak);
  std::fflush(stdout);
}

void die_of(int signal) {
  train(4);
  say_peak();
  std::raise(signal);
}

void retry_smaller() {
  train(4);
  for (int64_t mib = 16 << 10; mib > 1; mib /= 4) {
    try {
      train(mib);
      break;
    } catch (const c10::OutOfMemoryError&) {
      std::puts("smaller");
    }
  }
  for (int step = 0; step < 3; ++step) train(8);
}

void fork_and_wait() {
  train(4);
  if (fork() == 0) {
    for (int i = 0; i < 2000; ++i) at::ones({10}) + 1;
    _exit(5);
  }
  int status = 0;
  wait(&status);
  std::printf("child %d\n", WEXITSTATUS(status));
  train(8);
}

void run_threads() {
  std::thread first([] { train(4); });
  first.join();
  std::thread second([] { train(6); });
  second.join();
}

void echo() {
  train(4);
  for (std::string line; std::getline(std::cin, line);) std::cout << line << std::endl;
}

// An allocator of the program's own, as RMM's.
void plug_in() {
  using Allocate = int (*)(void**, size_t);
  using Free = int (*)(void*);
  const auto allocate = [](size_t bytes, int, cudaStream_t) {
    void* address = nullptr;
    reinterpret_cast<Allocate>(dlsym(RTLD_DEFAULT, "cudaMalloc"))(&address, bytes);
    return address;
  };
  const auto release = [](void* address, size_t, int, cudaStream_t) {
    reinterpret_cast<Free>(dlsym(RTLD_DEFAULT, "cudaFree"))(address);
  };
  using namespace torch::cuda::CUDAPluggableAllocator;
  changeCurrentAllocator(createCustomAllocator(allocate, release));
}

int run(const std::string& name, int64_t mib) {
  if (name == "normal") train(mib);
  if (name == "steps") {
    for (int step = 0; step < 4; ++step) train(mib * (step + 1));
  }
  if (name == "exception") train(4), say_peak(), throw std::runtime_error("of the program");
  if (name == "_exit") train(4), say_peak(), _exit(7);
  if (name == "exit") train(4), say_peak(), std::exit(3);
  if (name == "terminated") die_of(SIGTERM);
  if (name == "segmentation_fault") die_of(SIGSEGV);
  if (name == "killed") die_of(SIGKILL);
  if (name == "oom_retried") retry_smaller();
  if (name == "oom_uncaught") train(4), say_peak(), train(64 << 10);
  if (name == "fork") fork_and_wait();
  if (name == "threads") run_threads();
  if (name == "echo") echo();
  if (name == "pluggable") {
    plug_in();
    train(mib);
    return 0;  // such allocators count nothing
  }
  say_peak();
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (torch::cuda::device_count() == 0) return 99;
  return run(count > 1 ? arguments[1] : "normal", count > 2 ? std::atoll(arguments[2]) : 4);
}
