"""Searches for the best point of a Gaussian process with the mean of a process that each candidate extends."""
import functools
import weakref

import torch
import torch.nn as nn

from expected import expected


class RBFKernel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.raw_length = nn.Parameter(torch.zeros(dim))
        self.raw_scale = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        ls = nn.functional.softplus(self.raw_length)
        d = torch.cdist(a / ls, b / ls)
        return nn.functional.softplus(self.raw_scale) * torch.exp(-0.5 * d ** 2)


def clear_cache_hook(strategy, *args):
    strategy.cache = {}


class PredictionStrategy:
    def __init__(self, kernel, train_x, train_y, noise, fixed=False):
        self.kernel = kernel
        self.train_x, self.train_y = train_x, train_y
        self.noise, self.fixed = noise, fixed
        self.cache = {}

    @property
    def mean_cache(self):
        if "mean" not in self.cache:
            n = self.train_x.shape[0]
            K = self.kernel(self.train_x, self.train_x) + self.noise * torch.eye(n, device=self.train_x.device)
            L = torch.linalg.cholesky(K)
            alpha = torch.cholesky_solve(self.train_y.unsqueeze(-1), L)
            owner = weakref.proxy(self) if self.fixed else self
            alpha.grad_fn.register_hook(functools.partial(clear_cache_hook, owner))
            self.cache["mean"] = alpha
        return self.cache["mean"]

    def predict(self, x):
        return (self.kernel(x, self.train_x) @ self.mean_cache).squeeze(-1)


class GP(nn.Module):
    def __init__(self, x, y):
        super().__init__()
        self.kernel = RBFKernel(x.shape[1])
        self.register_buffer("x", x)
        self.register_buffer("y", y)
        self.noise = 1e-2

    def fantasize(self, new_x, new_y, fixed=False):
        x = torch.cat([self.x, new_x])
        y = torch.cat([self.y, new_y])
        return PredictionStrategy(self.kernel, x, y, self.noise, fixed)


def acquisition(strategy, grid):
    mean = strategy.predict(grid)
    return mean.max()


def candidates(n, q, dim):
    for _ in range(n):
        yield torch.rand(q, dim, device="cuda")


@expected("reference_cycle", fix="weakref|detach|no_grad", thread="cornellius-gp/gpytorch#2734", memory=11900)
def fantasy_gp(fixed=False):
    """A hook on the node of the cached `alpha` has the strategy (`functools.partial(clear_cache_hook, self)`), whose cache has `alpha`: a
    cycle through the graph, which the garbage collector cannot see, keeps each strategy and its graph. Cured by: A hook that refers to the
    strategy weakly (`weakref`), or a cache that is detached.
    """
    torch.manual_seed(0)
    dim, n = 10, 3000
    x = torch.rand(n, dim, device="cuda")
    y = torch.sin(x).sum(1)
    model = GP(x, y).cuda()
    grid = torch.rand(500, dim, device="cuda")
    values = []
    for cand in candidates(200, 5, dim):
        strategy = model.fantasize(cand, torch.sin(cand).sum(1), fixed)
        values.append(acquisition(strategy, grid).item())
    return max(values)
