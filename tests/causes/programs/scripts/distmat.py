"""Finds the centers of clusters of points by k-means."""
import torch

from expected import expected


def pairwise_sq_dist(x, y, fixed=False):
    # dist[i, j] = ||x_i - y_j||^2
    if fixed:
        x2 = (x ** 2).sum(dim=1)[:, None]
        y2 = (y ** 2).sum(dim=1)[None, :]
        return x2 + y2 - 2.0 * torch.mm(x, y.t())
    diff = x[:, None, :] - y[None, :, :]
    return (diff ** 2).sum(dim=-1)


def kmeans(points, k, steps=5, fixed=False):
    start = torch.randperm(points.size(0))[:k]
    centers = points[start].clone()
    for _ in range(steps):
        dist = pairwise_sq_dist(points, centers, fixed)
        label = dist.argmin(dim=1)
        sums = torch.zeros_like(centers).index_add_(0, label, points)
        counts = torch.bincount(label, minlength=k).clamp(min=1)
        centers = sums / counts[:, None]
    return centers, label


@expected("all_pairs", fix=r"cdist|@ \w+\.(T\b|t\(\))|\bmm\b", thread="discuss.pytorch.org/t/9065", memory=11900)
def distmat(fixed=False):
    points = torch.randn(20000, 128).to(torch.device("cuda"))
    centers, label = kmeans(points, k=1000, fixed=fixed)
    return centers.shape, label.shape
