"""Trains a segmentation of scans on patches and validates it on whole scans by a sliding window."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

CLASSES = 14
ROI = (96, 96, 96)


class Patches(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.rand(1, *ROI, generator=g), torch.randint(0, CLASSES, ROI, generator=g)


class Scans(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(100 + i)
        size = (288, 304, 288) if i else (240, 240, 240)
        return torch.rand(1, *size, generator=g), f"case_{i:03d}"


def block(i, o):
    return nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o), nn.LeakyReLU(inplace=True))


class UNet3D(nn.Module):
    def __init__(self, ch=(12, 24, 48, 96)):
        super().__init__()
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        prev = 1
        for c in ch:
            self.downs.append(block(prev, c))
            prev = c
        for c in reversed(ch[:-1]):
            self.ups.append(block(prev + c, c))
            prev = c
        self.head = nn.Conv3d(prev, CLASSES, 1)

    def forward(self, x):
        skips = []
        for i, d in enumerate(self.downs):
            x = d(x)
            if i < len(self.downs) - 1:
                skips.append(x)
                x = F.max_pool3d(x, 2)
        for u in self.ups:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = u(torch.cat([x, skips.pop()], 1))
        return self.head(x)


def starts(size, roi, overlap):
    step = int(roi * (1 - overlap))
    pts = list(range(0, max(size - roi, 0) + 1, step))
    if pts[-1] != size - roi:
        pts.append(size - roi)
    return pts


def sliding_window(volume, net, overlap=0.25, device=None):
    device = device or volume.device
    size = volume.shape[2:]
    output = torch.zeros(1, CLASSES, *size, device=device)
    count = torch.zeros(1, 1, *size, device=device)
    for z in starts(size[0], ROI[0], overlap):
        for y in starts(size[1], ROI[1], overlap):
            for x in starts(size[2], ROI[2], overlap):
                sl = (slice(None), slice(None), slice(z, z + ROI[0]), slice(y, y + ROI[1]), slice(x, x + ROI[2]))
                pred = net(volume[sl])
                output[sl] += pred.to(device)
                count[sl] += 1
    return output / count


def train_epoch(net, loader, opt, device):
    net.train()
    for img, lab in loader:
        img, lab = img.to(device), lab.to(device)
        opt.zero_grad()
        loss = F.cross_entropy(net(img), lab)
        loss.backward()
        opt.step()


@torch.no_grad()
def validate(net, loader, device, fixed):
    net.eval()
    volumes = {}
    for img, name in loader:
        img = img.to(device)
        logits = sliding_window(img, net, device=torch.device("cpu")) if fixed else sliding_window(img, net)
        seg = logits.argmax(1).to(torch.uint8).cpu()
        volumes[name[0]] = (seg > 0).sum().item()
    return volumes


@expected("elementwise_copies", fix="on the host|div_", thread="DCBIA-OrthoLab/SlicerAutomatedDentalTools#66", memory=3072)
def stitch_scores_on_gpu(fixed=False):
    device = torch.device("cuda")
    net = UNet3D().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    train_epoch(net, DataLoader(Patches(), batch_size=1), opt, device)
    sched.step()
    return validate(net, DataLoader(Scans(), batch_size=1), device, fixed)
