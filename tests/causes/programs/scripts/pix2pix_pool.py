"""Trains pix2pix, with a pool of generated images for the discriminator."""
import contextlib
import os
import random
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

from expected import expected

DEVICE = "cuda"
BATCH = 4
POOL_SIZE = 50
LAMBDA1 = 100


class Facades(Dataset):
    def __init__(self, n=240, size=256):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(3, self.size, self.size) * 2 - 1, torch.rand(3, self.size, self.size) * 2 - 1


class Down(nn.Sequential):
    def __init__(self, i, o, norm=True):
        mods = [nn.Conv2d(i, o, 4, 2, 1, bias=not norm)]
        if norm:
            mods.append(nn.BatchNorm2d(o))
        mods.append(nn.LeakyReLU(0.2, True))
        super().__init__(*mods)


class Up(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))


class UnetGenerator(nn.Module):
    def __init__(self, f=64):
        super().__init__()
        self.d1 = Down(3, f, norm=False)
        self.d2 = Down(f, f * 2)
        self.d3 = Down(f * 2, f * 4)
        self.d4 = Down(f * 4, f * 8)
        self.u4 = Up(f * 8, f * 4)
        self.u3 = Up(f * 8, f * 2)
        self.u2 = Up(f * 4, f)
        self.out = nn.Sequential(nn.ConvTranspose2d(f * 2, 3, 4, 2, 1), nn.Tanh())

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(a)
        c = self.d3(b)
        y = self.u4(self.d4(c))
        y = self.u3(torch.cat([y, c], 1))
        y = self.u2(torch.cat([y, b], 1))
        return self.out(torch.cat([y, a], 1))


class PatchDiscriminator(nn.Sequential):
    def __init__(self, f=64):
        super().__init__(Down(6, f, norm=False), Down(f, f * 2), Down(f * 2, f * 4), nn.Conv2d(f * 4, 1, 4, 1, 1))


class ImagePool:
    def __init__(self, size):
        self.size = size
        self.images = []

    def query(self, images):
        out = []
        for image in images:
            image = image.unsqueeze(0)
            if len(self.images) < self.size:
                self.images.append(image)
                out.append(image)
            elif random.random() > 0.5:
                k = random.randrange(self.size)
                out.append(self.images[k].clone())
                self.images[k] = image
            else:
                out.append(image)
        return torch.cat(out, 0)


def gan_loss(pred, real):
    target = torch.ones_like(pred) if real else torch.zeros_like(pred)
    return nn.functional.binary_cross_entropy_with_logits(pred, target)


def train(folder, fixed, epochs=1):
    net_g, net_d = UnetGenerator().to(DEVICE), PatchDiscriminator().to(DEVICE)
    opt_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    loader = DataLoader(Facades(), batch_size=BATCH, shuffle=True)
    pool = ImagePool(POOL_SIZE)
    for _ in range(epochs):
        sum_d, sum_g = 0.0, 0.0
        for real_in, real_out in loader:
            real_in, real_out = real_in.to(DEVICE), real_out.to(DEVICE)

            # discriminator: log(D(x, y)) + log(1 - D(x, G(x)))
            with torch.no_grad() if fixed else contextlib.nullcontext():
                fake_out = net_g(real_in)
                fake_concat = pool.query(torch.cat([real_in, fake_out], 1))
            err_fake = gan_loss(net_d(fake_concat.detach()), False)
            err_real = gan_loss(net_d(torch.cat([real_in, real_out], 1)), True)
            err_d = (err_real + err_fake) * 0.5
            opt_d.zero_grad()
            err_d.backward()
            opt_d.step()

            # generator: log(D(x, G(x))) + L1
            fake_out = net_g(real_in)
            err_g = gan_loss(net_d(torch.cat([real_in, fake_out], 1)), True)
            err_g = err_g + LAMBDA1 * (fake_out - real_out).abs().mean()
            opt_g.zero_grad()
            err_g.backward()
            opt_g.step()
            sum_d, sum_g = sum_d + err_d.item(), sum_g + err_g.item()
        torch.save(net_g.state_dict(), os.path.join(folder, "pix2pix_g.pt"))
    return sum_d / len(loader), sum_g / len(loader)


@expected("graph_of_earlier_steps", fix="each other line|no_grad", thread="zackchase/mxnet-the-straight-dope#293", memory=4096)
def pix2pix_pool(fixed=False):
    """The pool stores generated images with the graphs of the generator that made them, by append and by index. Cured by: Generate
    and query the pool under `torch.no_grad()`.
    """
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        return train(folder, fixed)
