// A small GPT: GPT-2's shape (12 layers of width 768, 1024 tokens, 50257 words) without dropout.

#include "samples/training.h"

namespace samples {

namespace {

namespace nn = torch::nn;

constexpr int64_t kWords = 50257;
constexpr int64_t kTokens = 1024;
constexpr int64_t kWide = 768;
constexpr int64_t kHeads = 12;
constexpr int kBlocks = 12;

struct GptBlock : nn::Module {
  nn::LayerNorm ln_1{nn::LayerNormOptions({kWide})};
  nn::LayerNorm ln_2{nn::LayerNormOptions({kWide})};
  nn::Linear c_attn{kWide, 3 * kWide};
  nn::Linear c_proj{kWide, kWide};
  nn::Linear c_fc{kWide, 4 * kWide};
  nn::Linear mlp_proj{4 * kWide, kWide};

  GptBlock() {
    register_module("ln_1", ln_1);
    register_module("c_attn", c_attn);
    register_module("c_proj", c_proj);
    register_module("ln_2", ln_2);
    register_module("c_fc", c_fc);
    register_module("mlp_proj", mlp_proj);
  }

  torch::Tensor attend(const torch::Tensor& x) {
    const auto qkv = scoped("c_attn", [&] { return c_attn(x); }).chunk(3, -1);
    const auto split = [&](const torch::Tensor& t) {
      return t.view({x.size(0), x.size(1), kHeads, kWide / kHeads}).transpose(1, 2);
    };
    const auto y = scoped("attention", [&] {
      const auto mixed = at::scaled_dot_product_attention(split(qkv[0]), split(qkv[1]), split(qkv[2]), {}, 0.0, true);
      return mixed.transpose(1, 2).reshape_as(x);
    });
    return scoped("c_proj", [&] { return c_proj(y); });
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x + attend(scoped("ln_1", [&] { return ln_1(x); }));
    auto y = scoped("ln_2", [&] { return ln_2(x); });
    y = scoped("c_fc", [&] { return c_fc(y); });
    y = scoped("gelu", [&] { return torch::gelu(y); });
    return x + scoped("mlp_proj", [&] { return mlp_proj(y); });
  }
};

struct Gpt : nn::Module {
  nn::Embedding wte{kWords, kWide};
  nn::Embedding wpe{kTokens, kWide};
  std::vector<std::shared_ptr<GptBlock>> blocks;
  nn::LayerNorm ln_f{nn::LayerNormOptions({kWide})};

  Gpt() {
    register_module("wte", wte);
    register_module("wpe", wpe);
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("h_" + std::to_string(i), std::make_shared<GptBlock>()));
    }
    register_module("ln_f", ln_f);
    nn::init::normal_(wte->weight, 0, 0.02);
    nn::init::normal_(wpe->weight, 0, 0.02);
  }

  torch::Tensor forward(const torch::Tensor& words) {
    const auto places = torch::arange(words.size(1), words.options());
    auto x = scoped("embedding", [&] { return wte(words) + wpe(places); });
    for (size_t i = 0; i < blocks.size(); ++i) {
      x = scoped("h." + std::to_string(i), [&] { return blocks[i]->forward(x); });
    }
    x = scoped("ln_f", [&] { return ln_f(x); });
    return scoped("lm_head", [&] { return torch::linear(x, wte->weight); });
  }
};

}  // namespace

void train_gpt(const Options& options) {
  Gpt model;
  move_to(model, options);
  const auto optimizer = make_optimizer(options, model.parameters());
  const auto words = torch::randint(kWords, {options.batch, kTokens}, options.longs());
  const auto next_words = words.roll(-1, 1);

  for (int64_t i = 0; i < options.steps; ++i) {
    zero_grad(*optimizer);
    const auto loss = run_passes(options, words, next_words, [&](const auto& some, const auto& targets) {
      const auto scores = model.forward(some);
      return classify(scores.view({-1, kWords}), targets.reshape(-1));
    });
    step(*optimizer, options);
    print_loss(options, loss);
  }
}

}  // namespace samples
