#include "extension/record/work_meter.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oomdiag {
namespace {

struct MeteredCalls {
  std::mutex mutex;
  std::map<std::pair<int64_t, std::string>, int64_t>
      counts;  ///< by step and the rest of the line without its number of calls
  std::filesystem::path file;
  pid_t process = 0;  ///< a forked child has the counts, too
};
MeteredCalls& metered_calls() {
  static auto* instance = new MeteredCalls;  // operators may run until the very end
  return *instance;
}

std::atomic<int64_t> steps_over = 0;
std::atomic<int> optimizers_running = 0;
thread_local int inside_of_whole = 0;  ///< operators that are told as a whole, and run on this thread

/// What is known of a call between its begin and its end.
struct MeteredCall final : at::ObserverContext {
  bool calls_others = false;
  MeteredCall* outer = nullptr;
};
thread_local MeteredCall* innermost_metered = nullptr;

bool is_told_as_whole(std::string_view name) {
  return name == "aten::convolution" || name == "aten::convolution_backward";
}

bool is_optimizer_step(const at::RecordFunction& call) {
  return call.scope() == at::RecordScope::USER_SCOPE && std::string_view(call.name()).starts_with("Optimizer.step#");
}

void append_tensor(std::string& text, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    text += '-';
    return;
  }
  text += c10::toString(tensor.scalar_type());
  text += ':' + std::to_string(tensor.element_size()) + ':';
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : "x") + std::to_string(sizes[i]);
}

void append_value(std::string& text, const c10::IValue& value) {
  if (value.isTensor()) return append_tensor(text, value.toTensor());
  if (value.isBool()) {
    text += value.toBool() ? "i:1" : "i:0";
  } else if (value.isInt()) {
    text += "i:" + std::to_string(value.toInt());
  } else if (value.isBoolList()) {
    text += "m:";
    for (const bool flag : value.toBoolList()) text += flag ? '1' : '0';
  } else if (value.isTensorList()) {
    bool first = true;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (!std::exchange(first, false)) text += ' ';
      append_tensor(text, tensor);
    }
    if (first) text += '-';
  } else {
    text += '-';
  }
}

const void* memory_of(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().has_storage()) return nullptr;
  return value.toTensor().storage().unsafeGetStorageImpl();
}

/// What it gives lies in the memory of what it took, and its name does not say that it writes there.
bool is_view(const at::RecordFunction& call, c10::ArrayRef<const c10::IValue> inputs,
             const std::vector<c10::IValue>& outputs) {
  if (inputs.empty() || outputs.empty() || std::string_view(call.name()).ends_with('_')) return false;
  const void* memory = memory_of(outputs[0]);
  if (memory == nullptr || memory != memory_of(inputs[0])) return false;
  for (size_t i = 1; i < inputs.size(); ++i) {
    if (memory_of(inputs[i]) == memory) return false;
  }
  return true;
}

const char* phase_now() {
  if (optimizers_running.load(std::memory_order_relaxed) > 0) return "optimizer";
  return torch::autograd::get_current_node() ? "backward" : "forward";
}

void tell_call(const at::RecordFunction& call) {
  const auto inputs = call.inputs();
  const std::vector<c10::IValue>& outputs = call.outputs();
  if ((inputs.empty() && outputs.empty()) || is_view(call, inputs, outputs)) return;
  std::string text = std::string(phase_now()) + '\t' + call.name() + '\t';
  for (const c10::IValue& value : inputs) append_value(text, value), text += ' ';
  text += '>';
  for (const c10::IValue& value : outputs) text += ' ', append_value(text, value);
  MeteredCalls& calls = metered_calls();
  const std::lock_guard lock(calls.mutex);
  ++calls.counts[{steps_over.load(std::memory_order_relaxed) + 1, std::move(text)}];
}

std::unique_ptr<at::ObserverContext> begin_metered_call(const at::RecordFunction& call) {
  if (is_optimizer_step(call)) optimizers_running.fetch_add(1);
  if (call.scope() == at::RecordScope::USER_SCOPE) return nullptr;
  auto context = std::make_unique<MeteredCall>();
  if (innermost_metered != nullptr) innermost_metered->calls_others = true;
  context->outer = std::exchange(innermost_metered, context.get());
  if (is_told_as_whole(call.name())) ++inside_of_whole;
  return context;
}

void end_metered_call(const at::RecordFunction& call, at::ObserverContext* context) {
  if (is_optimizer_step(call)) {
    optimizers_running.fetch_sub(1);
    steps_over.fetch_add(1);
  }
  if (context == nullptr) return;
  const auto* metered = static_cast<const MeteredCall*>(context);
  innermost_metered = metered->outer;
  const bool whole = is_told_as_whole(call.name());
  if (whole) --inside_of_whole;
  if (inside_of_whole > 0 || (metered->calls_others && !whole)) return;
  if (std::string_view(call.name()).find("::") == std::string_view::npos) return;
  tell_call(call);
}

void write_metered_calls() {
  MeteredCalls& calls = metered_calls();
  if (getpid() != calls.process) return;
  const std::lock_guard lock(calls.mutex);
  std::ofstream out(calls.file);
  for (const auto& [key, count] : calls.counts) {
    const auto& [step, text] = key;
    const size_t values = text.rfind('\t');
    out << step << '\t' << text.substr(0, values) << '\t' << count << text.substr(values) << '\n';
  }
}

}  // namespace

void start_work_meter(const std::filesystem::path& file) {
  metered_calls().file = file;
  metered_calls().process = getpid();
  std::atexit(write_metered_calls);
  auto callback = at::RecordFunctionCallback(begin_metered_call, end_metered_call);
  at::addGlobalCallback(
      callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
}

}  // namespace oomdiag
