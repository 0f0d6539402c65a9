#include "cli/launch/checkup.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/device/device.h"
#include "cli/launch/diagnosis.h"
#include "cli/process/environment.h"
#include "cli/process/temporary_folder.h"
#include "cli/python/install.h"
#include "cli/python/python.h"
#include "profiler/error.h"
#include "profiler/event.h"
#include "profiler/trace/format.h"
#include "profiler/trace/trace.h"

namespace oomdiag {
namespace {

/// What is run: every hook has something to see. The last line of its output is for us.
constexpr const char* kLines = R"python(
import ctypes, json, os, time
said = {}
try:
    import torch
    said = {'torch': torch.__version__, 'cuda': torch.version.cuda or ''}
    said['cuda_available'] = torch.cuda.is_available()
    said['cudnn'] = str(torch.backends.cudnn.version() or '')
    if said['cuda_available']:
        said['backend'] = torch.cuda.get_allocator_backend()
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(8, 64, device='cuda')).relu().sum().backward()
        optimizer.step()
        said['name'] = torch.cuda.get_device_name()
        said['free'], said['total'] = torch.cuda.mem_get_info()
    else:
        try:
            torch.cuda.init()
        except Exception as error:
            said['why_not'] = str(error).splitlines()[0]
    try:
        nvml = ctypes.CDLL('libnvidia-ml.so.1')
        text = ctypes.create_string_buffer(96)
        version = ctypes.c_int()
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
            said['driver'] = text.value.decode()
        if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)) == 0:
            said['cuda of the driver'] = f'{version.value // 1000}.{version.value % 1000 // 10}'
    except OSError:
        pass
except Exception as error:
    said['why_not'] = str(error).splitlines()[0]
time.sleep(0.3)
print('\noomdiag-doctor ' + json.dumps(said), flush=True)
)python";

nlohmann::json read_answer(const std::filesystem::path& file) {
  constexpr std::string_view kMark = "oomdiag-doctor ";
  std::ifstream stream(file);
  nlohmann::json answer = nlohmann::json::object();
  for (std::string line; std::getline(stream, line);) {
    if (!line.starts_with(kMark)) continue;
    answer = nlohmann::json::parse(line.substr(kMark.size()), nullptr, false);
  }
  return answer.is_object() ? answer : nlohmann::json::object();
}

/// What the trace of those lines holds.
struct Seen {
  std::set<EventKind> kinds;
  bool ops = false, sources = false, modules = false, nodes = false, optimizer = false;
};

Seen look_at(const Trace& trace) {
  Seen seen;
  for (const Event& event : trace.events) {
    seen.kinds.insert(event.kind);
    const Context& context = trace.context(event.context);
    seen.ops |= context.op != 0 && event.kind == EventKind::alloc;
    seen.sources |= context.source != 0 && event.kind == EventKind::alloc;
    seen.modules |= context.module != 0 && event.kind == EventKind::alloc;
    seen.nodes |= context.node != 0 && event.kind == EventKind::alloc;
    seen.optimizer |= trace.name(context.scope).starts_with("Optimizer.step") ||
                      (event.kind == EventKind::scope_begin && trace.name(event.detail).starts_with("Optimizer.step"));
  }
  return seen;
}

void read_trace_of(const std::filesystem::path& folder, Checkup& checkup) {
  const Trace trace = read_trace(folder / "trace");
  const Seen seen = look_at(trace);
  const auto has = [&](EventKind kind) { return seen.kinds.contains(kind); };
  const auto add = [&](const char* name, bool works, const char* detail) {
    checkup.hooks.push_back({name, works, detail});
  };
  add("allocator", has(EventKind::alloc) && has(EventKind::segment_alloc), "every block and segment of PyTorch");
  add("ops", seen.ops, "the operator that allocates");
  add("modules", seen.modules, "the module it belongs to");
  add("source lines", seen.sources, "the line of your code");
  add("autograd graph", has(EventKind::saved_tensor) && seen.nodes, "what is saved for backward, and by whom");
  add("optimizer steps", seen.optimizer, "steps and phases");
  add("driver (CUPTI)", has(EventKind::driver_alloc), "memory that libraries take by themselves");
  add("GPU (NVML)", has(EventKind::gpu_process), "the context's bytes, and other processes");
  checkup.asked_nvml = has(EventKind::gpu_process);
  for (const Event& event : trace.events) {
    if (event.kind == EventKind::note &&
        trace.name(trace.context(event.context).op).starts_with("libraries that hold")) {
      checkup.cupti_holder = trace.name(event.detail);
    }
    if (event.kind == EventKind::note && trace.name(event.detail).starts_with(kNotFound)) {
      checkup.missing.push_back(
          fmt::format("{}: {}", trace.name(trace.context(event.context).op), trace.name(event.detail)));
    }
    if (event.kind != EventKind::gpu_process) continue;
    if ((event.flags & kFirstProcess) != 0) checkup.processes.clear();
    if (event.address != 0)
      checkup.processes.push_back({event.address, std::string(trace.name(event.detail)), event.bytes});
  }
}

std::string text_of(const nlohmann::json& answer, const char* name) {
  const auto found = answer.find(name);
  return found != answer.end() && found->is_string() ? found->get<std::string>() : std::string();
}

void read_versions(const nlohmann::json& answer, Checkup& checkup) {
  for (const char* name : {"driver", "cuda of the driver", "torch", "cuda", "cudnn"}) {
    std::string version = text_of(answer, name);
    const bool is_mocked = checkup.virtual_device && std::string_view(name).find("driver") != std::string_view::npos;
    if (is_mocked && !version.empty()) version += " (virtual)";
    checkup.versions.emplace_back(name, std::move(version));
  }
  checkup.gpu = text_of(answer, "name");
  checkup.total_bytes = answer.value("total", int64_t{0});
  checkup.free_bytes = answer.value("free", int64_t{0});
  checkup.failure = text_of(answer, "why_not");
  if (answer.empty()) checkup.failure = "python ended before it said anything";
  if (!checkup.failure.empty()) checkup.fix = "run it by hand: python -c 'import torch; torch.zeros(1).cuda()'";
  if (const std::string backend = text_of(answer, "backend"); !backend.empty()) {
    checkup.settings.emplace_back("allocator backend", backend);
  }
}

/// What changes what a program does with memory, or what can be seen of it.
void read_settings(Checkup& checkup) {
  for (const char* name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
                           "CUDA_VISIBLE_DEVICES", "CUDA_INJECTION64_PATH", "CUBLAS_WORKSPACE_CONFIG", "LD_PRELOAD"}) {
    if (const std::string value = environment(name); !value.empty()) checkup.settings.emplace_back(name, value);
  }
}

bool takes_other_allocator(const Checkup& checkup) {
  return std::any_of(checkup.settings.begin(), checkup.settings.end(),
                     [](const auto& one) { return one.first == "allocator backend" && one.second != "native"; });
}

}  // namespace

Checkup check_up(const std::string& python, const DeviceChoice& device, const Install& install) {
  Checkup checkup{.has_gpu = !name_of_real_gpu().empty(), .virtual_device = device.is_virtual()};
  read_settings(checkup);
  try {
    Install own = install;
    const std::string executable = prepare_torch(python, own);
    checkup.versions.emplace_back("python", executable);
    const TemporaryFolder folder;
    const Diagnosis run = diagnose(
        {.program = {executable, "-c", kLines}, .device = device, .base = folder.path(), .keeps_output = true}, own);
    read_versions(read_answer(run.folder / "output.txt"), checkup);
    if (!checkup.failure.empty()) return checkup;
    if (run.report) {
      read_trace_of(run.folder, checkup);
    } else if (!takes_other_allocator(checkup)) {
      checkup.failure = run.why_no_report;
      checkup.fix = "please report it, with the output of oomdiag doctor --json";
    }
  } catch (const Error& error) {
    checkup.failure = error.what();
    checkup.fix = error.hint();
  }
  return checkup;
}

}  // namespace oomdiag
