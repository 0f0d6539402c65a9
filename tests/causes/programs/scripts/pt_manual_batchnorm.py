"""Trains a small network with a batch normalization of its own."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


class Noise(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.randn(3, 64, 64), i % 10


class ManualBatchNorm2d(nn.Module):
    def __init__(self, channels, eps=1e-5, momentum=0.1, fixed=False):
        super().__init__()
        self.eps, self.momentum, self.fixed = eps, momentum, fixed
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        if self.training:
            var, mean = torch.var_mean(x, dim=(0, 2, 3), unbiased=False)
            m = self.momentum
            with torch.set_grad_enabled(not self.fixed):
                self.running_mean = (1 - m) * self.running_mean + m * mean
                self.running_var = (1 - m) * self.running_var + m * x.var(dim=(0, 2, 3), unbiased=True)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return x * scale[None, :, None, None] + shift[None, :, None, None]


def block(cin, cout, stride=1, fixed=False):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), ManualBatchNorm2d(cout, fixed=fixed), nn.ReLU())


class Net(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        sizes = ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2))
        self.features = nn.Sequential(*[block(*size, fixed=fixed) for size in sizes])
        self.fc = nn.Linear(256, 10)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def train_epoch(model, loader, optimizer, scheduler, device):
    model.train()
    total, n = 0.0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item() * len(x)
        n += len(x)
    return total / n


@torch.no_grad()
def test(model, loader, device):
    model.eval()
    right = 0
    for x, y in loader:
        right += (model(x.to(device)).argmax(1).cpu() == y).sum().item()
    return right / len(loader.dataset)


@expected("graph_of_earlier_steps", fix="no_grad|detach", thread="pytorch/pytorch#20275", memory=3072)
def pt_manual_batchnorm(fixed=False, epochs=2):
    torch.manual_seed(0)
    device = torch.device("cuda:0")
    train_loader = DataLoader(Noise(64 * 20), batch_size=64, shuffle=True)
    test_loader = DataLoader(Noise(128), batch_size=64)
    model = Net(fixed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * len(train_loader))
    for _ in range(epochs):
        loss = train_epoch(model, train_loader, optimizer, scheduler, device)
        accuracy = test(model, test_loader, device)
    return loss, accuracy
