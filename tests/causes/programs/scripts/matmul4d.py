"""Applies a linear map of its own to each group of each sample."""
import torch

from expected import expected


@expected("large_intermediate", fix=r"\bbmm\b|squeeze", thread="pytorch/pytorch#154128", memory=4096)
def matmul4d(fixed=False, batch=4096, groups=256, dim=100):
    A = torch.rand(batch, groups, 1, dim)
    B = torch.rand(groups, dim, dim)
    A = A.cuda()
    B = B.cuda()
    if fixed:
        C = torch.bmm(A.squeeze(2).transpose(0, 1), B).transpose(0, 1).unsqueeze(2)
    else:
        C = A.matmul(B)
    return C.squeeze(2).mean(dim=(0, 1)).cpu()
