"""Trains a recurrent language model whose recurrence is an autograd function written by hand."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

VOCAB, DIM, DEPTH = 5000, 1024, 6


class TokenStream(Dataset):
    def __init__(self, n=256, length=257):
        self.tokens = torch.randint(0, VOCAB, (n, length))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        row = self.tokens[i]
        return row[:-1], row[1:]


class GatedScan(torch.autograd.Function):
    """c_t = f_t * c_{t-1} + (1 - f_t) * x_t, in closed form."""

    @staticmethod
    def forward(ctx, x, forget, fixed):
        gate = torch.sigmoid(forget)
        decay = torch.cumsum(torch.log(gate + 1e-6), dim=1)
        c = torch.exp(decay) * torch.cumsum((1 - gate) * x * torch.exp(-decay), dim=1)
        if fixed:
            ctx.save_for_backward(x, gate, c)
        else:
            ctx.gate = gate
            ctx.c = c
            ctx.save_for_backward(x)
        return c

    @staticmethod
    def backward(ctx, grad_c):
        x, gate, c = ctx.saved_tensors if len(ctx.saved_tensors) == 3 else (*ctx.saved_tensors, ctx.gate, ctx.c)
        grad_x = grad_c * (1 - gate)
        grad_f = grad_c * (c - x) * gate * (1 - gate)
        return grad_x, grad_f, None


class SRULayer(nn.Module):
    def __init__(self, dim, fixed):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.fixed = fixed

    def forward(self, x):
        value, forget, reset = self.proj(self.norm(x)).chunk(3, dim=-1)
        c = GatedScan.apply(value, forget, self.fixed)
        return x + self.out(torch.tanh(c) * torch.sigmoid(reset))


class RecurrentLM(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(SRULayer(DIM, fixed) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@torch.no_grad()
def perplexity(model, loader, device):
    model.eval()
    losses = []
    for ids, targets in loader:
        logits = model(ids.to(device))
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten()).item())
    model.train()
    return torch.tensor(losses).mean().exp().item()


@expected("output_on_ctx", fix="save_for_backward", thread="pytorch/pytorch#25340", memory=2500)
def output_on_ctx(fixed=False):
    device = torch.device("cuda")
    model = RecurrentLM(fixed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=32)
    train_loader = DataLoader(TokenStream(), batch_size=8, shuffle=True, drop_last=True)
    val_loader = DataLoader(TokenStream(16), batch_size=8)
    running = 0.0
    for ids, targets in train_loader:
        logits = model(ids.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        running = 0.9 * running + 0.1 * loss.item()
    return running, perplexity(model, val_loader, device)
