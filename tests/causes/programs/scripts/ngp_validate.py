"""Trains a radiance field with a hash table on random rays and renders whole views for validation."""
import torch
import torch.nn as nn

from expected import expected


class HashField(nn.Module):
    def __init__(self, levels=8, table=2 ** 17, feat=2, hidden=64):
        super().__init__()
        self.levels, self.table = levels, table
        self.embeds = nn.Parameter(torch.randn(levels, table, feat) * 1e-4)
        self.sigma = nn.Sequential(nn.Linear(levels * feat, hidden), nn.ReLU(), nn.Linear(hidden, 16))
        self.rgb = nn.Sequential(nn.Linear(15 + 3, hidden), nn.ReLU(), nn.Linear(hidden, 3), nn.Sigmoid())

    def encode(self, xyz):
        out = []
        for lvl in range(self.levels):
            g = (xyz * (16 * 1.6 ** lvl)).long()
            idx = (g[..., 0] ^ (g[..., 1] * 2654435761) ^ (g[..., 2] * 805459861)) % self.table
            out.append(self.embeds[lvl][idx])
        return torch.cat(out, -1)

    def forward(self, xyz, dirs):
        h = self.sigma(self.encode(xyz))
        return torch.relu(h[..., 0]), self.rgb(torch.cat([h[..., 1:], dirs], -1))


def sample_points(rays_o, rays_d, n, near=0.1, far=4.0):
    t = torch.linspace(near, far, n, device=rays_o.device)
    return rays_o[:, None] + rays_d[:, None] * t[:, None], t


def render(field, rays_o, rays_d, n_samples=64):
    xyz, t = sample_points(rays_o, rays_d, n_samples)
    dirs = rays_d[:, None].expand_as(xyz)
    sigma, rgb = field(xyz, dirs)
    alpha = 1 - torch.exp(-sigma * (t[1] - t[0]))
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    weights = alpha * trans
    return {"rgb": (weights[..., None] * rgb).sum(1), "depth": (weights * t).sum(1)}


class Scene:
    def __init__(self, views, h, w):
        self.views, self.h, self.w = views, h, w

    def random_rays(self, n):
        d = torch.nn.functional.normalize(torch.randn(n, 3), dim=-1)
        return torch.zeros(n, 3), d, torch.rand(n, 3)

    def image_rays(self, i):
        return self.random_rays(self.h * self.w)


def train(field, scene, opt, steps, batch_size):
    for _ in range(steps):
        o, d, gt = (x.cuda() for x in scene.random_rays(batch_size))
        loss = ((render(field, o, d)["rgb"] - gt) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


@torch.no_grad()
def validate(field, scene, fixed=False):
    psnrs = []
    for i in range(scene.views):
        o, d, gt = (x.cuda() for x in scene.image_rays(i))
        if fixed:
            parts = [render(field, *rays) for rays in zip(o.split(32768), d.split(32768))]
            out = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        else:
            out = render(field, o, d)
        mse = ((out["rgb"] - gt) ** 2).mean()
        psnrs.append((-10 * torch.log10(mse + 1e-8)).item())
        depth = out["depth"].view(scene.h, scene.w).cpu()
    return sum(psnrs) / len(psnrs), depth


@expected("larger_step", fix="split|part", thread="kwea123/ngp_pl#44", memory=11900)
def ngp_validate(fixed=False):
    """The validation renders all rays of an image of 840 x 1297 pixels at once, where training takes 8192 at a time. Cured by: Render the
    rays in chunks.
    """
    scene = Scene(views=4, h=840, w=1297)
    field = HashField().cuda()
    opt = torch.optim.Adam(field.parameters(), lr=1e-2)
    for _ in range(2):
        train(field, scene, opt, 10, 8192)
        psnr, _ = validate(field, scene, fixed)
    return psnr
