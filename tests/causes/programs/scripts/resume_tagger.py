"""Continues the training of an audio tagger and of its averaged weights from a checkpoint that a first run has left."""
import copy
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

TAGS = 527


class Clips(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(1, 128, 512, generator=g), (torch.rand(TAGS, generator=g) < 0.01).float()


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Tagger(nn.Module):
    def __init__(self, d=768, layers=12, heads=12):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 16, 16)
        self.pos = nn.Parameter(torch.zeros(1, 256, d))
        self.blocks = nn.Sequential(*[Block(d, heads) for _ in range(layers)])
        self.head = nn.Linear(d, TAGS)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.blocks(h).mean(1))


class ModelEma:
    def __init__(self, model, decay=0.999):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)


def first_run(path):
    model = Tagger()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for p in model.parameters():
        opt.state[p] = {"step": torch.tensor(10.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    torch.save({"model": model.state_dict(), "ema": model.state_dict(), "optimizer": opt.state_dict(), "iter": 10,
                "best": 0.21}, path)


def train(path, resume, fixed, device="cuda"):
    it, best = 0, 0.0
    model = Tagger()
    if resume:
        checkpoint = torch.load(path, map_location=device)
        model.load_state_dict(checkpoint["model"])
        it, best = checkpoint["iter"], checkpoint["best"]
    model.to(device)
    ema = ModelEma(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if resume:
        ema.module.load_state_dict(checkpoint["ema"])
        opt.load_state_dict(checkpoint["optimizer"])
    if fixed:
        checkpoint = None
    for x, y in DataLoader(Clips(), batch_size=6):
        logits = model(x.to(device))
        loss = F.binary_cross_entropy_with_logits(logits, y.to(device))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        ema.update(model)
        it += 1
    return it, best


@expected("loaded_onto_gpu", fix="map_location|del state", thread="karpathy/nanoGPT#236", memory=3072)
def resume_tagger(fixed=False):
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ckpt.pt")
        first_run(path)
        return train(path, os.path.exists(path), fixed)
