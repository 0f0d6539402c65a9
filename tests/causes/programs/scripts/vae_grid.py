"""Trains a VAE on 3D volumes and shows a grid of its latent space after each epoch."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

DEVICE = "cuda"
SIZE = 64
LATENT = 8


class Volumes(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(1, SIZE, SIZE, SIZE)


class Encoder(nn.Module):
    def __init__(self, cap=16):
        super().__init__()
        layers, c = [], 1
        for k in range(4):
            o = cap * 2 ** k
            layers += [nn.Conv3d(c, o, 3, stride=2, padding=1), nn.BatchNorm3d(o), nn.ReLU(True)]
            c = o
        self.net = nn.Sequential(*layers, nn.Flatten())
        flat = c * (SIZE // 16) ** 3
        self.mu, self.logvar = nn.Linear(flat, LATENT), nn.Linear(flat, LATENT)

    def forward(self, x):
        h = self.net(x)
        return self.mu(h), self.logvar(h)


class Decoder(nn.Module):
    def __init__(self, cap=16):
        super().__init__()
        self.c = cap * 8
        self.fc = nn.Linear(LATENT, self.c * (SIZE // 16) ** 3)
        layers, c = [], self.c
        for k in range(4):
            o = max(c // 2, cap)
            layers += [nn.ConvTranspose3d(c, o, 4, stride=2, padding=1), nn.BatchNorm3d(o), nn.ReLU(True)]
            c = o
        self.net = nn.Sequential(*layers, nn.Conv3d(c, 1, 3, padding=1), nn.Sigmoid())

    def forward(self, z):
        h = self.fc(z).view(len(z), self.c, SIZE // 16, SIZE // 16, SIZE // 16)
        return self.net(h)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, x):
        mu, logvar = self.encoder(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def vae_loss(recon, x, mu, logvar, beta=1.0):
    kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1).mean()
    return F.mse_loss(recon, x) + beta * kl


def latent_grid(zs, vae, path, fixed, n=12):
    """Walks along the two widest latent axes and decodes a grid of n x n points."""
    mean, std = zs.mean(0), zs.std(0)
    a, b = std.topk(2).indices.tolist()
    points = []
    for i in torch.linspace(-2, 2, n):
        for j in torch.linspace(-2, 2, n):
            z = mean.clone()
            z[a], z[b] = mean[a] + i * std[a], mean[b] + j * std[b]
            points.append(z)
    points = torch.stack(points)
    vae.eval()
    with torch.no_grad():
        if fixed:
            dec = torch.cat([vae.decoder(p[None].to(DEVICE)).cpu() for p in points])
        else:
            dec = vae.decoder(points.to(DEVICE)).cpu()
    rows = [torch.cat([v[0, SIZE // 2] for v in dec[r * n:(r + 1) * n]], dim=1) for r in range(n)]
    torch.save(torch.cat(rows), path)


def train(folder, fixed, epochs=2):
    vae = VAE().to(DEVICE)
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)
    loader, valid = DataLoader(Volumes(32), batch_size=8, shuffle=True), DataLoader(Volumes(8), batch_size=8)
    for epoch in range(epochs):
        vae.train()
        total = 0.0
        for x in loader:
            x = x.to(DEVICE)
            recon, mu, logvar = vae(x)
            loss = vae_loss(recon, x, mu, logvar)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        vae.eval()
        with torch.no_grad():
            zs = torch.cat([vae.encoder(x.to(DEVICE))[0].cpu() for x in valid])
        latent_grid(zs, vae, os.path.join(folder, f"grid_{epoch}.pt"), fixed)
    return total / len(loader)


@expected("batch_without_gradients", fix="split", thread="ccpem/affinity-vae#260", memory=4096)
def vae_grid(fixed=False):
    """The figure decodes all 144 points of the grid in one call, while training works on 8 volumes at once. Cured by: Decode the points one
    by one and concatenate the results on the CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        return train(folder, fixed)
