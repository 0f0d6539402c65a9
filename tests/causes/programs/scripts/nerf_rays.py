"""Trains a NeRF from posed photographs with the rays of all images in one tensor."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

device = torch.device("cuda")
N_RAND, N_SAMPLES, N_ITERS = 1024, 64, 40
H, W, N_IMAGES, FOCAL = 756, 1008, 60, 815.0


def positional(x, freqs):
    out = [x]
    for i in range(freqs):
        out += [torch.sin(x * 2 ** i), torch.cos(x * 2 ** i)]
    return torch.cat(out, -1)


class NeRF(nn.Module):
    def __init__(self, width=256, depth=8):
        super().__init__()
        sizes = [63] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.sigma = nn.Linear(width, 1)
        self.rgb = nn.Sequential(nn.Linear(width + 27, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, pts, dirs):
        h = positional(pts, 10)
        for layer in self.layers:
            h = F.relu(layer(h))
        return torch.sigmoid(self.rgb(torch.cat([h, positional(dirs, 4)], -1))), F.relu(self.sigma(h))


def get_rays(h, w, focal):
    j, i = torch.meshgrid(torch.arange(h, dtype=torch.float32), torch.arange(w, dtype=torch.float32), indexing="ij")
    d = torch.stack([(i - w / 2) / focal, -(j - h / 2) / focal, -torch.ones_like(i)], -1)
    return torch.zeros_like(d), d


def load_scene():
    rays_o, rays_d = get_rays(H, W, FOCAL)
    rays = torch.empty(N_IMAGES, H, W, 3, 3)
    for k in range(N_IMAGES):
        rays[k, :, :, 0] = rays_o
        rays[k, :, :, 1] = rays_d
        rays[k, :, :, 2] = torch.rand(H, W, 3)
    return rays.view(-1, 3, 3)


def render(model, rays_o, rays_d):
    z = torch.linspace(2.0, 6.0, N_SAMPLES, device=device)
    pts = rays_o[:, None] + rays_d[:, None] * z[None, :, None]
    dirs = F.normalize(rays_d, dim=-1)[:, None].expand(pts.shape)
    rgb, sigma = model(pts, dirs)
    alpha = 1 - torch.exp(-sigma[..., 0] * 0.06)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    return ((alpha * trans)[..., None] * rgb).sum(1)


@expected("data_on_gpu", fix=r"on the host|DataLoader|\.cpu\(\)", thread="yenchenlin/nerf-pytorch#23", memory=2250)
def nerf_rays(fixed=False):
    """All rays of all images are copied to the GPU before training. Cured by: Keep the rays on the host, and move the batch only."""
    model = NeRF().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    rays_rgb = load_scene()
    if not fixed:
        rays_rgb = rays_rgb.to(device)
    i_batch = 0
    for _ in range(N_ITERS):
        batch = rays_rgb[i_batch:i_batch + N_RAND].to(device)
        i_batch += N_RAND
        rgb = render(model, batch[:, 0], batch[:, 1])
        loss = F.mse_loss(rgb, batch[:, 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
