"""Computes the vibrations of molecules from a learned potential, with the Hessian row by row."""
import torch
import torch.nn as nn

from expected import expected


class RadialBasis(nn.Module):
    def __init__(self, n=32, cutoff=6.0):
        super().__init__()
        self.register_buffer("mu", torch.linspace(0, cutoff, n))
        self.cutoff = cutoff

    def forward(self, d):
        env = 0.5 * (torch.cos(d.clamp(max=self.cutoff) * 3.14159 / self.cutoff) + 1)
        return torch.exp(-4 * (d[..., None] - self.mu) ** 2) * env[..., None]


class Interaction(nn.Module):
    def __init__(self, ch, nb):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(nb, ch), nn.SiLU(), nn.Linear(ch, ch))
        self.update = nn.Sequential(nn.Linear(ch, ch), nn.SiLU(), nn.Linear(ch, ch))

    def forward(self, h, rbf):
        w = self.filter(rbf)
        m = (w * h[None]).sum(1)
        return h + self.update(m)


class Potential(nn.Module):
    def __init__(self, ch=64, nb=32, layers=3):
        super().__init__()
        self.embed = nn.Embedding(100, ch)
        self.rbf = RadialBasis(nb)
        self.layers = nn.ModuleList([Interaction(ch, nb) for _ in range(layers)])
        self.readout = nn.Sequential(nn.Linear(ch, ch), nn.SiLU(), nn.Linear(ch, 1))

    def energy(self, z, pos):
        diff = pos[:, None] - pos[None]
        d = (diff.pow(2).sum(-1) + 1e-8).sqrt()
        rbf, h = self.rbf(d), self.embed(z)
        for layer in self.layers:
            h = layer(h, rbf)
        return self.readout(h).sum()


def energy_forces(model, z, pos, need_hessian):
    pos = pos.requires_grad_(True)
    e = model.energy(z, pos)
    grad = torch.autograd.grad(e, pos, create_graph=need_hessian)[0]
    return e, -grad, pos


def hessian_loop(forces, pos, fixed):
    flat = -forces.reshape(-1)
    rows = []
    for i in range(flat.numel()):
        row = torch.autograd.grad(flat[i], pos, retain_graph=True, create_graph=not fixed)[0]
        rows.append(row.reshape(-1))
    return torch.stack(rows)


def frequencies(hessian, masses):
    m = masses.repeat_interleave(3).rsqrt()
    dyn = hessian.detach().cpu() * m[:, None] * m[None]
    dyn = torch.nan_to_num(0.5 * (dyn + dyn.t()))
    return torch.linalg.eigvalsh(dyn)


def load_molecule(atoms, seed=0):
    g = torch.Generator().manual_seed(seed)
    z = torch.randint(1, 9, (atoms,), generator=g)
    pos = torch.rand(atoms, 3, generator=g) * atoms ** (1 / 3) * 1.8
    return z, pos, z.float() * 2


@expected("create_graph", fix="create_graph=False", thread="facebookresearch/fairchem#2099", memory=4096)
def hessian_rows(fixed=False):
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = Potential().to(device).eval()
    modes = {}
    for atoms in (24, 100):
        z, pos, masses = load_molecule(atoms)
        e, f, p = energy_forces(model, z.to(device), pos.to(device), need_hessian=True)
        h = hessian_loop(f, p, fixed)
        modes[atoms] = e.item(), frequencies(h, masses)
    return modes
