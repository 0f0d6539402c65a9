"""Writes masks of salient objects of large images."""
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


def cbr(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class SalNet(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.e1, self.e2, self.e3 = cbr(3, c), cbr(c, c * 2), cbr(c * 2, c * 4)
        self.u2, self.u1 = cbr(c * 6, c * 2), cbr(c * 3, c)
        self.s1, self.s2, self.s3 = nn.Conv2d(c, 1, 1), nn.Conv2d(c * 2, 1, 1), nn.Conv2d(c * 4, 1, 1)

    def forward(self, x):
        a = self.e1(x)
        b = self.e2(F.max_pool2d(a, 2))
        m = self.e3(F.max_pool2d(b, 2))
        b = self.u2(torch.cat([b, F.interpolate(m, scale_factor=2)], 1))
        a = self.u1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))
        return torch.sigmoid(self.s1(a)), torch.sigmoid(self.s2(b)), torch.sigmoid(self.s3(m))


def norm_pred(d):
    lo, hi = torch.min(d), torch.max(d)
    return (d - lo) / (hi - lo)


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="xuebinqin/U-2-Net#243", memory=6144)
def u2_infer(fixed=False):
    """The images run through the network without `torch.no_grad()`, and `pred` keeps the graph of one while the next one runs. Cured by:
    `d1.detach()` before `pred` is made of it (`torch.no_grad()` is as good).
    """
    net = SalNet().cuda().eval()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(6):
            image = torch.rand(1, 3, 1536, 1536).cuda()
            d1, d2, d3 = net(image)
            if fixed:
                d1 = d1.detach()
            pred = d1[:, 0, :, :]
            pred = norm_pred(pred)
            np.save(Path(folder, f"{i}.npy"), pred.squeeze().cpu().data.numpy())
            del d1, d2, d3
