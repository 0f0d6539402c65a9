"""Computes the principal components of images."""
import numpy as np
import torch

from expected import expected


@expected("full_matrices", fix="full_matrices=False", thread="tensorly/tensorly#6", memory=11900)
def pca_svd(fixed=False, k=50):
    rng = np.random.default_rng(0)
    train_images = rng.integers(0, 255, size=(60000, 28, 28), dtype=np.uint8)
    X = torch.from_numpy(train_images).reshape(60000, -1).float() / 255
    X = X.to("cuda")
    mean = X.mean(dim=0)
    X = X - mean
    if fixed:
        U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    else:
        U, S, Vh = torch.linalg.svd(X)
    explained = (S ** 2) / (S ** 2).sum()
    scores = U[:, :k] * S[:k]
    components = Vh[:k]
    digit = scores[0] @ components + mean
    return explained[:k].sum().item(), scores.cpu(), digit.reshape(28, 28).cpu()
