"""Samples from a Llama model with a large vocabulary and long prompts, in a loop of its own."""
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from expected import expected


class Prompts(Dataset):
    """With documents that a search found, all cut to the same length."""

    def __init__(self, n, length, vocab):
        self.data = torch.randint(0, vocab, (n, length))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


class Sampler:
    def __init__(self, temperature=0.8, top_k=50):
        self.temperature, self.top_k = temperature, top_k

    def __call__(self, logits):
        values, index = torch.topk(logits.float() / self.temperature, self.top_k, dim=-1)
        pick = torch.multinomial(values.softmax(-1), 1)
        return index.gather(-1, pick)


class Generator:
    def __init__(self, model, sampler, fixed):
        self.model, self.sampler, self.fixed = model, sampler, fixed
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens):
        ids = prompts.to(self.device)
        keep = {"logits_to_keep": 1} if self.fixed else {}
        past = None
        out = []
        for _ in range(max_new_tokens):
            result = self.model(input_ids=ids, past_key_values=past, use_cache=True, **keep)
            past = result.past_key_values
            ids = self.sampler(result.logits[:, -1])
            out.append(ids.cpu())
        return torch.cat(out, 1)


def build_model():
    config = LlamaConfig(vocab_size=128256, hidden_size=512, intermediate_size=1792, num_hidden_layers=8, num_attention_heads=8,
                         num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
    return LlamaForCausalLM(config).to(torch.bfloat16).cuda().eval(), config


@expected("logits", fix="logits_to_keep", thread="huggingface/transformers#31292", memory=4096)
def hf_prefill_logits(fixed=False, batch=8, length=2048):
    torch.manual_seed(0)
    model, config = build_model()
    generator = Generator(model, Sampler(), fixed)
    answers = []
    for prompts in DataLoader(Prompts(2 * batch, length, config.vocab_size), batch_size=batch):
        answers.append(generator.generate(prompts, 8))
    return torch.cat(answers)
