"""Trains an image translation GAN with conditional normalization and draws a sheet of samples now and then."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from expected import expected

STYLES = 12


def faces(n=48, size=128):
    return TensorDataset(torch.rand(n, 3, size, size) * 2 - 1, torch.arange(n) % STYLES)


class CIN(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.InstanceNorm2d(c)
        self.gamma, self.beta = nn.Embedding(STYLES, c), nn.Embedding(STYLES, c)
        nn.init.ones_(self.gamma.weight)
        nn.init.zeros_(self.beta.weight)

    def forward(self, x, s):
        return self.norm(x) * self.gamma(s)[:, :, None, None] + self.beta(s)[:, :, None, None]


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, c, 3, 1, 1)
        self.n1, self.n2 = CIN(c), CIN(c)

    def forward(self, x, s):
        h = F.relu(self.n1(self.c1(x), s))
        return x + self.n2(self.c2(h), s)


class Generator(nn.Module):
    def __init__(self, c=64, blocks=6):
        super().__init__()
        self.inp = nn.Conv2d(3, c, 7, 1, 3)
        self.d1, self.d2 = nn.Conv2d(c, 2 * c, 4, 2, 1), nn.Conv2d(2 * c, 4 * c, 4, 2, 1)
        self.body = nn.ModuleList([Res(4 * c) for _ in range(blocks)])
        self.u1, self.u2 = nn.ConvTranspose2d(4 * c, 2 * c, 4, 2, 1), nn.ConvTranspose2d(2 * c, c, 4, 2, 1)
        self.n1, self.n2 = CIN(2 * c), CIN(c)
        self.out = nn.Conv2d(c, 3, 7, 1, 3)

    def forward(self, x, s):
        h = F.relu(self.inp(x))
        h = F.relu(self.d2(F.relu(self.d1(h))))
        for b in self.body:
            h = b(h, s)
        h = F.relu(self.n1(self.u1(h), s))
        h = F.relu(self.n2(self.u2(h), s))
        return torch.tanh(self.out(h)), h


class Critic(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        sizes = [(3, c), (c, 2 * c), (2 * c, 4 * c), (4 * c, 8 * c), (8 * c, 8 * c)]
        self.main = nn.Sequential(*[nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.LeakyReLU(0.01)) for i, o in sizes])
        self.src, self.cls = nn.Conv2d(8 * c, 1, 3, 1, 1), nn.Conv2d(8 * c, STYLES, 4)

    def forward(self, x):
        h = self.main(x)
        return self.src(h), self.cls(h).flatten(1)


class Solver:
    def __init__(self, loader, fixed):
        self.loader, self.fixed = loader, fixed
        self.G, self.D = Generator().cuda(), Critic().cuda()
        self.g_opt = torch.optim.Adam(self.G.parameters(), 1e-4, (0.5, 0.999))
        self.d_opt = torch.optim.Adam(self.D.parameters(), 1e-4, (0.5, 0.999))
        self.sample_every = 4

    def gradient_penalty(self, real, fake):
        a = torch.rand(real.size(0), 1, 1, 1, device=real.device)
        mix = (a * real + (1 - a) * fake).requires_grad_(True)
        out, _ = self.D(mix)
        g = torch.autograd.grad(out.sum(), mix, create_graph=True)[0]
        return ((g.flatten(1).norm(2, 1) - 1) ** 2).mean()

    def sample(self, real_x):
        fake_list = [real_x]
        for style in range(STYLES):
            target_c = torch.full((real_x.size(0),), style, dtype=torch.long, device=real_x.device)
            fake_x = self.G(real_x, target_c)[0]
            fake_list.append(fake_x.detach() if self.fixed else fake_x)
        sheet = torch.cat(fake_list, dim=3)
        return ((sheet.data.cpu() + 1) / 2).half()

    def train(self):
        fixed_x = next(iter(self.loader))[0].cuda()
        for step, (x, c) in enumerate(self.loader):
            x, c = x.cuda(), c.cuda()
            trg = c[torch.randperm(c.size(0))]
            src, cls = self.D(x)
            with torch.no_grad():
                fake, _ = self.G(x, trg)
            d_loss = -src.mean() + F.cross_entropy(cls, c) + self.D(fake)[0].mean() + 10 * self.gradient_penalty(x, fake)
            self.d_opt.zero_grad()
            d_loss.backward()
            self.d_opt.step()
            fake, _ = self.G(x, trg)
            src, cls = self.D(fake)
            rec, _ = self.G(fake, c)
            g_loss = -src.mean() + F.cross_entropy(cls, trg) + 10 * (x - rec).abs().mean()
            self.g_opt.zero_grad()
            g_loss.backward()
            self.g_opt.step()
            if (step + 1) % self.sample_every == 0:
                sheet = self.sample(fixed_x)
        return sheet


@expected("evaluation_keeps_graphs", fix="no_grad|detach", memory=4096)
def sample_sheet(fixed=False):
    torch.manual_seed(0)
    return Solver(DataLoader(faces(), batch_size=8, shuffle=True, drop_last=True), fixed).train()
