"""Trains an item-to-item recommender with a learned vector for each of millions of items."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

from expected import expected

NUM_ITEMS = 3_200_000
DIM = 64


class WalkSampler(IterableDataset):
    """(head, tail, negative) of random walks, with neighbours of each."""

    def __init__(self, batches, batch_size=512, neighbours=10, seed=0):
        self.batches, self.bs, self.k, self.seed = batches, batch_size, neighbours, seed

    def nodes(self, g):
        ids = torch.randint(0, NUM_ITEMS, (self.bs,), generator=g)
        nbr = torch.randint(0, NUM_ITEMS, (self.bs, self.k), generator=g)
        w = torch.rand(self.bs, self.k, generator=g)
        text = torch.randn(self.bs, 300, generator=g)
        return ids, nbr, w / w.sum(1, keepdim=True), text

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.batches):
            yield [self.nodes(g) for _ in range(3)]


class SageLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.w = nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(0.3)

    def forward(self, h, nbr, weight):
        n = F.relu(self.q(self.drop(nbr)))
        n = (n * weight[..., None]).sum(1)
        z = F.relu(self.w(torch.cat([n, h], 1)))
        return F.normalize(z, dim=1)


class PinSage(nn.Module):
    def __init__(self, dim=DIM):
        super().__init__()
        self.text = nn.Linear(300, dim)
        self.sage = SageLayer(dim)

    def forward(self, own, nbr, weight, text):
        h = own + self.text(text)
        return h + self.sage(h, nbr, weight)


class Trainer:
    def __init__(self, device, fixed):
        self.device = device
        self.model = PinSage().to(device)
        if fixed:
            self.item_emb = nn.Embedding(NUM_ITEMS, DIM, sparse=True)
            self.opts = [torch.optim.Adam(self.model.parameters(), lr=3e-4),
                         torch.optim.SparseAdam(list(self.item_emb.parameters()), lr=3e-4)]
        else:
            self.item_emb = nn.Embedding(NUM_ITEMS, DIM).to(device)
            self.opts = [torch.optim.Adam(list(self.model.parameters()) + list(self.item_emb.parameters()), lr=3e-4)]

    def represent(self, nodes):
        ids, nbr, weight, text = nodes
        table = self.item_emb.weight.device
        own, nb = self.item_emb(ids.to(table)).to(self.device), self.item_emb(nbr.to(table)).to(self.device)
        return self.model(own, nb, weight.to(self.device), text.to(self.device))

    def step(self, head, tail, neg):
        h, t, n = self.represent(head), self.represent(tail), self.represent(neg)
        loss = ((h * n).sum(1) - (h * t).sum(1) + 1).clamp(min=0).mean()
        for opt in self.opts:
            opt.zero_grad()
        loss.backward()
        for opt in self.opts:
            opt.step()
        return loss.item()


@torch.no_grad()
def hit_rate(trainer, sampler, k=10):
    trainer.model.eval()
    head, tail, _ = next(iter(sampler))
    scores = trainer.represent(head) @ trainer.represent(tail).t()
    top = scores.topk(k, dim=1).indices
    hit = (top == torch.arange(top.size(0), device=top.device)[:, None]).any(1).float().mean().item()
    trainer.model.train()
    return hit


@expected("dense_embedding_gradients", fix="sparse=True", thread="dmlc/dgl#1676", memory=3072)
def table_of_items(fixed=False):
    torch.manual_seed(0)
    trainer = Trainer(torch.device("cuda"), fixed)
    for head, tail, neg in DataLoader(WalkSampler(8), batch_size=None):
        trainer.step(head, tail, neg)
    return hit_rate(trainer, WalkSampler(1, seed=9))
