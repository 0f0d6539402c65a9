"""Trains a policy by GRPO: samples completions, scores them and raises the probability of the good ones."""
import copy

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

from expected import expected

PROMPT, COMPLETION, GROUP, VOCAB = 1280, 64, 4, 151936


class Prompts(Dataset):
    def __init__(self, n=6):
        self.ids = torch.randint(0, VOCAB, (n, PROMPT))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i]


def build_policy():
    config = Qwen2Config(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
                         num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=4096,
                         tie_word_embeddings=True)
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def sample_completions(prompts):
    """Stands for an inference engine that returns GROUP completions per prompt."""
    repeated = prompts.repeat_interleave(GROUP, dim=0)
    completions = torch.randint(0, VOCAB, (repeated.shape[0], COMPLETION)).to(prompts.device)
    return torch.cat([repeated, completions], dim=1)


def reward_length_penalty(completions):
    return -(completions % 7).float().mean(dim=1)


def get_per_token_logps(model, input_ids, keep, fixed):
    if fixed:
        logits = model(input_ids=input_ids, use_cache=False, logits_to_keep=keep + 1).logits
    else:
        logits = model(input_ids=input_ids, use_cache=False).logits
    logits = logits[:, :-1, :]
    targets = input_ids[:, -logits.shape[1]:]
    per_token = []
    for row, ids in zip(logits, targets):
        logp = row.log_softmax(dim=-1)
        per_token.append(logp.gather(1, ids.unsqueeze(1)).squeeze(1))
    return torch.stack(per_token)[:, -keep:]


def grpo_loss(policy, reference, sequences, advantages, fixed, beta=0.04):
    logps = get_per_token_logps(policy, sequences, COMPLETION, fixed)
    with torch.no_grad():
        ref_logps = get_per_token_logps(reference, sequences, COMPLETION, fixed)
    kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
    ratio = torch.exp(logps - logps.detach())
    return -(ratio * advantages.unsqueeze(1) - beta * kl).mean(), kl.mean().item()


@expected("logits", fix="logits_to_keep", thread="huggingface/trl#2683", memory=4096)
def logits_of_prompts(fixed=False):
    device = torch.device("cuda")
    policy = build_policy().to(device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    policy.gradient_checkpointing_enable()
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    kls = []
    for prompts in DataLoader(Prompts(), batch_size=1, shuffle=True):
        sequences = sample_completions(prompts.to(device))
        rewards = reward_length_penalty(sequences[:, PROMPT:])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        loss, kl = grpo_loss(policy, reference, sequences, advantages, fixed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        kls.append(kl)
    return kls
