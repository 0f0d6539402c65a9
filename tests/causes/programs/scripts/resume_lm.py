"""Trains a small GPT that continues from its last checkpoint."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

CFG = dict(vocab=16000, width=512, layers=9, heads=8, block=128)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, width, layers, heads, block):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        logits = self.head(self.ln(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(size=2):
    x = torch.randint(0, CFG["vocab"], (size, CFG["block"] + 1))
    return x[:, :-1].cuda(), x[:, 1:].cuda()


def build(state=None):
    model = GPT(**CFG)
    if state is not None:
        model.load_state_dict(state)
    return model.cuda()


def first_run(out):
    model = GPT(**CFG)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for p in model.parameters():
        opt.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "iter_num": 2000}, out)


def train(out, fixed, max_iters=10):
    checkpoint = torch.load(out, map_location="cuda")
    model = build(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    if fixed:
        checkpoint = None
    for _ in range(iter_num, iter_num + max_iters):
        x, y = get_batch()
        loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return loss.item()


@expected("loaded_onto_gpu", fix=r"map_location|\bdel\b|None", thread="karpathy/nanoGPT#236", memory=930)
def resume_lm(fixed=False):
    """The checkpoint is loaded onto the GPU and stays referenced during training, beside model and optimizer. Cured by: `checkpoint = None`
    after the `load_state_dict` calls, or `map_location="cpu"`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "ckpt.pt")
        first_run(out)
        return train(out, fixed)
