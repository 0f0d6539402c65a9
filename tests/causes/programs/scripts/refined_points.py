"""Solves an advection equation with a physics-informed network, whose points are refined where the residual is large."""
import torch

from expected import expected
from programs.scripts.cycle_of_points import PINN, Sampler, error, gradient, train


def hard_points(model, sampler, fixed, keep=500):
    """The candidates with the largest residual."""
    cand = sampler.interior()
    du = gradient(model(cand), cand, fixed)
    res = (du[:, 1] + du[:, 0]).abs()
    return cand.detach()[res.topk(keep).indices.cpu()].requires_grad_(True)


@expected("create_graph", fix=r"autograd\.grad", thread="pytorch/pytorch#7343", memory=2048)
def refined_points(fixed=False):
    torch.manual_seed(1)
    device = torch.device("cuda")
    model = PINN(width=256, depth=6).to(device)
    train(model, Sampler(10000, 500, 500, device), 60, fixed, hard_points)
    return error(model, device)
