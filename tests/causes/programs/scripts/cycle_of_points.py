"""Solves an advection equation with a physics-informed network on new collocation points in each iteration."""
import math

import torch
import torch.nn as nn

from expected import expected


class PINN(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        layers.append(nn.Linear(width, 1))
        self.net = nn.Sequential(*layers)

    def forward(self, xt):
        return self.net(xt)


class Sampler:
    def __init__(self, n_int, n_ic, n_bc, device):
        self.n_int, self.n_ic, self.n_bc, self.device = n_int, n_ic, n_bc, device

    def interior(self):
        xt = torch.rand(self.n_int, 2)
        xt[:, 0] = xt[:, 0] * 2 - 1
        return xt.to(self.device).requires_grad_(True)

    def initial(self):
        x = torch.rand(self.n_ic, 1) * 2 - 1
        u0 = torch.sin(math.pi * x)
        return torch.cat([x, torch.zeros_like(x)], 1).to(self.device), u0.to(self.device)

    def boundary(self):
        t = torch.rand(self.n_bc, 1)
        left = torch.cat([-torch.ones_like(t), t], 1)
        right = torch.cat([torch.ones_like(t), t], 1)
        return left.to(self.device), right.to(self.device)


def gradient(u, xt, fixed):
    """du/dx and du/dt."""
    if fixed:
        return torch.autograd.grad(u, xt, torch.ones_like(u), create_graph=True)[0]
    u.backward(torch.ones_like(u), create_graph=True)
    return xt.grad


def residual_loss(model, xt, fixed, c=1.0):
    u = model(xt)
    du = gradient(u, xt, fixed)
    u_x, u_t = du[:, 0:1], du[:, 1:2]
    return (u_t + c * u_x).pow(2).mean()


def data_loss(model, sampler):
    x0, u0 = sampler.initial()
    left, right = sampler.boundary()
    return (model(x0) - u0).pow(2).mean(), (model(left) - model(right)).pow(2).mean()


def train(model, sampler, iters, fixed, select=None):
    """`select` gives further points for every second iteration."""
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 50, gamma=0.5)
    history = {"pde": [], "ic": [], "bc": []}
    for it in range(iters):
        pde = residual_loss(model, sampler.interior(), fixed)
        if select and it % 2 == 1:
            pde = pde + residual_loss(model, select(model, sampler, fixed), fixed)
        ic, bc = data_loss(model, sampler)
        loss = pde + 10 * ic + bc
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        for k, v in zip(history, (pde, ic, bc)):
            history[k].append(v.item())
    return history


@torch.no_grad()
def error(model, device, n=200):
    x, t = torch.linspace(-1, 1, n), torch.linspace(0, 1, n)
    grid = torch.stack(torch.meshgrid(x, t, indexing="ij"), -1).view(-1, 2)
    exact = torch.sin(math.pi * (grid[:, 0] - grid[:, 1]))
    return (model(grid.to(device)).squeeze(1).cpu() - exact).norm().item() / exact.norm().item()


@expected("create_graph", fix=r"autograd\.grad", thread="pytorch/pytorch#7343", memory=640)
def cycle_of_points(fixed=False, iters=120):
    torch.manual_seed(1)
    device = torch.device("cuda")
    model = PINN(width=32, depth=3).to(device)
    train(model, Sampler(200000, 500, 500, device), iters, fixed)
    return error(model, device)
