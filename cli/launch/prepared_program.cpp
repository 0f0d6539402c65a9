#include "cli/launch/prepared_program.h"

#include <fmt/format.h>

#include <cstdint>
#include <optional>

#include "cli/device/device.h"
#include "cli/device/gpus.h"
#include "cli/launch/diagnosis.h"
#include "cli/process/environment.h"
#include "cli/process/launcher.h"
#include "cli/python/cache.h"
#include "cli/python/install.h"
#include "cli/python/preload.h"
#include "extension/environment.h"
#include "profiler/error.h"
#include "profiler/whole_number.h"

namespace oomdiag {
namespace {

/// One line for each GPU: what the virtual device reads.
std::string list_files(const std::vector<GpuEntry>& gpus) {
  std::string files;
  for (const GpuEntry& gpu : gpus) files += (files.empty() ? "" : "\n") + gpu.file.string();
  return files;
}

/// Settings of packages that can decide on the host what they decide by a kernel of their own otherwise, which computes nothing
/// here. vLLM's newer model runner counts on the GPU which tokens are done: none ever is, and generate() does not end.
constexpr std::pair<const char*, const char*> kDecidesOnHost[] = {{"VLLM_USE_V2_MODEL_RUNNER", "0"}};

void check_trace_size() {
  const std::string text = environment(variables::kTraceMib);
  const std::optional<int64_t> mib = parse_whole_number(text);
  if (text.empty() || (mib && *mib >= 1 && *mib <= variables::kMaxTraceMib)) return;
  throw Error(ErrorKind::usage, fmt::format("{} is '{}'", variables::kTraceMib, text),
              fmt::format("it takes a whole number of MiB, from 1 to {}; unset, {} are kept", variables::kMaxTraceMib,
                          variables::kUsualTraceMib));
}

Program prepare(const DiagnosisRequest& request, const Install& install, const std::filesystem::path& libraries,
                const std::optional<VirtualCaches>& caches) {
  Program program{.arguments = request.program,
                  .environment = {},
                  .keeps_output = request.keeps_output,
                  .input = request.input,
                  .forked_by = request.forked_by};
  const VirtualHost* const host = request.device.virtual_host();
  const auto set = [&](const char* name, const std::string& value) {
    program.environment.emplace_back(name, value.empty() ? std::nullopt : std::optional(value));
  };
  set("LD_PRELOAD", compose_preload({.first = environment(variables::kPreloadFirst),
                                     .libraries = libraries,
                                     .virtual_device = host != nullptr ? libraries / "virtual_device" : "",
                                     .cuda_major = install.cuda_major,
                                     .users_own = environment("LD_PRELOAD")}));
  set(variables::kRecorder, install.recorder.string());
  set(variables::kRecorderFor, install.torch_version);
  set(variables::kNoRecorder, install.no_recorder);
  set(variables::kReports, (install.libraries / "liboomdiag_reports.so").string());
  set(variables::kContents, install.contents.string());
  if (!install.architectures.empty()) set(variables::kArchitectures, install.architectures);
  set(variables::kAttachAtStep, request.attach_at_step > 1 ? std::to_string(request.attach_at_step) : "");
  set(variables::kNativeStacks, request.native_stacks ? "1" : environment(variables::kNativeStacks));
  set(variables::kMeter, request.is_metered ? "1" : environment(variables::kMeter));
  set(variables::kArguments, request.keeps_arguments ? "1" : environment(variables::kArguments));
  const VirtualHost none;
  const VirtualHost& devices = host != nullptr ? *host : none;
  set(variables::kGpu, list_files(devices.gpus));
  set(variables::kDriver, host != nullptr ? to_text(host->gpus.front().driver) : "");
  set(variables::kMemory, devices.memory_bytes == 0 ? "" : std::to_string(devices.memory_bytes));
  set(variables::kClocked, devices.clocked ? "1" : "");
  if (caches) {
    set("TRITON_LIBCUDA_PATH", install.virtual_device.string());
    for (const auto& [variable, folder] : caches->variables()) set(variable, folder);
    for (const auto& [variable, value] : kDecidesOnHost) {
      if (environment(variable).empty()) set(variable, value);
    }
  }
  if (environment("NVTX_INJECTION64_PATH").empty()) {  // a profiler that is there already keeps its place
    set("NVTX_INJECTION64_PATH", (libraries / "liboomdiag_preload.so").string());
  }
  program.environment.insert(program.environment.end(), request.environment.begin(), request.environment.end());
  return program;
}

}  // namespace

VirtualCaches::VirtualCaches() {
  try {
    folder_ = own_folder_in_cache("virtual");
  } catch (const Error&) {
    folder_ = for_this_run_.emplace().path();
  }
}

std::vector<std::pair<const char*, std::string>> VirtualCaches::variables() const {
  std::vector<std::pair<const char*, std::string>> caches;
  for (const auto& [variable, name] :
       {std::pair{"TORCHINDUCTOR_CACHE_DIR", "inductor"}, {"TRITON_CACHE_DIR", "triton"}}) {
    const std::string own = environment(variable);
    caches.emplace_back(variable, own.empty() ? (folder_ / name).string() : own + "/oomdiag-virtual");
  }
  return caches;
}

PreparedProgram::PreparedProgram(const DiagnosisRequest& request, const Install& install)
    : libraries_(install.libraries) {
  check_trace_size();
  if (request.device.is_virtual()) caches_.emplace();
  program_ = prepare(request, install, libraries_.path(), caches_);
}

}  // namespace oomdiag
