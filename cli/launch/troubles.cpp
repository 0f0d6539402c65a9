// What a check-up means for a diagnosis: one line for what is wrong, one for what helps.

#include <fmt/format.h>

#include <algorithm>

#include "cli/launch/checkup.h"
#include "cli/terminal/sizes.h"

namespace oomdiag {
namespace {

std::string setting(const Checkup& checkup, std::string_view name) {
  const auto found = std::find_if(checkup.settings.begin(), checkup.settings.end(),
                                  [&](const auto& one) { return one.first == name; });
  return found == checkup.settings.end() ? std::string() : found->second;
}

void add_settings(const Checkup& checkup, std::vector<Trouble>& troubles) {
  if (const std::string backend = setting(checkup, "allocator backend"); !backend.empty() && backend != "native") {
    troubles.push_back({fmt::format("the allocator is '{}': only PyTorch's own one can be recorded", backend),
                        "take backend: out of PYTORCH_ALLOC_CONF while you diagnose"});
  }
  if (!setting(checkup, "PYTORCH_NO_CUDA_MEMORY_CACHING").empty()) {
    troubles.push_back({"PYTORCH_NO_CUDA_MEMORY_CACHING is set: there is no caching allocator to record",
                        "unset it while you diagnose"});
  }
  const std::string newer = setting(checkup, "PYTORCH_ALLOC_CONF");
  const std::string older = setting(checkup, "PYTORCH_CUDA_ALLOC_CONF");
  if (!newer.empty() && !older.empty() && newer != older) {
    troubles.push_back({"PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF say different things", "set one of them"});
  }
}

void add_hooks(const Checkup& checkup, std::vector<Trouble>& troubles) {
  for (const HookCheck& hook : checkup.hooks) {
    if (hook.works) continue;
    if (hook.name == "driver (CUPTI)") {
      troubles.push_back({fmt::format("libraries that hold memory cannot be distinguished: {}",
                                      checkup.cupti_holder.empty() ? "CUPTI reports nothing" : checkup.cupti_holder),
                          "run without that tool (nsys, ncu, compute-sanitizer, cuda-gdb, a profiling daemon)"});
    } else if (hook.name == "GPU (NVML)") {
      troubles.push_back({"other processes on the GPU cannot be listed: NVML does not answer",
                          "in a container, start it with the capability 'utility' (NVIDIA_DRIVER_CAPABILITIES)"});
    } else {
      troubles.push_back({fmt::format("'{}' reports nothing: {} will be missing", hook.name, hook.detail),
                          "please report it, with the output of oomdiag doctor --json"});
    }
  }
}

}  // namespace

std::vector<Trouble> find_troubles(const Checkup& checkup) {
  std::vector<Trouble> troubles;
  if (!checkup.failure.empty()) troubles.push_back({checkup.failure, checkup.fix});
  add_settings(checkup, troubles);
  add_hooks(checkup, troubles);
  for (const std::string& missing : checkup.missing) {
    troubles.push_back({missing, "please report it, with the output of oomdiag doctor --json"});
  }
  int64_t others = 0;
  for (const ProcessCheck& process : checkup.processes) others += process.bytes;
  if (others > 0) {
    troubles.push_back({fmt::format("{} GiB of the GPU belong to other processes", to_gib(others)),
                        "end them, or run on another GPU: CUDA_VISIBLE_DEVICES"});
  }
  if (!checkup.has_gpu) {
    troubles.push_back({"no GPU here: programs run on a virtual one, whose context and library bytes are modelled",
                        "--device chooses the GPU; oomdiag devices lists them"});
  }
  return troubles;
}

}  // namespace oomdiag
