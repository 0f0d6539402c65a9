"""Trains LightGCN on the graph of users and items and recommends items to the users of the test."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class Interactions:
    def __init__(self, n_users=20000, n_items=150000, n_inter=250000, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.n_users, self.n_items = n_users, n_items
        self.users = torch.randint(0, n_users, (n_inter,), generator=g)
        self.items = torch.randint(0, n_items, (n_inter,), generator=g)

    def edges(self):
        u, i = self.users, self.items + self.n_users
        return torch.cat([u, i]), torch.cat([i, u])

    def batches(self, size, steps):
        for _ in range(steps):
            sel = torch.randint(0, len(self.users), (size,))
            yield self.users[sel], self.items[sel], torch.randint(0, self.n_items, (size,))


class LightGCN(nn.Module):
    def __init__(self, n_nodes, dim=64, layers=2, fixed=False):
        super().__init__()
        self.embedding = nn.Embedding(n_nodes, dim)
        nn.init.xavier_uniform_(self.embedding.weight)
        self.layers, self.fixed = layers, fixed

    def propagate(self, x, src, dst, norm):
        return torch.zeros_like(x).index_add(0, dst, x[src] * norm[:, None])

    def get_embedding(self, graph):
        x = self.embedding.weight
        out = x / (self.layers + 1)
        for _ in range(self.layers):
            x = self.propagate(x, *graph)
            out = out + x / (self.layers + 1)
        return out

    def forward(self, graph, pairs):
        """The scores of pairs of a user's and an item's node, [2, n]."""
        out = self.get_embedding(graph)
        if self.fixed:
            return torch.cat([(out[u] * out[i]).sum(dim=-1) for u, i in pairs.split(100000, dim=1)])
        return (out[pairs[0]] * out[pairs[1]]).sum(dim=-1)


class LightGCNScorer:
    def __init__(self, device, lr=0.01, batch_size=8192, fixed=False):
        self.device, self.lr, self.batch_size, self.fixed = device, lr, batch_size, fixed

    def build_graph(self, data):
        src, dst = data.edges()
        deg = torch.bincount(dst, minlength=data.n_users + data.n_items).clamp(min=1).float()
        norm = (deg[src] * deg[dst]).rsqrt()
        return tuple(t.to(self.device) for t in (src, dst, norm))

    def train(self, data, epochs=2, steps=4):
        self.data = data
        self.graph = self.build_graph(data)
        self.model = LightGCN(data.n_users + data.n_items, fixed=self.fixed).to(self.device)
        opt = torch.optim.Adam(self.model.parameters(), lr=self.lr)
        total = 0.0
        for _ in range(epochs):
            for u, pos, neg in data.batches(self.batch_size, steps):
                users = torch.cat([u, u])
                items = torch.cat([pos, neg]) + data.n_users
                scores = self.model(self.graph, torch.stack([users, items]).to(self.device))
                p, n = scores.chunk(2)
                loss = -F.logsigmoid(p - n).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.item()
        self.model.zero_grad(set_to_none=True)
        return total

    @torch.inference_mode()
    def score(self, users):
        items = torch.arange(self.data.n_items, device=self.device) + self.data.n_users
        users = users.to(self.device)
        pairs = torch.stack([users.repeat_interleave(len(items)), items.repeat(len(users))])
        return self.model(self.graph, pairs).view(len(users), len(items))

    def recommend(self, users, n=10):
        return self.score(users).topk(n, dim=1).indices.cpu()


def hit_rate(recs, truth):
    return (recs == truth[:, None]).any(1).float().mean().item()


@expected("enlarged", fix="split", thread="lenskit/lkpy#982", memory=3072)
def lenskit_lightgcn(fixed=False):
    torch.manual_seed(0)
    data = Interactions()
    scorer = LightGCNScorer(torch.device("cuda"), fixed=fixed)
    scorer.train(data)
    test = torch.arange(0, 160)
    truth = torch.randint(0, data.n_items, (len(test),))
    hits = [hit_rate(scorer.recommend(users), truth[users]) for users in test.split(32)]
    return sum(hits) / len(hits)
