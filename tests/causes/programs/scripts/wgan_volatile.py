"""Trains a Wasserstein GAN on images, with five updates of the critic for each of the generator."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

from expected import expected


class Images(Dataset):
    def __init__(self, n=1280, size=128):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.rand(3, self.size, self.size, generator=g) * 2 - 1


class Generator(nn.Module):
    def __init__(self, nz=128, ngf=48):
        super().__init__()
        chs = [ngf * 16, ngf * 8, ngf * 4, ngf * 2, ngf]
        layers = [nn.ConvTranspose2d(nz, chs[0], 4, 1, 0, bias=False), nn.BatchNorm2d(chs[0]), nn.ReLU()]
        for a, b in zip(chs, chs[1:]):
            layers += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
                       nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        layers += [nn.ConvTranspose2d(chs[-1], 3, 4, 2, 1), nn.Tanh()]
        self.main = nn.Sequential(*layers)

    def forward(self, z):
        return self.main(z)


class Critic(nn.Module):
    def __init__(self, ndf=32):
        super().__init__()
        chs = [3, ndf, ndf * 2, ndf * 4, ndf * 8, ndf * 8]
        layers = []
        for i, (a, b) in enumerate(zip(chs, chs[1:])):
            layers.append(nn.Conv2d(a, b, 4, 2, 1, bias=False))
            if i:
                layers.append(nn.BatchNorm2d(b))
            layers.append(nn.LeakyReLU(0.2))
        self.main = nn.Sequential(*layers, nn.Conv2d(chs[-1], 1, 4, 1, 0))

    def forward(self, x):
        return self.main(x).mean()


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, std=0.02)


def train_critic(netD, netG, real, optD, nz, fixed, clamp=0.01):
    with torch.no_grad():
        for w in netD.parameters():
            w.clamp_(min=-clamp, max=clamp)
    optD.zero_grad()
    noise = torch.randn(real.size(0), nz, 1, 1, device=real.device)
    if fixed:
        with torch.no_grad():
            fake = netG(noise)
    else:
        fake = netG(noise)
    score_real = netD(real)
    score_fake = netD(fake.detach())
    errD = score_fake - score_real
    errD.backward()
    optD.step()
    return errD.item()


def train_generator(netD, netG, batch, optG, nz, device):
    for p in netD.parameters():
        p.requires_grad_(False)
    optG.zero_grad()
    errG = -netD(netG(torch.randn(batch, nz, 1, 1, device=device)))
    errG.backward()
    optG.step()
    for p in netD.parameters():
        p.requires_grad_(True)
    return errG.item()


@expected("graph_without_use", fix="no_grad", thread="martinarjovsky/WassersteinGAN#25", memory=3072)
def wgan_volatile(fixed=False, batch=256, nz=128, n_critic=5):
    device = torch.device("cuda")
    netG, netD = Generator(nz).to(device), Critic().to(device)
    netG.apply(weights_init)
    netD.apply(weights_init)
    optG = torch.optim.RMSprop(netG.parameters(), lr=5e-5)
    optD = torch.optim.RMSprop(netD.parameters(), lr=5e-5)
    sheet = torch.randn(16, nz, 1, 1, device=device)
    losses = []
    for i, real in enumerate(DataLoader(Images(), batch_size=batch, shuffle=True, drop_last=True)):
        losses.append(train_critic(netD, netG, real.to(device), optD, nz, fixed))
        if (i + 1) % n_critic == 0:
            losses.append(train_generator(netD, netG, batch, optG, nz, device))
    with torch.no_grad():
        return losses, netG(sheet).cpu()
