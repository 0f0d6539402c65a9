"""Measures detectors of several widths one after the other and deletes each of them."""
import functools
import gc
import math

import torch
import torch.nn as nn

from expected import expected


class SinePositionEmbedding(nn.Module):
    def __init__(self, dim, temperature=10000):
        super().__init__()
        self.dim, self.temperature = dim, temperature

    def encode(self, height, width, device):
        y = torch.arange(height, device=device, dtype=torch.float32)
        x = torch.arange(width, device=device, dtype=torch.float32)
        gy, gx = torch.meshgrid(y, x, indexing="ij")
        omega = 1.0 / self.temperature ** (torch.arange(self.dim // 4, device=device) / (self.dim // 4))
        oy, ox = gy.reshape(-1, 1) * omega, gx.reshape(-1, 1) * omega
        return torch.cat([ox.sin(), ox.cos(), oy.sin(), oy.cos()], dim=1)

    def forward(self, h, w, device):
        return self.encode(h, w, device)


class HybridEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.stem = nn.Sequential(nn.Conv2d(3, 128, 7, 4, 3), nn.ReLU(), nn.Conv2d(128, 512, 3, 2, 1), nn.ReLU(),
                                  nn.Conv2d(512, dim, 3, 2, 1), nn.ReLU(), nn.Conv2d(dim, dim, 3, 2, 1))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True, dropout=0.0) for _ in range(6))

    @functools.lru_cache(maxsize=32)
    def grid(self, h, w, device):
        return SinePositionEmbedding(self.dim)(h, w, device)

    def forward(self, x):
        x = self.stem(x)
        h, w = x.shape[2:]
        tokens = x.flatten(2).transpose(1, 2) + self.grid(h, w, x.device)
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens


class Detector(nn.Module):
    def __init__(self, dim, queries=300, classes=80):
        super().__init__()
        self.encoder = HybridEncoder(dim)
        self.queries = nn.Parameter(torch.randn(queries, dim) / math.sqrt(dim))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(dim, 8, 4 * dim, batch_first=True, dropout=0.0) for _ in range(3))
        self.cls, self.box = nn.Linear(dim, classes), nn.Linear(dim, 4)

    def forward(self, x):
        memory = self.encoder(x)
        q = self.queries.expand(x.shape[0], -1, -1)
        for layer in self.decoder:
            q = layer(q, memory)
        return self.cls(q), self.box(q).sigmoid()


def build(dim):
    with torch.device("cuda"):
        return Detector(dim)


@torch.no_grad()
def benchmark(dim, images, fixed=False):
    model = build(dim).eval()
    n = 0
    for batch in images:
        logits, boxes = model(batch.cuda())
        scores, idx = logits.sigmoid().flatten(1).topk(100)
        n += scores.cpu().shape[0]
    del model, logits, boxes, scores, idx
    if fixed:
        HybridEncoder.grid.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    return n


@expected("kept_tensors", fix="cache_clear", thread="huggingface/transformers#45412", memory=4096)
def detector_sweep(fixed=False):
    """`functools.lru_cache` on the method `grid` has `self` in its keys, so the cache of the class keeps every model that was deleted.
    Cured by: A cache without `self`, or `HybridEncoder.grid.cache_clear()`.
    """
    results = {}
    for i, dim in enumerate([1024, 1280, 1024, 1536, 1280, 1536, 1024, 1536, 1280, 1536]):
        results[i] = benchmark(dim, (torch.randn(4, 3, 640, 640) for _ in range(3)), fixed)
    return results
