#include "extension/record/native_stack.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Type.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "extension/record/native_symbols.h"
#include "extension/record/thread_state.h"
#include "profiler/event.h"

// Every operator passes through at::_ops::<name>_<overload>::call or ::redispatch, which libtorch_cpu exports.

namespace oomdiag {

namespace {

constexpr std::string_view kOps = "_ZN2at4_ops";  // the namespace, mangled; the length and the name follow
constexpr std::string_view kEngine = "_ZN5torch8autograd6Engine";  // beyond it lies another op

/// "max_pool2d" of "_ZN2at4_ops10max_pool2d4callE…", or empty.
std::string_view name_in(std::string_view symbol) {
  if (!is_operator_symbol(symbol)) return {};
  symbol.remove_prefix(kOps.size());
  size_t length = 0;
  const auto [end, error] = std::from_chars(symbol.data(), symbol.data() + symbol.size(), length);
  if (error != std::errc{}) return {};
  symbol.remove_prefix(static_cast<size_t>(end - symbol.data()));
  return symbol.substr(0, length);
}

/// "aten::add" of "add_Tensor": where the name of the overload begins, the dispatcher knows.
std::optional<c10::OperatorHandle> find_operator(std::string_view joined) {
  const auto find = [](std::string_view name, std::string_view overload) {
    return c10::Dispatcher::singleton().findSchema({"aten::" + std::string(name), std::string(overload)});
  };
  if (const auto found = find(joined, "")) return found;
  for (size_t at = joined.rfind('_'); at != joined.npos && at != 0; at = joined.rfind('_', at - 1)) {
    if (const auto found = find(joined.substr(0, at), joined.substr(at + 1))) return found;
  }
  return std::nullopt;
}

std::string operator_name(std::string_view joined) {
  const auto found = find_operator(joined);
  return found ? found->operator_name().name : std::string();
}

/// Tensors, lists of them, and either where it may be left out.
bool takes_tensors(const c10::OperatorHandle& op) {
  return std::ranges::any_of(op.schema().arguments(), [](const c10::Argument& argument) {
    return argument.type()->str().starts_with("Tensor");
  });
}

/// Where PyTorch's libraries lie: one of them, the allocator's, is on every such stack.
std::string find_torch_folder(const NativeStack& stack) {
  constexpr std::string_view kAllocator = "/libc10_cuda.so";
  for (int i = 0; i < stack.depth; ++i) {
    Dl_info found{};
    if (dladdr(stack.frames[i], &found) == 0 || found.dli_fname == nullptr) continue;
    const std::string_view file = found.dli_fname;
    if (file.ends_with(kAllocator)) return std::string(file.substr(0, file.size() - kAllocator.size() + 1));
  }
  return {};
}

// An address to go back to lies behind the call.
std::string describe_call(void* address, const std::string& torch_folder) {
  constexpr size_t kLongest = 200;  // of a name: those of templates fill pages
  const void* call = static_cast<const char*>(address) - 1;
  Dl_info found{};
  if (dladdr(call, &found) == 0 || found.dli_fname == nullptr) return {};
  std::string file = found.dli_fname;
  if (!torch_folder.empty() && file.starts_with(torch_folder)) file = "torch/lib/" + file.substr(torch_folder.size());
  char offset[32];
  std::snprintf(offset, sizeof offset, "+0x%zx",
                reinterpret_cast<uintptr_t>(call) - reinterpret_cast<uintptr_t>(found.dli_fbase));
  std::string symbol = found.dli_sname != nullptr ? found.dli_sname : find_local_symbol(found, call);
  if (symbol.empty()) return file + offset;
  symbol = c10::demangle(symbol.c_str());
  if (symbol.size() > kLongest) symbol = symbol.substr(0, kLongest) + "...";
  return file + offset + " in " + symbol;
}

}  // namespace

bool is_operator_symbol(std::string_view symbol) { return symbol.starts_with(kOps); }

bool is_engine_symbol(std::string_view symbol) { return symbol.starts_with(kEngine); }

void NativeStack::capture() noexcept { depth = backtrace(frames, kMaxFrames); }

FoundOps find_ops(const NativeStack& stack, InternCache& names, Context& context) {
  std::string_view outermost;
  for (int i = 0; i < stack.depth; ++i) {
    Dl_info symbol{};
    if (dladdr(stack.frames[i], &symbol) == 0 || symbol.dli_sname == nullptr) continue;
    if (is_engine_symbol(symbol.dli_sname)) break;
    const std::string_view name = name_in(symbol.dli_sname);
    if (name.empty()) continue;
    outermost = name;
    if (context.inner == 0) context.inner = names.name(operator_name(name));
  }
  const auto op = outermost.empty() ? std::nullopt : find_operator(outermost);
  if (!op) return {};
  context.op = names.name(std::string_view(op->operator_name().name));
  return {.takes_tensors = takes_tensors(*op)};
}

std::string describe_calls(const NativeStack& stack) {
  const std::string torch_folder = find_torch_folder(stack);
  std::string text;
  bool begun = false;
  for (int i = 0; i < stack.depth; ++i) {
    const std::string call = describe_call(stack.frames[i], torch_folder);
    begun = begun || call.starts_with("torch/lib/");  // what comes before is ours
    if (begun && !call.empty()) text += (text.empty() ? "" : "\n") + call;
  }
  return text;
}

}  // namespace oomdiag
