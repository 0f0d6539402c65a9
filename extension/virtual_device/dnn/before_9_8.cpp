#include "extension/virtual_device/dnn/before_9_8.h"

#include "extension/virtual_device/dnn/real.h"
#include "extension/virtual_device/driver/device.h"

namespace oomdiag {

bool chooses_on_gpus_only() {
  static const bool is_old = OOMDIAG_REAL(cudnnGetVersion)() < 90800;
  return is_old;
}

bool is_step_of_choice(cudnnBackendDescriptorType_t type) {
  switch (static_cast<int>(type)) {
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR:
    case CUDNN_BACKEND_ENGINECFG_DESCRIPTOR:
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
      return true;
  }
  return false;
}

cudnnStatus_t answer_choice(cudnnBackendAttributeName_t attribute, int64_t requested, int64_t* count, void* elements) {
  const bool is_workspace = attribute == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE;
  if (is_workspace) {
    oomdiag_device_note("estimate", "workspaces of cuDNN, which before 9.8 gives them on a GPU only (taken as 0)");
    if (elements != nullptr && requested > 0) *static_cast<int64_t*>(elements) = 0;
  }
  // The descriptors of results are the caller's, who made them for it. Nothing else has an element: no note, no knob.
  if (count != nullptr) *count = is_workspace || attribute == CUDNN_ATTR_ENGINEHEUR_RESULTS ? 1 : 0;
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace oomdiag
