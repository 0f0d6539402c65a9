"""Trains a network for energies and forces of molecules and validates it after each epoch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class ShiftedSoftplus(nn.Module):
    def forward(self, x):
        return F.softplus(x) - 0.6931


class Interaction(nn.Module):
    def __init__(self, dim, rbf):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(rbf, dim), ShiftedSoftplus(), nn.Linear(dim, dim))
        self.pre = nn.Linear(dim, dim, bias=False)
        self.post = nn.Sequential(nn.Linear(dim, dim), ShiftedSoftplus(), nn.Linear(dim, dim))

    def forward(self, x, f, idx_i, idx_j):
        w = self.filter(f)
        m = self.pre(x)[idx_j] * w
        agg = torch.zeros_like(x).index_add(0, idx_i, m)
        return x + self.post(agg)


class SchNet(nn.Module):
    def __init__(self, dim=128, rbf=32, layers=3, fixed=False):
        super().__init__()
        self.fixed = fixed
        self.embed = nn.Embedding(100, dim)
        self.layers = nn.ModuleList(Interaction(dim, rbf) for _ in range(layers))
        self.out = nn.Sequential(nn.Linear(dim, 64), ShiftedSoftplus(), nn.Linear(64, 1))
        self.register_buffer("centers", torch.linspace(0, 6, rbf))

    def forward(self, batch):
        R = batch["R"].requires_grad_()
        i, j = batch["idx_i"], batch["idx_j"]
        d = ((R[i] - R[j]) ** 2).sum(-1).add(1e-6).sqrt()
        f = torch.exp(-10 * (d[:, None] - self.centers) ** 2)
        x = self.embed(batch["Z"])
        for layer in self.layers:
            x = layer(x, f, i, j)
        e = self.out(x).squeeze(-1)
        energy = torch.zeros(batch["n"], device=e.device).index_add(0, batch["mol"], e)
        forces = -torch.autograd.grad(energy.sum(), R, create_graph=self.training if self.fixed else True)[0]
        return {"energy": energy, "forces": forces}


def molecules(n_batches, batch_size, atoms=40, neighbours=30):
    for _ in range(n_batches):
        N = batch_size * atoms
        mol = torch.arange(batch_size).repeat_interleave(atoms)
        i = torch.arange(N).repeat_interleave(neighbours)
        j = (i // atoms) * atoms + torch.randint(0, atoms, (N * neighbours,))
        yield {"R": torch.rand(N, 3) * 8, "Z": torch.randint(1, 10, (N,)), "idx_i": i, "idx_j": j, "mol": mol,
               "energy": torch.randn(batch_size), "forces": torch.randn(N, 3)}


def to_gpu(batch):
    out = {k: v.cuda() for k, v in batch.items()}
    out["n"] = len(batch["energy"])
    return out


def loss_fn(batch, result):
    return (F.mse_loss(result["energy"], batch["energy"]) * 0.01
            + F.mse_loss(result["forces"], batch["forces"]) * 0.99)


class Trainer:
    def __init__(self, model, opt):
        self.model, self.opt = model, opt

    def train_epoch(self, loader):
        self.model.train()
        for batch in loader:
            batch = to_gpu(batch)
            loss = loss_fn(batch, self.model(batch))
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    def validate(self, loader):
        self.model.eval()
        mae = {"energy": 0.0, "forces": 0.0}
        for batch in loader:
            batch = to_gpu(batch)
            result = self.model(batch)
            for key in mae:
                mae[key] += (result[key] - batch[key]).abs().mean().item()
        return mae


@expected("second_derivatives", fix=r"create_graph=(\w+\.training|False)", thread="atomistic-machine-learning/schnetpack#250", memory=11900)
def force_validation(fixed=False):
    """The validation computes the forces with `create_graph=True` as well, so the graph of the derivatives is there, and that of the batch
    before is still held (`result`, `batch`) while the next one runs. Cured by: `create_graph=self.training`.
    """
    model = SchNet(fixed=fixed).cuda()
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for _ in range(3):
        trainer.train_epoch(molecules(4, 340))
        mae = trainer.validate(molecules(4, 340))
    return mae
