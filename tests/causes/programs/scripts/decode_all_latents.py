"""Samples many images at once by latent diffusion in half precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

LATENT, IMAGES = 64, 16


class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, cin), nn.GroupNorm(32, cout)
        self.conv1, self.conv2 = nn.Conv2d(cin, cout, 3, padding=1), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class Decoder(nn.Module):
    """Makes images of 512 x 512 pixels from latents of 64 x 64."""

    def __init__(self, widths=(512, 512, 256, 128)):
        super().__init__()
        self.conv_in = nn.Conv2d(4, widths[0], 3, padding=1)
        self.levels = nn.ModuleList()
        previous = widths[0]
        for width in widths:
            self.levels.append(nn.Sequential(ResBlock(previous, width), ResBlock(width, width)))
            previous = width
        self.upsamplers = nn.ModuleList(nn.Conv2d(w, w, 3, padding=1) for w in widths[:-1])
        self.norm_out = nn.GroupNorm(32, previous)
        self.conv_out = nn.Conv2d(previous, 3, 3, padding=1)

    def forward(self, z):
        h = self.conv_in(z)
        for i, level in enumerate(self.levels):
            h = level(h)
            if i < len(self.upsamplers):
                h = self.upsamplers[i](F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.norm_out(h)))


class Denoiser(nn.Module):
    """A small diffusion transformer on 2 x 2 patches of the latent."""

    def __init__(self, dim=1024, depth=12, ctx=768):
        super().__init__()
        self.patch = nn.Conv2d(4, dim, 2, stride=2)
        self.time, self.text = nn.Embedding(1000, dim), nn.Linear(ctx, dim)
        layer = nn.TransformerEncoderLayer(dim, 16, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.unpatch = nn.ConvTranspose2d(dim, 4, 2, stride=2)

    def forward(self, x, t, ctx):
        h = self.patch(x)
        b, c, height, width = h.shape
        h = h.flatten(2).transpose(1, 2) + self.time(t)[:, None]
        h = self.blocks(torch.cat([h, self.text(ctx)], 1))[:, : height * width]
        return self.unpatch(h.transpose(1, 2).reshape(b, c, height, width))


class Pipeline:
    def __init__(self, device, dtype=torch.float16, fixed=False):
        self.device, self.dtype, self.fixed = device, dtype, fixed
        self.denoiser = Denoiser().to(device, dtype).eval()
        self.vae = Decoder().to(device, dtype).eval()
        self.alphas = torch.linspace(0.999, 0.01, 1000)

    @torch.no_grad()
    def denoise(self, ctx, steps=10, guidance=7.5):
        latents = torch.randn(len(ctx), 4, LATENT, LATENT).to(self.device, self.dtype)
        uncond = torch.zeros_like(ctx)
        for t in torch.linspace(999, 0, steps).long().tolist():
            tt = torch.full((len(ctx),), t, device=self.device)
            noise = self.denoiser(latents, tt, ctx)
            base = self.denoiser(latents, tt, uncond)
            noise = base + guidance * (noise - base)
            a = self.alphas[t].item()
            latents = (latents - (1 - a) ** 0.5 * noise) / a ** 0.5
        return latents

    @torch.no_grad()
    def decode_latents(self, latents):
        latents = latents / 0.18215
        images = torch.cat([self.vae(z) for z in latents.split(1)]) if self.fixed else self.vae(latents)
        images = (images / 2 + 0.5).clamp(0, 1)
        return images.permute(0, 2, 3, 1).float().cpu().numpy()

    def __call__(self, prompt_embeds):
        ctx = prompt_embeds.to(self.device, self.dtype)
        return self.decode_latents(self.denoise(ctx))


@expected("batch_without_gradients", fix="split", thread="huggingface/diffusers#1150", memory=6144)
def decode_all_latents(fixed=False):
    return Pipeline(torch.device("cuda"), fixed=fixed)(torch.randn(IMAGES, 77, 768))
