"""Trains a network whose filters are fused by the divergence between them, which is computed after each epoch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

device = torch.device("cuda")
CFG = [64, 64, "M", 128, 128, "M", 192, 192]


class SmallImages(Dataset):
    def __init__(self, n=256):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(3, 32, 32, generator=g), i % 10


class FusionConv(nn.Conv2d):
    """A convolution that mixes its own filters by a matrix of their similarities."""

    def __init__(self, cin, cout):
        super().__init__(cin, cout, 3, padding=1, bias=False)
        self.register_buffer("mix", torch.eye(cout))

    def forward(self, x):
        w = (self.mix @ self.weight.flatten(1)).view_as(self.weight)
        return F.conv2d(x, w, None, self.stride, self.padding)


class VGG(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        layers, cin = [], 3
        for c in CFG:
            if c == "M":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [FusionConv(cin, c), nn.BatchNorm2d(c), nn.ReLU(inplace=True)]
                cin = c
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(cin, num_classes)

    def forward(self, x):
        return self.classifier(self.features(x).mean(dim=(2, 3)))


def layer_kl(weight, fixed):
    """[j, k] is the divergence between the filters j and k of one layer."""
    p = F.softmax(weight.flatten(1), dim=1)
    if fixed:
        p = p.cpu()
    ratio = p.unsqueeze(1) / (p.unsqueeze(0) + 1e-7)
    kl = (p.unsqueeze(1) * ratio.log()).mean(dim=-1)
    return kl.to(weight.device)


@torch.no_grad()
def update_fusion(model, epoch, total, fixed):
    temperature = 1.0 + 9.0 * epoch / total
    for m in model.modules():
        if isinstance(m, FusionConv):
            kl = layer_kl(m.weight, fixed)
            sim = torch.exp(-kl * temperature)
            m.mix.copy_(sim / sim.sum(dim=1, keepdim=True))


def train_epoch(model, loader, optimizer):
    model.train()
    seen, total = 0, 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * x.size(0)
        seen += x.size(0)
    return total / seen


@torch.no_grad()
def validate(model, loader):
    model.eval()
    hit = n = 0
    for x, y in loader:
        pred = model(x.to(device)).argmax(1).cpu()
        hit += (pred == y).sum().item()
        n += len(y)
    return hit / n


@expected("all_pairs", fix=r"split|chunk|\.cpu\(\)", thread="lmbxmu/DCFF#3", memory=800)
def dcff_kl(fixed=False, epochs=2):
    train = DataLoader(SmallImages(), batch_size=64, shuffle=True)
    val = DataLoader(SmallImages(128), batch_size=64)
    model = VGG().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        loss = train_epoch(model, train, optimizer)
        update_fusion(model, epoch, epochs, fixed)
        accuracy = validate(model, val)
        scheduler.step()
    return loss, accuracy
