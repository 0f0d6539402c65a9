// The user's NVTX ranges (torch.cuda.nvtx.range_push, nvtx.annotate) as scopes of the recording.
//
// NVTX loads the library that NVTX_INJECTION64_PATH names at its first call, and lets it fill in the functions behind its
// interface (nvtx3/nvtxDetail/nvtxInit.h). That library is the preloaded shim, not the recorder: NVTX may be used before
// torch is. Ranges of threads nest, so a push and a pop are all that is needed; marks and ranges between threads are not.

#include "extension/nvtx.h"

#include <nvtx3/nvToolsExt.h>

#include <atomic>

namespace oomdiag {

namespace {

std::atomic<RangeFunction> record_range = nullptr;

int change(const char* name) {
  if (const RangeFunction record = record_range.load(std::memory_order_acquire)) record(name);
  return 0;  // NVTX leaves the depth to tools that keep count of it
}

const char* text_of(const nvtxEventAttributes_t* attributes) {
  const bool plain = attributes != nullptr && attributes->messageType == NVTX_MESSAGE_TYPE_ASCII;
  const char* text = plain ? attributes->message.ascii : nullptr;
  return text == nullptr ? "range" : text;
}

int push(const char* message) { return change(message == nullptr ? "range" : message); }
int push_with(const nvtxEventAttributes_t* attributes) { return change(text_of(attributes)); }
int pop() { return change(nullptr); }
int push_in_domain(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) { return change(text_of(attributes)); }
int pop_in_domain(nvtxDomainHandle_t) { return change(nullptr); }

struct Entry {
  unsigned id;
  NvtxFunctionPointer function;
};

template <class F>
NvtxFunctionPointer pointer(F* function) {
  return reinterpret_cast<NvtxFunctionPointer>(function);
}

template <size_t N>
bool fill(const NvtxExportTableCallbacks& callbacks, NvtxCallbackModule module, const Entry (&entries)[N]) {
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks.GetModuleFunctionTable(module, &table, &size) == 0 || table == nullptr) return false;
  for (const Entry& entry : entries) {
    if (entry.id < size && table[entry.id] != nullptr) *table[entry.id] = entry.function;
  }
  return true;
}

}  // namespace

void record_nvtx_ranges(RangeFunction record) noexcept { record_range.store(record, std::memory_order_release); }

}  // namespace oomdiag

/// NVTX calls it at its first use. 1 = the functions are filled in.
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  using namespace oomdiag;
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  if (callbacks == nullptr || callbacks->struct_size < sizeof *callbacks) return 0;
  const Entry core[] = {{NVTX_CBID_CORE_RangePushA, pointer(push)},
                        {NVTX_CBID_CORE_RangePushEx, pointer(push_with)},
                        {NVTX_CBID_CORE_RangePop, pointer(pop)}};
  const Entry domains[] = {{NVTX_CBID_CORE2_DomainRangePushEx, pointer(push_in_domain)},
                           {NVTX_CBID_CORE2_DomainRangePop, pointer(pop_in_domain)}};
  const bool filled = fill(*callbacks, NVTX_CB_MODULE_CORE, core);
  return fill(*callbacks, NVTX_CB_MODULE_CORE2, domains) && filled ? 1 : 0;
}
