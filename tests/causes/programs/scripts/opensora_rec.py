"""Reconstructs videos with a causal video autoencoder and reports the PSNR."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class CausalConv3d(nn.Module):
    def __init__(self, cin, cout, k=3, stride=(1, 1, 1)):
        super().__init__()
        self.time_pad = k - 1
        self.conv = nn.Conv3d(cin, cout, k, stride=stride, padding=(0, k // 2, k // 2))

    def forward(self, x):
        first = x[:, :, :1].repeat(1, 1, self.time_pad, 1, 1)
        return self.conv(torch.cat([first, x], dim=2))


class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, cin), CausalConv3d(cin, cout)
        self.n2, self.c2 = nn.GroupNorm(8, cout), CausalConv3d(cout, cout)
        self.skip = nn.Conv3d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        h = self.c1(F.silu(self.n1(x)))
        h = self.c2(F.silu(self.n2(h)))
        return self.skip(x) + h


class Encoder(nn.Module):
    def __init__(self, ch, z):
        super().__init__()
        self.inp = CausalConv3d(3, ch)
        self.b1, self.d1 = ResBlock(ch, ch), CausalConv3d(ch, ch, stride=(1, 2, 2))
        self.b2, self.d2 = ResBlock(ch, 2 * ch), CausalConv3d(2 * ch, 2 * ch, stride=(2, 2, 2))
        self.b3 = ResBlock(2 * ch, 4 * ch)
        self.out = nn.Conv3d(4 * ch, 2 * z, 1)

    def forward(self, x):
        h = self.d1(self.b1(self.inp(x)))
        h = self.d2(self.b2(h))
        return self.out(self.b3(h)).chunk(2, dim=1)


class Decoder(nn.Module):
    def __init__(self, ch, z):
        super().__init__()
        self.inp = nn.Conv3d(z, 4 * ch, 1)
        self.b3, self.b2, self.b1 = ResBlock(4 * ch, 2 * ch), ResBlock(2 * ch, ch), ResBlock(ch, ch)
        self.out = CausalConv3d(ch, 3)

    def forward(self, z, size):
        h = self.b3(self.inp(z))
        h = F.interpolate(h, size=(size[0], size[1] // 2, size[2] // 2), mode="nearest")
        h = self.b2(h)
        h = F.interpolate(h, size=size, mode="nearest")
        return torch.tanh(self.out(self.b1(h)))


class CausalVAE(nn.Module):
    def __init__(self, ch=24, z=4):
        super().__init__()
        self.encoder, self.decoder = Encoder(ch, z), Decoder(ch, z)

    def encode(self, x):
        mean, logvar = self.encoder(x)
        return mean + torch.randn_like(mean) * (0.5 * logvar.clamp(-20, 10)).exp()

    def decode(self, z, size):
        return self.decoder(z, size)


def read_video(seed, num_frames, size):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_frames, size, size, 3), generator=g, dtype=torch.uint8)


def preprocess(video):
    return (video.permute(3, 0, 1, 2).float() / 127.5 - 1).unsqueeze(0)


def to_video(x):
    x = ((x[0].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return x.permute(1, 2, 3, 0)


def psnr(a, b):
    mse = ((a.float() - b.float()) ** 2).mean().clamp(min=1e-6)
    return (10 * torch.log10(255.0 ** 2 / mse)).item()


def reconstruct(vae, video, device):
    x = preprocess(video).to(device)
    latents = vae.encode(x)
    rec = vae.decode(latents, tuple(x.shape[2:]))
    return to_video(rec.detach().cpu())


@expected("evaluation_keeps_graphs", fix="no_grad.*reconstruct", thread="PKU-YuanGroup/Open-Sora-Plan#69", memory=4096)
def opensora_rec(fixed=False, num_frames=49, size=256):
    device = torch.device("cuda")
    vae = CausalVAE().to(device)
    vae.eval()
    run = torch.no_grad()(reconstruct) if fixed else reconstruct
    ratios = []
    for seed in range(2):
        video = read_video(seed, num_frames, size)
        ratios.append(psnr(video, run(vae, video, device)))
    return ratios
