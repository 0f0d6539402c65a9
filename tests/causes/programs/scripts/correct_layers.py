"""Corrects a flow surrogate layer by layer with L-BFGS and evaluates it on the full mesh."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class Surrogate(nn.Module):
    """A residual MLP on the latent state of each mesh patch."""

    def __init__(self, width=4096, depth=24):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        return self.out(h)


class Calibration:
    """Inputs and wanted outputs of each layer."""

    def __init__(self, n=256, width=4096, seed=0):
        self.n, self.width, self.gen = n, width, torch.Generator().manual_seed(seed)

    def pair(self):
        x = torch.randn(self.n, self.width, generator=self.gen)
        return x, x * 0.9


def correct_layer(layer, x, target, iters=2):
    opt = torch.optim.LBFGS([layer.weight], lr=0.5, max_iter=4, history_size=3, line_search_fn=None)
    first = last = None
    for _ in range(iters):
        def closure():
            opt.zero_grad()
            loss = F.mse_loss(layer(x), target) + 1e-6 * layer.weight.pow(2).sum()
            loss.backward()
            return loss
        last = opt.step(closure).item()
        first = last if first is None else first
    return first, last


def correct(model, calib, device, fixed):
    for p in model.parameters():
        p.requires_grad_(False)
    gains = []
    for layer in model.layers:
        layer.weight.requires_grad_(True)
        x, target = calib.pair()
        before, after = correct_layer(layer, x.to(device), target.to(device))
        layer.weight.requires_grad_(False)
        if fixed:
            layer.weight.grad = None
        gains.append(before - after)
    return gains


@torch.no_grad()
def evaluate(model, device, patches=36000):
    model.eval()
    mesh = torch.randn(patches, 64)
    field = model(mesh.to(device))
    drag = field[:, 0].mean().item()
    lift = field[:, 1].mean().item()
    return drag, lift


@expected("gradients_kept", fix=r"\.grad = None", thread="p-e-w/heretic#426", memory=4608)
def correct_layers(fixed=False):
    torch.manual_seed(0)
    device = torch.device("cuda")
    with torch.device(device):
        model = Surrogate()
    before = evaluate(model, device)
    gains = correct(model, Calibration(), device, fixed)
    return before, gains, evaluate(model, device)
