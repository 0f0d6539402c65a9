#include "samples/models.h"

#include <algorithm>

#include "samples/training.h"

namespace samples {

void train_deepcnn(const Options&);
void train_simplecnn(const Options&);
void train_hidden_memory(const Options&);
void train_host_and_gpu(const Options&);
void train_kept_outputs(const Options&);
void train_accumulation(const Options&);
void train_amp(const Options&);
void train_half(const Options&);
void train_checkpoint(const Options&);
void run_copy(const Options&);
void train_no_zero_grad(const Options&);
void train_growing(const Options&);
void run_fragmented(const Options&);
void prepare_fragmented(const Options&);
void train_linear(const Options&);
void train_mlp(const Options&);
void run_generator(const Options&);
void run_duplicate_copies(const Options&);
void train_two_headed(const Options&);
void train_pinned(const Options&);
void train_pruned(const Options&);
void train_resnet50(const Options&);
void train_gpt(const Options&);

// clang-format off
std::span<const Model> all_models() {
  static const std::vector<Model> models = {
      // name, case, variants, batch, steps, optimizer, amp, about, loop, before it, accumulates
      {"deepcnn", "S7", {}, 64, 2, "adam", true, "three convolutions with ReLU and max pooling, images of 64x64", train_deepcnn, nullptr, true},
      {"simplecnn", "S6", {}, 128, 2, "adam", true, "one convolution with ReLU and max pooling, images of 32x32", train_simplecnn, nullptr, true},
      {"host_and_gpu", "S1", {}, 64, 2, "adam", true, "deepcnn on the GPU beside the same loop on the host", train_host_and_gpu},
      {"kept_outputs", "S2", {"kept", "deleted", "no_grad"}, 64, 3, "adam", true, "outputs that are still referenced when backward runs", train_kept_outputs},
      {"accumulation", "S3", {"accumulated", "whole", "zero_grad_inside", "one_gradient_scaled"}, 128, 2, "adam", true, "gradient accumulation over 4 passes, right and wrong", train_accumulation},
      {"amp", "S4", {"autocast", "float32"}, 64, 2, "adam", false, "fp16 autocast with a GradScaler, against float32", train_amp},
      {"half", "S4", {"half", "float32"}, 64, 2, "adam", false, "a float16 model with a GradScaler, which rejects it", train_half},
      {"checkpoint", "S5", {"segments_4", "whole", "segments_2", "segments_8", "segments_16"}, 2048, 2, "adam", true, "activation checkpointing of a 16-layer MLP", train_checkpoint},
      {"hidden_memory", "S8", {}, 64, 2, "adam", true, "deepcnn, for what no tensor of the program holds", train_hidden_memory},
      {"copy", "S9", {"copy", "in_place"}, 0, 0, "", false, "x + 1 against x.add_(1), a tensor of 1000x1000x1000", run_copy},
      {"no_zero_grad", "S10", {"never", "set_to_none", "set_to_zero"}, 32, 3, "sgd", true, "training without zero_grad", train_no_zero_grad},
      {"growing", "S11", {"validation_losses", "losses", "retained_graph", "items", "matmul"}, 512, 6, "adam", true, "tensors that are kept from step to step", train_growing},
      {"fragmented", "S12", {"interleaved", "expandable_segments", "kept_first"}, 0, 0, "", false, "interleaved sizes, then one large request", run_fragmented, prepare_fragmented},
      {"linear", "S13", {"batches", "whole_data_set"}, 2048, 5, "adam", true, "a batch of 2048 for a layer of 100x2", train_linear},
      {"mlp", "S14", {"named", "rebound"}, 100, 2, "adam", true, "an MLP that names every temporary", train_mlp},
      {"generator", "S15", {"with_gradients", "no_grad", "detach"}, 64, 2, "", false, "a generator without backward: needless gradients", run_generator},
      {"duplicate_copies", "S16", {"twice", "once"}, 0, 0, "", false, "the same host tensor moved to the GPU twice", run_duplicate_copies},
      {"two_headed", "S17", {"summed", "two_backwards", "two_encoders"}, 1024, 2, "adamw", true, "a trunk with two heads and two losses", train_two_headed},
      {"pinned", "S18", {"pinned", "pageable", "prefetch"}, 64, 4, "adam", true, "pinned host memory, non_blocking copies, prefetch", train_pinned},
      {"pruned", "S19", {"int8", "half_zeros", "float32"}, 512, 2, "adam", true, "weights as int8 or half zeros", train_pruned},
      {"resnet50", "", {}, 32, 2, "momentum", true, "ResNet-50, images of 224x224", train_resnet50, nullptr, true},
      {"gpt", "", {}, 4, 2, "adamw", true, "a GPT of 124 million parameters, 1024 tokens", train_gpt, nullptr, true},
  };
  return models;
}
// clang-format on

const Model* find_model(std::string_view name) {
  const auto models = all_models();
  const auto found = std::find_if(models.begin(), models.end(), [&](const Model& model) { return model.name == name; });
  return found == models.end() ? nullptr : &*found;
}

// Nothing here needs escaping.
std::string list_models() {
  std::string text = "[";
  for (const Model& model : all_models()) {
    std::string variants;
    for (const auto variant : model.variants)
      variants += (variants.empty() ? "\"" : ", \"") + std::string(variant) + '"';
    text += text.size() == 1 ? "{" : ",\n {";
    text += "\"name\": \"" + std::string(model.name) + "\", \"case\": \"" + std::string(model.reference_case) +
            "\", \"variants\": [" + variants + "], \"default_batch\": " + std::to_string(model.batch) +
            ", \"default_steps\": " + std::to_string(model.steps) + ", \"default_optimizer\": \"" +
            std::string(model.optimizer) + "\", \"takes_amp\": " + (model.takes_amp ? "true" : "false") +
            ", \"accumulates\": " + (model.accumulates ? "true" : "false") + ", \"about\": \"" +
            std::string(model.about) + "\"}";
  }
  return text + "]\n";
}

}  // namespace samples
