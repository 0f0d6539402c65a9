"""Looks for the largest batch that fits and trains a super-resolution network with it."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


class Div2kPatches(Dataset):
    def __init__(self, n=64, patch=64, scale=4):
        self.n, self.patch, self.scale = n, patch, scale

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        hr = torch.rand(3, self.patch * self.scale, self.patch * self.scale, generator=g)
        return F.avg_pool2d(hr[None], self.scale)[0], hr


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, c, 3, 1, 1)

    def forward(self, x):
        h = F.relu(self.a(x))
        h = self.b(h)
        return x + 0.1 * h


class EDSR(nn.Module):
    def __init__(self, c=128, blocks=16):
        super().__init__()
        self.head = nn.Conv2d(3, c, 3, 1, 1)
        self.body = nn.ModuleList([ResBlock(c) for _ in range(blocks)])
        self.up1 = nn.Conv2d(c, 4 * c, 3, 1, 1)
        self.up2 = nn.Conv2d(c, 4 * c, 3, 1, 1)
        self.tail = nn.Conv2d(c, 3, 3, 1, 1)

    def forward(self, x):
        h = self.head(x)
        res = h
        for b in self.body:
            res = b(res)
        h = h + res
        h = F.pixel_shuffle(self.up1(h), 2)
        h = F.pixel_shuffle(self.up2(h), 2)
        return self.tail(h)


class Trainer:
    def __init__(self, model, device, fixed):
        self.model, self.device, self.fixed = model.to(device), device, fixed
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(self, lr, hr):
        lr, hr = lr.to(self.device), hr.to(self.device)
        self.opt.zero_grad()
        sr = self.model(lr)
        loss = F.l1_loss(sr, hr)
        loss.backward()
        self.opt.step()
        return loss.item()

    def try_half(self, dataset, size):
        self.opt.zero_grad()
        torch.cuda.empty_cache()
        return self.find_batch_size(dataset, size // 2)

    def find_batch_size(self, dataset, size):
        batch = [dataset[i] for i in range(size)]
        lr, hr = torch.stack([b[0] for b in batch]), torch.stack([b[1] for b in batch])
        try:
            self.step(lr, hr)
            return size
        except RuntimeError as err:
            if "out of memory" not in str(err) or size == 1:
                raise
            if not self.fixed:
                return self.try_half(dataset, size)
        return self.try_half(dataset, size)

    def fit(self, dataset, batch_size, epochs=1, steps=6):
        loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
        for _ in range(epochs):
            for _, (lr, hr) in zip(range(steps), loader):
                loss = self.step(lr, hr)
        return loss


@expected("caught_traceback", fix="after the except", thread="pytorch/pytorch#18853", memory=4096)
def largest_batch(fixed=False):
    torch.manual_seed(0)
    data = Div2kPatches()
    trainer = Trainer(EDSR(), torch.device("cuda"), fixed)
    best = trainer.find_batch_size(data, 32)
    return trainer.fit(data, best)
