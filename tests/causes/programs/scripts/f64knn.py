"""Sorts the points of a reference set by their distance to each query."""
import numpy as np
import torch

from expected import expected


def dist_gpu(ref, query):
    d = torch.linalg.norm(ref[:, None, :] - query[None, :, :], dim=2)
    d = d.t()
    sorted_d, sorted_ind = torch.sort(d, dim=1)
    return sorted_d, sorted_ind


@expected("float64", fix=r"float\(\)|float32", thread="cupy/cupy#1912", memory=4096)
def f64knn(fixed=False, r=1400, c=320):
    rf = np.random.rand(r, c)
    qu = np.random.rand(r, c)
    if fixed:
        rf, qu = rf.astype(np.float32), qu.astype(np.float32)
    rf = torch.from_numpy(rf).to("cuda")
    qu = torch.from_numpy(qu).to("cuda")
    d, ix = dist_gpu(rf, qu)
    return d[:5, :5].cpu(), ix[:5, :5].cpu()
