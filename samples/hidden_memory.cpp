// deepcnn once more, for what no tensor of the program holds: workspaces, temporaries, the CUDA context. And deepcnn on the
// GPU beside the same loop on the host.

#include "samples/deepcnn.h"
#include "samples/training.h"

namespace samples {

void train_hidden_memory(const Options& options) { train_classifier<DeepCnn>(options, 64); }
void train_host_and_gpu(const Options& options) { train_classifier<DeepCnn>(options, 64); }

}  // namespace samples
