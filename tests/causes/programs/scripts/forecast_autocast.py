"""Rolls out forecasts with a large model of 32-bit weights under 16-bit autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

NODES, CHANNELS, DIM, LAYERS = 1024, 90, 1536, 22


class Analyses(Dataset):
    """Initial states of the atmosphere on a coarse mesh."""

    def __init__(self, n=3):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.randn(NODES, CHANNELS)


class ProcessorBlock(nn.Module):
    def __init__(self, dim, heads=16):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.projection = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.projection(y)
        return x + self.mlp(self.norm2(x))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(CHANNELS, DIM)
        self.processor = nn.ModuleList(ProcessorBlock(DIM) for _ in range(LAYERS))
        self.decode = nn.Linear(DIM, CHANNELS)

    def forward(self, state):
        x = self.encode(state)
        for block in self.processor:
            x = block(x)
        return state + self.decode(x)


class Normalizer:
    def __init__(self, device):
        self.mean = torch.zeros(CHANNELS, device=device)
        self.std = torch.ones(CHANNELS, device=device)

    def __call__(self, x):
        return (x - self.mean) / self.std

    def undo(self, x):
        return x * self.std + self.mean


def rollout(model, normalizer, state, steps, fixed):
    fields = []
    with torch.no_grad(), torch.autocast(device_type="cuda", dtype=torch.float16, cache_enabled=not fixed):
        state = normalizer(state)
        for _ in range(steps):
            state = model(state)
            fields.append(normalizer.undo(state.float()).cpu())
    return torch.stack(fields, dim=1)


def rmse(forecast, truth):
    return (forecast - truth).pow(2).mean().sqrt().item()


@expected("autocast_cache", fix="cache_enabled=False", thread="ecmwf/anemoi-core#134", memory=3500)
def forecast_autocast(fixed=False):
    device = torch.device("cuda")
    model = Forecaster().to(device).eval()
    normalizer = Normalizer(device)
    errors = []
    for state in DataLoader(Analyses(), batch_size=1):
        fields = rollout(model, normalizer, state.to(device), 4, fixed)
        errors.append(rmse(fields, torch.zeros_like(fields)))
    return errors
