"""Matches keypoints of pairs of images with a graph network of self- and cross-attention and Sinkhorn iterations."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

from expected import expected


class KeypointPairs(Dataset):
    """Keypoints and descriptors that were extracted before."""

    def __init__(self, n_pairs=6, n_kpts=2048, dim=256):
        self.n_pairs, self.n_kpts, self.dim = n_pairs, n_kpts, dim

    def __len__(self):
        return self.n_pairs

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        out = {}
        for s in ("0", "1"):
            out["kpts" + s] = torch.rand(self.n_kpts, 2, generator=g)
            out["scores" + s] = torch.rand(self.n_kpts, generator=g)
            out["desc" + s] = torch.randn(self.dim, self.n_kpts, generator=g)
        return out


def mlp(channels):
    layers = []
    for i in range(1, len(channels)):
        layers.append(nn.Conv1d(channels[i - 1], channels[i], 1))
        if i < len(channels) - 1:
            layers += [nn.BatchNorm1d(channels[i]), nn.ReLU()]
    return nn.Sequential(*layers)


class KeypointEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = mlp([3, 32, 64, 128, dim])

    def forward(self, kpts, scores):
        return self.net(torch.cat([kpts.transpose(1, 2), scores.unsqueeze(1)], dim=1))


class MultiHeadAttention(nn.Module):
    def __init__(self, heads, dim, fixed):
        super().__init__()
        self.h, self.d, self.fixed = heads, dim // heads, fixed
        self.q, self.k, self.v = (nn.Conv1d(dim, dim, 1) for _ in range(3))
        self.merge = nn.Conv1d(dim, dim, 1)
        self.maps = []  # for the figures

    def forward(self, x, source):
        b = x.size(0)
        q = self.q(x).view(b, self.h, self.d, -1)
        k = self.k(source).view(b, self.h, self.d, -1)
        v = self.v(source).view(b, self.h, self.d, -1)
        weights = (q.transpose(2, 3) @ k * self.d ** -0.5).softmax(dim=-1)
        if not self.fixed:
            self.maps.append(weights)
        out = v @ weights.transpose(2, 3)
        return self.merge(out.reshape(b, self.h * self.d, -1))


class Propagation(nn.Module):
    def __init__(self, dim, fixed, heads=4):
        super().__init__()
        self.attn = MultiHeadAttention(heads, dim, fixed)
        self.mlp = mlp([dim * 2, dim * 2, dim])

    def forward(self, x, source):
        return self.mlp(torch.cat([x, self.attn(x, source)], dim=1))


class MatcherGNN(nn.Module):
    def __init__(self, dim, names, fixed):
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList([Propagation(dim, fixed) for _ in names])

    def forward(self, d0, d1):
        for layer, name in zip(self.layers, self.names):
            layer.attn.maps.clear()
            s0, s1 = (d1, d0) if name == "cross" else (d0, d1)
            delta0, delta1 = layer(d0, s0), layer(d1, s1)
            d0, d1 = d0 + delta0, d1 + delta1
        return d0, d1


class Matcher(nn.Module):
    def __init__(self, fixed, dim=256, n_layers=9, sinkhorn_iters=20):
        super().__init__()
        self.kenc = KeypointEncoder(dim)
        self.gnn = MatcherGNN(dim, ["self", "cross"] * n_layers, fixed)
        self.final = nn.Conv1d(dim, dim, 1)
        self.iters = sinkhorn_iters

    def sinkhorn(self, z):
        u, v = torch.zeros_like(z[:, :, 0]), torch.zeros_like(z[:, 0])
        for _ in range(self.iters):
            u = -torch.logsumexp(z + v.unsqueeze(1), dim=2)
            v = -torch.logsumexp(z + u.unsqueeze(2), dim=1)
        return z + u.unsqueeze(2) + v.unsqueeze(1)

    def forward(self, data):
        d0 = data["desc0"] + self.kenc(data["kpts0"], data["scores0"])
        d1 = data["desc1"] + self.kenc(data["kpts1"], data["scores1"])
        d0, d1 = self.gnn(d0, d1)
        d0, d1 = self.final(d0), self.final(d1)
        sim = torch.einsum("bdn,bdm->bnm", d0, d1) / d0.shape[1] ** 0.5
        best = self.sinkhorn(sim).max(dim=2)
        return {"matches0": best.indices, "scores0": best.values.exp()}


@expected("kept_tensors", fix="no append", thread="magicleap/SuperGluePretrainedNetwork#20", memory=2048)
def superglue_attn(fixed=False):
    device = torch.device("cuda")
    matcher = Matcher(fixed).eval().to(device)
    n_matches = []
    with torch.no_grad():
        for batch in DataLoader(KeypointPairs(), batch_size=1):
            pred = matcher({k: v.to(device) for k, v in batch.items()})
            n_matches.append((pred["scores0"] > 0.2).sum().item())
    return sum(n_matches) / len(n_matches)
