"""Trains a model of clicks with one embedding table for all categorical features."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

from expected import expected

NUM_DENSE, NUM_SPARSE, VOCAB, BATCH = 13, 26, 2_000_000, 4096


class ClickLogs(IterableDataset):
    def __init__(self, steps, seed=0):
        self.steps, self.seed = steps, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            dense = torch.rand(BATCH, NUM_DENSE, generator=g)
            cat = torch.randint(0, VOCAB, (BATCH, NUM_SPARSE), generator=g)
            yield dense, cat, (torch.rand(BATCH, generator=g) < 0.03).float()


def make_mlp(dims, last_act=True):
    layers = []
    for i, (a, b) in enumerate(zip(dims, dims[1:])):
        layers.append(nn.Linear(a, b))
        if last_act or i < len(dims) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Table(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding_table = nn.Parameter(torch.empty(vocab, dim).uniform_(0, vocab ** -0.5))

    def forward(self, cat):
        return F.embedding(cat, self.embedding_table)


class ChunkedTable(nn.Module):
    def __init__(self, vocab, dim, chunks=4):
        super().__init__()
        self.rows = vocab // chunks
        self.chunks = nn.ParameterList(nn.Parameter(torch.empty(self.rows, dim).uniform_(0, vocab ** -0.5)) for _ in range(chunks))

    def forward(self, cat):
        out = 0
        for i, chunk in enumerate(self.chunks):
            local = cat - i * self.rows
            inside = (local >= 0) & (local < self.rows)
            out = out + F.embedding(local.clamp(0, self.rows - 1), chunk) * inside.unsqueeze(-1)
        return out


class DLRM(nn.Module):
    def __init__(self, fixed, dim=128):
        super().__init__()
        self.table = (ChunkedTable if fixed else Table)(VOCAB, dim)
        self.bottom = make_mlp([NUM_DENSE, 512, 256, dim])
        n = NUM_SPARSE + 1
        self.top = make_mlp([dim + n * (n - 1) // 2, 1024, 512, 256, 1], last_act=False)
        self.register_buffer("tri", torch.tril_indices(n, n, offset=-1))

    def interact(self, bottom, emb):
        t = torch.cat([bottom.unsqueeze(1), emb], dim=1)
        dots = torch.bmm(t, t.transpose(1, 2))
        return torch.cat([bottom, dots[:, self.tri[0], self.tri[1]]], dim=1)

    def forward(self, dense, cat):
        bottom = self.bottom(torch.log1p(dense))
        return self.top(self.interact(bottom, self.table(cat))).squeeze(1)


def make_optimizer(model, lr, weight_decay):
    # one parameter after the other: foreach needs more memory
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, foreach=False)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total = n = 0
    for dense, cat, y in loader:
        logits = model(dense.to(device), cat.to(device)).cpu()
        total += F.binary_cross_entropy_with_logits(logits, y, reduction="sum").item()
        n += len(y)
    model.train()
    return total / n


@expected("optimizer_temporaries", fix="several parameters|fused=True", thread="mlcommons/algorithmic-efficiency#502", memory=5632)
def criteo_embed(fixed=False):
    device = torch.device("cuda")
    with torch.device(device):
        model = DLRM(fixed)
    opt = make_optimizer(model, 1e-3, 1e-5)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=10)
    train = DataLoader(ClickLogs(steps=8), batch_size=None)
    val = DataLoader(ClickLogs(steps=3, seed=9), batch_size=None)
    for dense, cat, y in train:
        loss = F.binary_cross_entropy_with_logits(model(dense.to(device), cat.to(device)), y.to(device))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
    return evaluate(model, val, device)
