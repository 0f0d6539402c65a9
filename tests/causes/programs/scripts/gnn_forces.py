"""Trains a message passing network for energies and forces of catalyst structures and validates it."""
import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

from expected import expected

DEVICE = "cuda"


class Structures(Dataset):
    def __init__(self, n, atoms=200, degree=40):
        self.n, self.atoms, self.degree = n, atoms, degree

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        src = torch.arange(self.atoms).repeat_interleave(self.degree)
        dst = torch.randint(0, self.atoms, (self.atoms * self.degree,))
        return {"z": torch.randint(1, 90, (self.atoms,)), "pos": torch.randn(self.atoms, 3) * 4,
                "edge": torch.stack([src, dst]), "energy": torch.randn(()), "forces": torch.randn(self.atoms, 3)}


def collate(items):
    shift, edges, owner = 0, [], []
    for k, s in enumerate(items):
        edges.append(s["edge"] + shift)
        owner.append(torch.full((len(s["z"]),), k))
        shift += len(s["z"])
    return {"z": torch.cat([s["z"] for s in items]), "pos": torch.cat([s["pos"] for s in items]),
            "edge": torch.cat(edges, 1), "owner": torch.cat(owner), "n": len(items),
            "energy": torch.stack([s["energy"] for s in items]), "forces": torch.cat([s["forces"] for s in items])}


class Interaction(nn.Module):
    def __init__(self, dim, rbf):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(rbf, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.update = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, h, edge, rbf):
        msg = h[edge[1]] * self.filter(rbf)
        agg = torch.zeros_like(h).index_add(0, edge[0], msg)
        return h + self.update(agg)


class ForceNet(nn.Module):
    def __init__(self, dim=128, rbf=50, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(100, dim)
        self.register_buffer("centers", torch.linspace(0, 12, rbf))
        self.blocks = nn.ModuleList([Interaction(dim, rbf) for _ in range(blocks)])
        self.energy_head = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))
        self.force_head = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 3))

    def forward(self, batch):
        edge = batch["edge"]
        dist = (batch["pos"][edge[0]] - batch["pos"][edge[1]]).norm(dim=1)
        rbf = torch.exp(-(dist[:, None] - self.centers) ** 2)
        h = self.embed(batch["z"])
        for block in self.blocks:
            h = block(h, edge, rbf)
        atom = self.energy_head(h)[:, 0]
        energy = torch.zeros(batch["n"], device=atom.device).index_add(0, batch["owner"], atom)
        return {"energy": energy, "forces": self.force_head(h)}


class ForcesTrainer:
    def __init__(self, folder, fixed):
        self.folder, self.fixed = folder, fixed
        self.model = ForceNet().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.train_loader = DataLoader(Structures(80), batch_size=8, shuffle=True, collate_fn=collate)
        self.val_loader = DataLoader(Structures(64), batch_size=8, collate_fn=collate)

    def _to_device(self, batch):
        return {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in batch.items()}

    def _compute_loss(self, out, batch):
        return (out["energy"] - batch["energy"]).abs().mean() + 30 * (out["forces"] - batch["forces"]).abs().mean()

    def _compute_metrics(self, out, batch, metrics):
        for key in ("energy", "forces"):
            mae = (out[key] - batch[key]).abs().mean().item()
            metrics.setdefault(key + "_mae", []).append(mae)
        return metrics

    def train(self, epochs=1):
        validate = torch.no_grad()(self.validate) if self.fixed else self.validate
        for _ in range(epochs):
            self.model.train()
            for batch in self.train_loader:
                batch = self._to_device(batch)
                out = self.model(batch)
                loss = self._compute_loss(out, batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            metrics = validate()
            torch.save(self.model.state_dict(), os.path.join(self.folder, "forces.pt"))
        return metrics

    def validate(self):
        self.model.eval()
        metrics = {}
        for batch in self.val_loader:
            batch = self._to_device(batch)
            out = self.model(batch)
            loss = self._compute_loss(out, batch)
            metrics = self._compute_metrics(out, batch, metrics)
            metrics.setdefault("loss", []).append(loss.item())
        return {k: sum(v) / len(v) for k, v in metrics.items()}


@expected("evaluation_keeps_graphs", fix="no_grad", thread="facebookresearch/fairchem#199", memory=1024)
def gnn_forces(fixed=False):
    """`validate` builds graphs that no backward pass releases, and `loss` and `out` keep one while the next batch runs. Cured by:
    `@torch.no_grad()` on `validate`.
    """
    with tempfile.TemporaryDirectory() as folder:
        return ForcesTrainer(folder, fixed).train()
