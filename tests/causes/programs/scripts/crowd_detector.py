"""Trains a detector with anchors on photographs of crowds, some of which have very many boxes."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.models import resnet18

from expected import expected


def grid_anchors(size, strides=(8, 16, 32), scales=(2, 2.5, 3.2), ratios=(0.5, 1, 2)):
    out = []
    for s in strides:
        n = size // s
        ys, xs = torch.meshgrid(torch.arange(n) * s, torch.arange(n) * s, indexing="ij")
        for sc in scales:
            for r in ratios:
                w, h = s * sc * r ** 0.5, s * sc / r ** 0.5
                out.append(torch.stack([xs - w / 2, ys - h / 2, xs + w / 2, ys + h / 2], -1).view(-1, 4))
    return torch.cat(out).float()


def bbox_overlaps(a, b):
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    return inter / (area_a[:, None] + area_b[None] - inter).clamp(min=1e-6)


class MaxIoUAssigner:
    def __init__(self, pos=0.5, neg=0.4, fixed=False):
        self.pos, self.neg, self.fixed = pos, neg, fixed

    def best_overlaps(self, anchors, gts, size=64):
        best, which = bbox_overlaps(anchors, gts[:size]).max(dim=1)
        for first in range(size, len(gts), size):
            iou, index = bbox_overlaps(anchors, gts[first:first + size]).max(dim=1)
            which = torch.where(iou > best, index + first, which)
            best = torch.max(iou, best)
        return best, which

    @torch.no_grad()
    def assign(self, anchors, gts):
        if self.fixed:
            best, which = self.best_overlaps(anchors, gts)
        else:
            iou = bbox_overlaps(anchors, gts)
            best, which = iou.max(dim=1)
        target = torch.full_like(best, -1.0)
        target = torch.where(best < self.neg, torch.zeros_like(target), target)
        target = torch.where(best >= self.pos, torch.ones_like(target), target)
        return target, which


class Retina(nn.Module):
    def __init__(self):
        super().__init__()
        r = resnet18(weights=None)
        self.stem = nn.Sequential(r.conv1, r.bn1, r.relu, r.maxpool, r.layer1)
        self.stages = nn.ModuleList([r.layer2, r.layer3, r.layer4])
        self.lat = nn.ModuleList(nn.Conv2d(c, 128, 1) for c in (128, 256, 512))
        self.cls = nn.Conv2d(128, 9, 3, padding=1)
        self.reg = nn.Conv2d(128, 36, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        cls, reg = [], []
        for stage, lat in zip(self.stages, self.lat):
            x = stage(x)
            p = F.relu(lat(x))
            cls.append(self.cls(p).flatten(1))
            reg.append(self.reg(p).flatten(1).view(x.shape[0], -1, 4))
        return torch.cat(cls, 1), torch.cat(reg, 1)


def loss_fn(cls, reg, anchors, gts, assigner):
    total = 0
    for c, r, g in zip(cls, reg, gts):
        target, which = assigner.assign(anchors, g)
        weight = (target >= 0).float()
        total = total + F.binary_cross_entropy_with_logits(c, target.clamp(min=0), weight)
        total = total + (F.smooth_l1_loss(r, g[which] - anchors, reduction="none").sum(1) * (target > 0)).mean()
    return total / len(gts)


def images(size):
    for counts in ((12, 40), (85, 30), (160, 22), (2100, 64), (18, 9)):
        gts = []
        for n in counts:
            xy = torch.rand(n, 2) * (size - 40)
            gts.append(torch.cat([xy, xy + 8 + torch.rand(n, 2) * 30], 1))
        yield torch.randn(len(counts), 3, size, size), gts


@expected("all_pairs", fix=r"split|part|\.cpu\(\)", thread="open-mmlab/mmdetection#1575", memory=11900)
def crowd_detector(fixed=False):
    """One image has 2100 boxes, and `bbox_overlaps` makes several tensors of anchors x boxes. Cured by: Assign on the CPU where an image
    has many boxes, or compute the overlaps of a part of the boxes at a time.
    """
    size = 1024
    model = Retina().cuda()
    anchors = grid_anchors(size).cuda()
    assigner = MaxIoUAssigner(fixed=fixed)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for img, gts in images(size):
        cls, reg = model(img.cuda())
        loss = loss_fn(cls, reg, anchors, [g.cuda() for g in gts], assigner)
        opt.zero_grad()
        loss.backward()
        opt.step()
