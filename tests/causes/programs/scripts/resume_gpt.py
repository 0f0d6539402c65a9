"""Continues the training of a small GPT from a checkpoint that a first run has left in a file."""
import os
import tempfile

import torch
import torch.nn as nn
from torch.nn import functional as F

from expected import expected

device = "cuda"
batch_size, block_size = 4, 256
n_layer, n_head, n_embd, vocab_size = 8, 8, 512, 16384


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.fc = nn.Linear(n_embd, 4 * n_embd)
        self.proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def get_batch():
    x = torch.randint(0, vocab_size, (batch_size, block_size + 1))
    return x[:, :-1].to(device), x[:, 1:].to(device)


def write_checkpoint(ckpt_path):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(2000.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 2000}, ckpt_path)


def train(ckpt_path, max_iters, fixed):
    model = GPT()
    checkpoint = torch.load(ckpt_path, map_location="cpu" if fixed else device)
    state_dict = checkpoint["model"]
    unwanted_prefix = "_orig_mod."
    for k in list(state_dict.keys()):
        if k.startswith(unwanted_prefix):
            state_dict[k[len(unwanted_prefix):]] = state_dict.pop(k)
    model.load_state_dict(state_dict)
    iter_num = checkpoint["iter_num"]
    model.to(device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    optimizer.load_state_dict(checkpoint["optimizer"])

    for _ in range(iter_num, iter_num + max_iters):
        X, Y = get_batch()
        loss = model(X, Y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


@expected("loaded_onto_gpu", fix="map_location", thread="karpathy/nanoGPT#158", memory=1060)
def resume_gpt(fixed=False, max_iters=3):
    """The checkpoint is loaded onto the GPU (`map_location=device`), and `checkpoint` and `state_dict` keep it for the whole run: a second
    copy of the weights. Cured by: `map_location="cpu"`, or `del checkpoint, state_dict` after loading.
    """
    with tempfile.TemporaryDirectory() as out_dir:
        ckpt_path = os.path.join(out_dir, "ckpt.pt")
        write_checkpoint(ckpt_path)
        return train(ckpt_path, max_iters, fixed)
