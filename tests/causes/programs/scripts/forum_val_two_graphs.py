"""Trains a U-Net on slices of CT scans and validates it after each epoch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


class Slices(Dataset):
    def __init__(self, n, side=256):
        self.n, self.side = n, side

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.randn(1, self.side, self.side), torch.randint(0, 4, (self.side, self.side))


def double(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
                         nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, classes=4, width=48):
        super().__init__()
        w = [width * 2 ** k for k in range(5)]
        self.down = nn.ModuleList([double(1, w[0])] + [double(w[k], w[k + 1]) for k in range(4)])
        self.up = nn.ModuleList(nn.ConvTranspose2d(w[k + 1], w[k], 2, 2) for k in reversed(range(4)))
        self.merge = nn.ModuleList(double(w[k + 1], w[k]) for k in reversed(range(4)))
        self.head = nn.Conv2d(w[0], classes, 1)

    def forward(self, x):
        skips = []
        for k, level in enumerate(self.down):
            x = level(x if k == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def dice(logits, target):
    probs = logits.softmax(1)
    onehot = F.one_hot(target, probs.size(1)).permute(0, 3, 1, 2).float()
    inter = (probs * onehot).sum((2, 3))
    return 1 - ((2 * inter + 1) / (probs.sum((2, 3)) + onehot.sum((2, 3)) + 1)).mean()


class Runner:
    def __init__(self, batch_size=16, fixed=False):
        self.fixed = fixed
        self.device = torch.device("cuda")
        self.model = UNet().to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=2)
        self.train_loader = DataLoader(Slices(batch_size * 4), batch_size, shuffle=True)
        self.val_loader = DataLoader(Slices(batch_size * 4), batch_size)

    def compute_loss(self, x, y):
        x, y = x.to(self.device), y.to(self.device)
        logits = self.model(x)
        return F.cross_entropy(logits, y) + dice(logits, y)

    def train_epoch(self):
        self.model.train()
        history = []
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.compute_loss(x, y)
            loss.backward()
            self.optimizer.step()
            history.append(loss.item())
        return sum(history) / len(history)

    def validate(self):
        self.model.eval()
        history = []
        for x, y in self.val_loader:
            loss = self.compute_loss(x, y)
            history.append(loss.item())
        return sum(history) / len(history)

    def run(self, epochs):
        validate = torch.no_grad()(self.validate) if self.fixed else self.validate
        history = []
        for _ in range(epochs):
            train, val = self.train_epoch(), validate()
            self.plateau.step(val)
            history.append((train, val))
        return history


@expected("evaluation_keeps_graphs", fix="no_grad", thread="discuss.pytorch.org/t/2735", memory=7168)
def forum_val_two_graphs(fixed=False):
    torch.manual_seed(0)
    return Runner(fixed=fixed).run(2)
