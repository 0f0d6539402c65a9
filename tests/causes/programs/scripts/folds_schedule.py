"""Cross-validates a text classifier with a new model for each fold."""
import math

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR

from expected import expected

N_FOLDS, STEPS = 6, 4
device = "cuda"


def warmup_cosine(warmup, total, cycles):
    def lr_lambda(step):
        if step < warmup:
            return step / max(1, warmup)
        progress = (step - warmup) / max(1, total - warmup)
        return max(0.0, 0.5 * (1 + math.cos(math.pi * 2 * cycles * progress)))
    return lr_lambda


class WarmupCosine(LambdaLR):
    def __init__(self, optimizer, warmup, total, cycles=0.5, fixed=False):
        self.warmup, self.total, self.cycles = warmup, total, cycles
        super().__init__(optimizer, warmup_cosine(warmup, total, cycles) if fixed else self.lr_lambda)

    def lr_lambda(self, step):
        if step < self.warmup:
            return step / max(1, self.warmup)
        progress = (step - self.warmup) / max(1, self.total - self.warmup)
        return max(0.0, 0.5 * (1 + math.cos(math.pi * 2 * self.cycles * progress)))


class Classifier(nn.Module):
    def __init__(self, vocab=30000, width=1024, layers=6):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, width)
        self.layers = nn.Sequential(
            *[m for _ in range(layers) for m in (nn.Linear(width, 4096), nn.GELU(), nn.Linear(4096, width))])
        self.out = nn.Linear(width, 12)

    def forward(self, ids):
        return self.out(self.layers(self.emb(ids)))


def folds(n_docs, k):
    order = torch.randperm(n_docs)
    parts = order.chunk(k)
    for i in range(k):
        yield torch.cat([p for j, p in enumerate(parts) if j != i]), parts[i]


def train_fold(docs, labels, train_idx, test_idx, fixed=False):
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    scheduler = WarmupCosine(optimizer, warmup=2, total=STEPS, fixed=fixed)
    loss_fn = nn.CrossEntropyLoss()
    for step in range(STEPS):
        pick = train_idx[step * 64:(step + 1) * 64]
        loss = loss_fn(model(docs[pick].to(device)), labels[pick].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        pred = model(docs[test_idx].to(device)).argmax(1).cpu()
    return (pred == labels[test_idx]).float().mean().item()


@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="huggingface/transformers#1134", memory=3500)
def folds_schedule(fixed=False):
    """The scheduler hands its own bound method to `LambdaLR`: the cycle keeps scheduler, optimizer and model of every fold before. Cured
    by: A function with a closure in place of the method, or `gc.collect()` after each fold.
    """
    docs = torch.randint(0, 30000, (1200, 200))
    labels = torch.randint(0, 12, (1200,))
    scores = []
    for train_idx, test_idx in folds(len(docs), N_FOLDS):
        scores.append(train_fold(docs, labels, train_idx, test_idx, fixed))
    return sum(scores) / len(scores)
