"""Measures how well a network enlarges test images, by PSNR and by a perceptual metric."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.models import vgg16

from expected import expected


class SRNet(nn.Module):
    def __init__(self, ch=64, blocks=8, scale=2):
        super().__init__()
        self.head = nn.Conv2d(3, ch, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(blocks))
        self.up = nn.Sequential(nn.Conv2d(ch, 3 * scale ** 2, 3, padding=1), nn.PixelShuffle(scale))

    def forward(self, x):
        x = self.head(x)
        for conv in self.body:
            x = x + F.relu(conv(x))
        return torch.sigmoid(self.up(x))


class PerceptualSimilarity(nn.Module):
    TAPS = (3, 8, 15, 22, 29)

    def __init__(self):
        super().__init__()
        self.features = vgg16(weights=None).features.eval()
        self.lins = nn.ModuleList(nn.Conv2d(c, 1, 1, bias=False) for c in (64, 128, 256, 512, 512))
        self.register_buffer("sum_scores", torch.zeros(()))
        self.total = 0

    def taps(self, x):
        out = []
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i in self.TAPS:
                out.append(F.normalize(x, dim=1))
        return out

    def update(self, a, b):
        loss = 0
        for lin, fa, fb in zip(self.lins, self.taps(a), self.taps(b)):
            loss = loss + lin((fa - fb) ** 2).mean(dim=(1, 2, 3))
        self.sum_scores = self.sum_scores + loss.sum()
        self.total += a.shape[0]

    def compute(self):
        return self.sum_scores / self.total

    def reset(self):
        self.sum_scores = torch.zeros_like(self.sum_scores)
        self.total = 0


class PSNR:
    def __init__(self):
        self.values = []

    def update(self, a, b):
        mse = F.mse_loss(a, b)
        self.values.append((-10 * torch.log10(mse + 1e-9)).item())

    def compute(self):
        return sum(self.values) / len(self.values)


def test_images(n, size):
    for _ in range(n):
        hr = torch.rand(1, 3, size, size)
        yield F.avg_pool2d(hr, 2), hr


def evaluate(net, loader, lpips):
    psnr = PSNR()
    lpips.reset()
    for lr, hr in loader:
        sr = net(lr.cuda())
        hr = hr.cuda()
        psnr.update(sr, hr)
        lpips.update(sr, hr)
    return psnr.compute(), lpips.compute().item()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="Lightning-AI/torchmetrics#2093", memory=11900)
def sr_lpips(fixed=False):
    """The evaluation runs with gradients, and the running sum `sum_scores` of the perceptual metric keeps the graph of both networks of
    every image. Cured by: `torch.no_grad()` around the evaluation.
    """
    net = SRNet().cuda().eval()
    lpips = PerceptualSimilarity().cuda()
    if fixed:
        with torch.no_grad():
            return evaluate(net, test_images(16, 512), lpips)
    return evaluate(net, test_images(16, 512), lpips)
