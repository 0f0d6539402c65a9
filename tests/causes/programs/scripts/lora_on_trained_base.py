"""Tunes a Llama with low-rank adapters that are added by hand."""
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from expected import expected


class InstructionData(Dataset):
    def __init__(self, n=24, length=256, vocab=32000):
        self.rows = torch.randint(0, vocab, (n, length))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = self.rows[i]
        labels = ids.clone()
        labels[: len(ids) // 3] = -100
        return {"input_ids": ids, "labels": labels}


class LoRALinear(nn.Module):
    def __init__(self, base, r=16, alpha=32, dropout=0.05):
        super().__init__()
        self.base = base
        self.scaling = alpha / r
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + (self.dropout(x) @ self.lora_A.t() @ self.lora_B.t()) * self.scaling


def add_lora(model, targets=("q_proj", "v_proj"), r=16):
    for _, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child_name in targets:
                setattr(module, child_name, LoRALinear(child, r=r))
    return model


def lora_parameters(model):
    return [p for n, p in model.named_parameters() if "lora_" in n]


def build_model():
    config = LlamaConfig(hidden_size=1280, intermediate_size=3456, num_hidden_layers=16, num_attention_heads=20,
                         num_key_value_heads=20, vocab_size=32000, max_position_embeddings=1024, use_cache=False)
    return LlamaForCausalLM(config)


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    total = 0.0
    for batch in loader:
        total += model(**{k: v.to(device) for k, v in batch.items()}).loss.item()
    model.train()
    return total / len(loader)


@expected("gradients_of_frozen", fix=r"requires_grad_\(False\)", thread="huggingface/diffusers#2245", memory=4096)
def lora_on_trained_base(fixed=False):
    device = torch.device("cuda")
    model = build_model()
    if fixed:
        model.requires_grad_(False)
    model = add_lora(model)
    model.to(device)

    params = lora_parameters(model)
    train_loader = DataLoader(InstructionData(), batch_size=2, shuffle=True)
    val_loader = DataLoader(InstructionData(n=8), batch_size=2)
    optimizer = torch.optim.AdamW(params, lr=2e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, len(train_loader))
    accumulation = 4
    model.train()
    for step, batch in enumerate(train_loader):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss = model(**batch).loss / accumulation
        loss.backward()
        if (step + 1) % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return validate(model, val_loader, device)
