#pragma once

#include <cudnn.h>

namespace oomdiag {

/// Whether the loaded cuDNN is older than 9.8 and chooses plans on a real GPU only: that of torch 2.6 and 2.7.
bool chooses_on_gpus_only();

/// Whether descriptors of this type are steps of that choice: from the graph, which wants a handle, to the plan.
bool is_step_of_choice(cudnnBackendDescriptorType_t type);

/// cudnnBackendGetAttribute of such a step, in cuDNN's place: one configuration, one plan, and no workspace, which is noted as
/// an estimate.
cudnnStatus_t answer_choice(cudnnBackendAttributeName_t attribute, int64_t requested, int64_t* count, void* elements);

}  // namespace oomdiag
