"""Trains a RetinaNet on aerial tiles, one of which shows a parking lot with very many objects."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, Dataset

from expected import expected

STRIDES = (8, 16, 32, 64, 128)
IMG = 640
NUM_CLASSES = 15


class AerialBoxes(Dataset):
    def __init__(self, n=14, seed=0):
        rng = random.Random(seed)
        self.counts = [rng.randint(20, 80) for _ in range(n)]
        self.counts[9] = 1700

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        k = self.counts[i]
        xy = torch.rand(k, 2, generator=g) * (IMG - 40)
        wh = torch.rand(k, 2, generator=g) * 30 + 6
        labels = torch.randint(0, NUM_CLASSES, (k,), generator=g)
        return torch.rand(3, IMG, IMG, generator=g), torch.cat([xy, xy + wh], dim=1), labels


def make_anchors(device):
    all_levels = []
    for s in STRIDES:
        n = IMG // s
        c = (torch.arange(n, device=device) + 0.5) * s
        cy, cx = torch.meshgrid(c, c, indexing="ij")
        for scale in (1.0, 1.26, 1.59):
            for ratio in (0.5, 1.0, 2.0):
                w, h = 4 * s * scale * ratio ** 0.5, 4 * s * scale / ratio ** 0.5
                all_levels.append(torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1).view(-1, 4))
    return torch.cat(all_levels)


def box_iou(a, b):
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    return inter / (area_a[:, None] + area_b[None] - inter)


class MaxIoUAssigner:
    def __init__(self, pos_thr=0.5, neg_thr=0.4, fixed=False):
        self.pos_thr, self.neg_thr, self.fixed = pos_thr, neg_thr, fixed

    def assign(self, anchors, gt_boxes):
        device = anchors.device
        if self.fixed and gt_boxes.shape[0] > 300:
            anchors, gt_boxes = anchors.cpu(), gt_boxes.cpu()
        overlaps = box_iou(gt_boxes, anchors)
        best, idx = overlaps.max(dim=0)
        return best.to(device), idx.to(device)


class Retina(nn.Module):
    def __init__(self, ch=128):
        super().__init__()
        r = torchvision.models.resnet18(weights=None)
        self.stem = nn.Sequential(r.conv1, r.bn1, r.relu, r.maxpool, r.layer1)
        self.c3, self.c4, self.c5 = r.layer2, r.layer3, r.layer4
        self.lat = nn.ModuleList([nn.Conv2d(c, ch, 1) for c in (128, 256, 512)])
        self.p6, self.p7 = nn.Conv2d(512, ch, 3, 2, 1), nn.Conv2d(ch, ch, 3, 2, 1)
        self.cls = nn.Sequential(nn.Conv2d(ch, ch, 3, 1, 1), nn.ReLU(), nn.Conv2d(ch, 9 * NUM_CLASSES, 3, 1, 1))
        self.reg = nn.Sequential(nn.Conv2d(ch, ch, 3, 1, 1), nn.ReLU(), nn.Conv2d(ch, 9 * 4, 3, 1, 1))

    def forward(self, x):
        c3 = self.c3(self.stem(x))
        c4 = self.c4(c3)
        c5 = self.c5(c4)
        feats = [lat(c) for lat, c in zip(self.lat, (c3, c4, c5))]
        p6 = self.p6(c5)
        feats += [p6, self.p7(F.relu(p6))]
        cls = torch.cat([self.cls(f).view(x.size(0), NUM_CLASSES, -1) for f in feats], -1)
        reg = torch.cat([self.reg(f).view(x.size(0), 4, -1) for f in feats], -1)
        return cls.transpose(1, 2), reg.transpose(1, 2)


def compute_loss(cls, reg, anchors, gts, labels, assigner):
    total = 0
    for b in range(len(gts)):
        best, idx = assigner.assign(anchors, gts[b])
        pos = (best >= assigner.pos_thr).float()
        target = F.one_hot(labels[b][idx], NUM_CLASSES).float() * pos[:, None]
        total = total + torchvision.ops.sigmoid_focal_loss(cls[b], target, reduction="sum") / len(anchors)
        delta = (gts[b][idx] - anchors) / IMG
        total = total + (F.smooth_l1_loss(reg[b], delta, reduction="none").sum(1) * pos).mean()
    return total / len(gts)


@expected("all_pairs", fix=r"split|part|\.cpu\(\)", thread="open-mmlab/mmdetection#1581", memory=4096)
def iou_of_crowds(fixed=False):
    device = torch.device("cuda")
    model = Retina().to(device)
    anchors = make_anchors(device)
    assigner = MaxIoUAssigner(fixed=fixed)
    opt = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    for imgs, boxes, labels in DataLoader(AerialBoxes(), batch_size=2, collate_fn=lambda batch: zip(*batch)):
        boxes, labels = [x.to(device) for x in boxes], [x.to(device) for x in labels]
        cls, reg = model(torch.stack(imgs).to(device))
        loss = compute_loss(cls, reg, anchors, boxes, labels, assigner)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 35)
        opt.step()
    return loss.item()
