#include "extension/record/op_arguments.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "extension/record/fork_and_exit.h"
#include "extension/record/session.h"
#include "extension/record/thread_state.h"

// An operator asks the allocator for what its arguments and the device decide, and for nothing else. So a call that is known
// with its arguments can be called again by itself. Lines are kept until there are some, and a file is open only while
// they are appended: the program may be ended at any step, and may close descriptors that it does not know.

namespace oomdiag {
namespace {

struct ArgumentsWriter {
  std::mutex mutex;
  std::string text;  ///< not yet in the file
  uint32_t step = 0;
  std::filesystem::path file;
};
ArgumentsWriter& arguments_writer() {
  static auto* const instance = new ArgumentsWriter;  // operators may run until the very end
  return *instance;
}

/// The newest call of this thread that was written: operators inside of it have the same number.
thread_local uint32_t written_call = 0;

constexpr size_t kMaxText = size_t{1} << 20;

/// The storages of a call's tensors, in the order in which they appear: weights of a recurrent network have to lie in one.
using Storages = std::vector<const c10::StorageImpl*>;

size_t number_of(const c10::StorageImpl* storage, Storages& storages) {
  const auto known = std::find(storages.begin(), storages.end(), storage);
  const auto number = static_cast<size_t>(known - storages.begin());
  if (known == storages.end()) storages.push_back(storage);
  return number;
}

/// Throws what the tensor throws that has no strides.
void append_dense(std::string& text, const at::Tensor& tensor, Storages& storages) {
  const auto list = [&](const auto& values) {
    text += '[';
    for (size_t i = 0; i < values.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(values[i]);
    text += ']';
  };
  text += std::string(R"({"t":[")") + c10::toString(tensor.scalar_type()) + "\",";
  list(tensor.sizes());
  text += ',';
  list(tensor.strides());
  text += tensor.requires_grad() ? ",true" : ",false";
  text += tensor.is_cuda() ? ",true," : ",false,";
  text += std::to_string(number_of(tensor.storage().unsafeGetStorageImpl(), storages)) + ',' +
          std::to_string(tensor.storage_offset()) + "]}";
}

std::string hexadecimal(double value) {
  char digits[40];
  std::snprintf(digits, sizeof digits, "%a", value);
  return digits;
}

/// A text of JSON.
void append_quoted(std::string& text, std::string_view content) {
  text += '"';
  for (const char letter : content) {
    if (letter == '"' || letter == '\\') text += '\\';
    if (const auto code = static_cast<unsigned char>(letter); code >= ' ') {
      text += letter;
    } else {
      char digits[8];
      std::snprintf(digits, sizeof digits, "\\u%04x", code);
      text += digits;
    }
  }
  text += '"';
}

void append_argument(std::string& text, const c10::IValue& value, Storages& storages);

template <typename List>
void append_each(std::string& text, const List& list, Storages& storages) {
  text += '[';
  bool is_first = true;
  for (const auto& element : list) {
    if (!std::exchange(is_first, false)) text += ',';
    append_argument(text, element, storages);
  }
  text += ']';
}

void append_argument(std::string& text, const c10::IValue& value, Storages& storages) {
  if (value.isTensor() && value.toTensor().defined()) {
    append_dense(text, value.toTensor(), storages);
  } else if (value.isBool()) {
    text += value.toBool() ? "true" : "false";
  } else if (value.isInt()) {
    text += std::to_string(value.toInt());
  } else if (value.isDouble()) {
    text += R"({"f":")" + hexadecimal(value.toDouble()) + "\"}";
  } else if (value.isString()) {
    text += R"({"s":)";
    append_quoted(text, value.toStringRef());
    text += '}';
  } else if (value.isDevice()) {
    text += R"({"d":")" + value.toDevice().str() + "\"}";
  } else if (value.isList()) {
    append_each(text, value.toListRef(), storages);
  } else {
    text += "null";
  }
}

/// A letter for each setting that is on.
std::string current_mode() {
  const at::Context& context = at::globalContext();
  std::string mode;
  const auto add = [&](bool is_on, char letter) { mode += is_on ? letter : '-'; };
  add(c10::GradMode::is_enabled(), 'g');
  add(context.benchmarkCuDNN(), 'b');
  add(context.deterministicCuDNN(), 'd');
  add(context.deterministicAlgorithms(), 'D');
  add(context.userEnabledFlashSDP(), 'f');
  add(context.userEnabledMemEfficientSDP(), 'm');
  add(at::autocast::is_autocast_enabled(at::kCUDA), 'a');
  return mode;
}

std::string describe_call(const at::RecordFunction& call, const c10::OperatorName& name) {
  std::string text =
      R"({"op":[")" + name.name + "\",\"" + name.overload_name + R"("],"mode":")" + current_mode() + R"(","in":)";
  Storages storages;
  append_each(text, call.inputs(), storages);
  return text + "}";
}

/// With the lock.
void append_to_file(ArgumentsWriter& writer) {
  if (writer.text.empty()) return;
  std::ofstream(writer.file, std::ios::app) << writer.text;
  writer.text.clear();
}

void write_call(uint32_t number, const std::string& line) {
  const uint32_t step = session().writer().header().step_count.load(std::memory_order_relaxed);
  ArgumentsWriter& writer = arguments_writer();
  const std::lock_guard lock(writer.mutex);
  writer.text += std::to_string(number) + '\t' + line + '\n';
  if (step != writer.step || writer.text.size() > kMaxText) append_to_file(writer);
  writer.step = step;
}

std::unique_ptr<at::ObserverContext> begin_outermost_call(const at::RecordFunction& call) {
  if (!recording() || in_forked_child()) return nullptr;
  const uint32_t number = thread_state().place.now().call_id;
  if (number == 0 || number == std::exchange(written_call, number)) return nullptr;
  const auto name = call.operator_name();
  if (!name) return nullptr;
  try {
    write_call(number, describe_call(call, *name));
  } catch (const std::exception&) {  // a tensor without strides, a setting that cannot be asked: that call is not known
  }
  return nullptr;
}

void write_rest() {
  if (in_forked_child()) return;
  ArgumentsWriter& writer = arguments_writer();
  const std::lock_guard lock(writer.mutex);
  append_to_file(writer);
}

}  // namespace

void start_op_arguments(const std::filesystem::path& file) {
  arguments_writer().file = file;
  std::atexit(write_rest);
  auto callback = at::RecordFunctionCallback(begin_outermost_call);
  at::addGlobalCallback(callback.needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace oomdiag
