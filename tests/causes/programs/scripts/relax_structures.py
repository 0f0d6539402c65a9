"""Relaxes a batch of atomic structures with a batched L-BFGS and a force field whose forces come from autograd."""
from dataclasses import dataclass

import torch
import torch.nn as nn

from expected import expected


class PairForceField(nn.Module):
    def __init__(self, hidden=32, rbf=16):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.5, 6.0, rbf))
        self.net = nn.Sequential(nn.Linear(rbf, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                 nn.Linear(hidden, 1))

    def energy(self, pos):
        diff = pos[:, :, None, :] - pos[:, None, :, :]
        dist = (diff.pow(2).sum(-1) + 1e-6).sqrt()
        feats = torch.exp(-(dist[..., None] - self.centers) ** 2)
        return self.net(feats).squeeze(-1).sum((1, 2))

    def forward(self, state):
        if not state.positions.requires_grad:
            state.positions.requires_grad_(True)
        e = self.energy(state.positions)
        forces = -torch.autograd.grad(e.sum(), state.positions)[0]
        return {"energy": e.detach(), "forces": forces}


@dataclass
class RelaxState:
    positions: torch.Tensor
    forces: torch.Tensor = None
    energy: torch.Tensor = None
    prev_positions: torch.Tensor = None
    prev_forces: torch.Tensor = None
    s_history: torch.Tensor = None
    y_history: torch.Tensor = None


class BatchedLBFGS:
    def __init__(self, model, memory=12, max_step=0.2, alpha=70.0, fixed=False):
        self.model, self.memory, self.max_step, self.alpha, self.fixed = model, memory, max_step, alpha, fixed

    def init(self, positions):
        b, n, _ = positions.shape
        st = RelaxState(positions)
        out = self.model(st)
        st.forces, st.energy = out["forces"], out["energy"]
        st.prev_positions, st.prev_forces = st.positions.clone(), st.forces.clone()
        st.s_history = positions.new_zeros(b, 0, n * 3)
        st.y_history = positions.new_zeros(b, 0, n * 3)
        return st

    def direction(self, st):
        q = -st.forces.flatten(1)
        m = st.s_history.shape[1]
        alphas = []
        for i in range(m - 1, -1, -1):
            s, y = st.s_history[:, i], st.y_history[:, i]
            rho = 1.0 / ((s * y).sum(1, keepdim=True) + 1e-8)
            a = rho * (s * q).sum(1, keepdim=True)
            q = q - a * y
            alphas.append((a, rho))
        z = q / self.alpha
        for i in range(m):
            a, rho = alphas[m - 1 - i]
            s, y = st.s_history[:, i], st.y_history[:, i]
            beta = rho * (y * z).sum(1, keepdim=True)
            z = z + s * (a - beta)
        return -z

    def step(self, st):
        d = self.direction(st).view_as(st.positions)
        norm = d.norm(dim=-1).amax(1)
        d = d * (self.max_step / (norm + 1e-8)).clamp(max=1.0)[:, None, None]
        st.prev_positions, st.prev_forces = st.positions, st.forces
        st.positions = st.positions + d
        out = self.model(st)
        st.forces, st.energy = out["forces"], out["energy"]
        s_new = (st.positions - st.prev_positions).flatten(1)
        y_new = (st.prev_forces - st.forces).flatten(1)
        if self.fixed:
            st.positions, s_new, y_new = st.positions.detach(), s_new.detach(), y_new.detach()
        st.s_history = torch.cat([st.s_history, s_new[:, None]], 1)[:, -self.memory:]
        st.y_history = torch.cat([st.y_history, y_new[:, None]], 1)[:, -self.memory:]
        return st


def relax(model, positions, steps, fixed):
    opt = BatchedLBFGS(model, fixed=fixed)
    state = opt.init(positions)
    trajectory = []
    for _ in range(steps):
        state = opt.step(state)
        trajectory.append(state.energy.mean().item())
    return state, trajectory


@expected("graph_of_earlier_steps", fix=r"s_history\.detach", thread="TorchSim/torch-sim#559", memory=3072)
def relax_structures(fixed=False):
    torch.manual_seed(0)
    model = PairForceField().cuda().eval()
    for p in model.parameters():
        p.requires_grad_(False)
    positions = (torch.randn(1500, 32, 3) * 3).cuda()
    return relax(model, positions, steps=120, fixed=fixed)
