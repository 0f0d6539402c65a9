"""Searches for a learning rate and a dropout with one trainer object."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

device = torch.device("cuda")


class Tagger(nn.Module):
    def __init__(self, dropout, vocab=120000, width=1536, layers=24, tags=20):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout),
                          nn.Linear(4 * width, width))
            for _ in range(layers))
        self.out = nn.Linear(width, tags)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


class Trainer:
    def __init__(self, model_init, steps=3, fixed=False):
        self.model_init, self.steps, self.fixed = model_init, steps, fixed
        self.model, self.optimizer, self.objective = None, None, None

    def setup(self, params):
        if self.fixed:
            self.model = self.optimizer = None
        self.model = self.model_init(params)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=params["lr"], fused=True)

    def batch(self):
        return torch.randint(0, 120000, (4, 64)).to(device), torch.randint(0, 20, (4, 64)).to(device)

    def train(self, params):
        self.setup(params)
        self.model.train()
        for _ in range(self.steps):
            ids, tags = self.batch()
            loss = F.cross_entropy(self.model(ids).flatten(0, 1), tags.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.objective = self.evaluate()
        return self.objective

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        ids, tags = self.batch()
        return (self.model(ids).argmax(-1) == tags).float().mean().item()


def model_init(params):
    with device:
        return Tagger(params["dropout"])


def suggest():
    return {"lr": 10 ** random.uniform(-6, -3), "dropout": random.choice([0.0, 0.1, 0.3])}


@expected("several_models", fix=r"= None|\bdel\b", thread="huggingface/transformers#13019", memory=11900)
def hp_search(fixed=False, n_trials=5):
    """The next trial makes its model while the trainer still holds model and optimizer of the trial before. Cured by: Release both before
    the next trial (`self.model = self.optimizer = None`).
    """
    random.seed(11)
    trainer, best = Trainer(model_init, fixed=fixed), (None, -1.0)
    for _ in range(n_trials):
        params = suggest()
        score = trainer.train(params)
        if score > best[1]:
            best = (params, score)
    return best
