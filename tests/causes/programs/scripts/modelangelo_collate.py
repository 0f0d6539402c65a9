"""Refines a model of a large protein in crops: a network runs around one residue at a time, and what it says is averaged."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


def density_map(size=48):
    values = torch.randn(1, size, size, size)
    return (values - values.mean()) / values.std()


class GNNLayer(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x, bias):
        h = self.n1(x)
        x = x + self.attn(h, h, h, attn_mask=bias, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class RefineGNN(nn.Module):
    def __init__(self, dim=192, layers=4):
        super().__init__()
        self.density = nn.Sequential(nn.Conv3d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv3d(16, dim, 3, 2, 1),
                                     nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten())
        self.pos = nn.Linear(3, dim)
        self.layers = nn.ModuleList([GNNLayer(dim) for _ in range(layers)])
        self.shift, self.aa = nn.Linear(dim, 3), nn.Linear(dim, 20)
        self.edge_q, self.edge_k = nn.Linear(dim, 64), nn.Linear(dim, 64)

    def forward(self, positions, grid):
        bias = -torch.cdist(positions, positions) / 10
        x = (self.pos(positions) + self.density(grid[None])).unsqueeze(0)
        for layer in self.layers:
            x = layer(x, bias)
        x = x[0]
        edges = torch.sigmoid(self.edge_q(x) @ self.edge_k(x).t() / 8)
        return {"positions": positions + self.shift(x), "aa_logits": self.aa(x), "edge_probs": edges}


def empty_totals(n, where="cpu"):
    """Sums over all crops, for the n residues of the whole model."""
    shapes = {"visits": (n,), "xyz": (n, 3), "aa": (n, 20), "bond": (n, n), "bond_visits": (n, n)}
    return {name: torch.zeros(shape, device=where) for name, shape in shapes.items()}


def add_crop(totals, crop, idx):
    where = totals["visits"].device
    crop, idx = {k: v.to(where) for k, v in crop.items()}, idx.to(where)
    totals["visits"][idx] += 1
    totals["xyz"][idx] += crop["positions"]
    totals["aa"][idx] += F.log_softmax(crop["aa_logits"], dim=-1)
    rows, cols = idx[:, None], idx[None]
    totals["bond"][rows, cols] += crop["edge_probs"]
    totals["bond_visits"][rows, cols] += 1


def neighbours_of(positions, center, crop_length):
    d = (positions - positions[center]).norm(dim=1)
    return d.topk(min(crop_length, len(d)), largest=False).indices


@torch.no_grad()
def infer(residues, crop_length, max_crops, device, fixed):
    module = RefineGNN().to(device).eval()
    positions = torch.rand(residues, 3) * residues ** (1 / 3) * 4
    grid = density_map().to(device)
    totals = empty_totals(len(positions), where="cpu" if fixed else device)
    for center in torch.randperm(residues)[:max_crops].tolist():
        idx = neighbours_of(positions, center, crop_length)
        out = module(positions[idx].to(device), grid)
        add_crop(totals, out, idx)
    seen = totals["visits"].clamp(min=1)
    bonds = totals["bond"].div_(totals["bond_visits"].clamp_(min=1))
    return {"positions": (totals["xyz"] / seen[:, None]).cpu(), "aa": (totals["aa"] / seen[:, None]).argmax(-1).cpu(),
            "bonds": int((bonds > 0.5).sum())}


@expected("square_matrices", fix="on the host|cpu", thread="3dem/model-angelo#20", memory=600)
def modelangelo_collate(fixed=False, residues=9000):
    return infer(residues, crop_length=200, max_crops=20, device=torch.device("cuda"), fixed=fixed)["bonds"]
