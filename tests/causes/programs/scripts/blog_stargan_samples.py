"""Translates faces between several domains, and draws a sheet of them in all domains now and then."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

DOMAINS, SIZE = 8, 128


class Faces(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(3, SIZE, SIZE) * 2 - 1, torch.tensor(i % DOMAINS)


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(c, c, 3, 1, 1, bias=False), nn.InstanceNorm2d(c, affine=True), nn.ReLU(),
                                  nn.Conv2d(c, c, 3, 1, 1, bias=False), nn.InstanceNorm2d(c, affine=True))

    def forward(self, x):
        return x + self.body(x)


class Generator(nn.Module):
    def __init__(self, width=64, blocks=6):
        super().__init__()
        layers = [nn.Conv2d(3 + DOMAINS, width, 7, 1, 3, bias=False), nn.InstanceNorm2d(width, affine=True), nn.ReLU()]
        c = width
        for _ in range(2):
            layers += [nn.Conv2d(c, c * 2, 4, 2, 1, bias=False), nn.InstanceNorm2d(c * 2, affine=True), nn.ReLU()]
            c *= 2
        layers += [Res(c) for _ in range(blocks)]
        for _ in range(2):
            layers += [nn.ConvTranspose2d(c, c // 2, 4, 2, 1, bias=False), nn.InstanceNorm2d(c // 2, affine=True), nn.ReLU()]
            c //= 2
        self.trunk = nn.Sequential(*layers)
        self.to_rgb = nn.Conv2d(c, 3, 7, 1, 3)
        self.to_mask = nn.Conv2d(c, 1, 7, 1, 3)

    def forward(self, x, onehot):
        plane = onehot[:, :, None, None].expand(-1, -1, x.size(2), x.size(3))
        h = self.trunk(torch.cat([x, plane], 1))
        mask = torch.sigmoid(self.to_mask(h))
        return mask * torch.tanh(self.to_rgb(h)) + (1 - mask) * x, mask


class Critic(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        layers, c = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.01)], width
        for _ in range(4):
            layers += [nn.Conv2d(c, c * 2, 4, 2, 1), nn.LeakyReLU(0.01)]
            c *= 2
        self.main = nn.Sequential(*layers)
        self.src = nn.Conv2d(c, 1, 3, 1, 1)
        self.cls = nn.Conv2d(c, DOMAINS, SIZE // 32)

    def forward(self, x):
        h = self.main(x)
        return self.src(h), self.cls(h).flatten(1)


class Solver:
    def __init__(self, steps=6, batch=16, sample_every=3, fixed=False):
        self.sample_every, self.fixed = sample_every, fixed
        self.device = torch.device("cuda")
        self.loader = DataLoader(Faces(steps * batch), batch, drop_last=True)
        self.G, self.D = Generator().to(self.device), Critic().to(self.device)
        self.g_opt = torch.optim.Adam(self.G.parameters(), 1e-4, (0.5, 0.999))
        self.d_opt = torch.optim.Adam(self.D.parameters(), 1e-4, (0.5, 0.999))

    def onehot(self, labels):
        return F.one_hot(labels, DOMAINS).float().to(self.device)

    def train_d(self, real, label, target):
        fake = self.G(real, self.onehot(target))[0].detach()
        out_real, cls = self.D(real)
        out_fake, _ = self.D(fake)
        loss = F.relu(1 - out_real).mean() + F.relu(1 + out_fake).mean() + F.cross_entropy(cls, label.to(self.device))
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def train_g(self, real, label, target):
        fake, _ = self.G(real, self.onehot(target))
        out, cls = self.D(fake)
        back, _ = self.G(fake, self.onehot(label))
        loss = -out.mean() + F.cross_entropy(cls, target.to(self.device)) + 10 * (real - back).abs().mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        return loss.item()

    def sample(self, real):
        sheet = [real]
        for d in range(DOMAINS):
            fake = self.G(real, self.onehot(torch.full((real.size(0),), d)))[0]
            sheet.append(fake.detach() if self.fixed else fake)
        sheet = torch.cat(sheet, dim=3)
        return ((sheet.detach().cpu() + 1) * 127.5).byte()

    def train(self):
        losses, sheets = [], []
        for step, (real, label) in enumerate(self.loader):
            real, target = real.to(self.device), label[torch.randperm(label.size(0))]
            losses.append((self.train_d(real, label, target), self.train_g(real, label, target)))
            if (step + 1) % self.sample_every == 0:
                sheets.append(self.sample(real))
        return losses, sheets


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="e-com-net.com/article/1717487773138628608", memory=4096)
def blog_stargan_samples(fixed=False):
    return Solver(fixed=fixed).train()
