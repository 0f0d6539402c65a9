"""Makes images with a diffusion pipeline, with an adapter for image prompts and again without it."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class AttnProcessor:
    def __call__(self, attn, x, context):
        q, k, v = attn.project(x, context)
        scores = torch.baddbmm(torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device),
                               q, k.transpose(1, 2), beta=0, alpha=attn.scale)
        probs = scores.softmax(dim=-1)
        return attn.merge(torch.bmm(probs, v))


class AttnProcessorSDPA:
    def __call__(self, attn, x, context):
        q, k, v = attn.project(x, context)
        return attn.merge(F.scaled_dot_product_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0))


class Attention(nn.Module):
    def __init__(self, dim, ctx_dim, heads):
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(dim // heads)
        self.to_q, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.to_k, self.to_v = nn.Linear(ctx_dim, dim), nn.Linear(ctx_dim, dim)
        self.processor = AttnProcessorSDPA()

    def project(self, x, context):
        context = x if context is None else context
        out = []
        for t in (self.to_q(x), self.to_k(context), self.to_v(context)):
            b, n, c = t.shape
            out.append(t.view(b, n, self.heads, -1).transpose(1, 2).reshape(b * self.heads, n, -1))
        return out

    def merge(self, y):
        bh, n, d = y.shape
        y = y.view(bh // self.heads, self.heads, n, d).transpose(1, 2).reshape(-1, n, self.heads * d)
        return self.to_out(y)

    def forward(self, x, context=None):
        return self.processor(self, x, context)


class Stage(nn.Module):
    def __init__(self, dim, heads=8, ctx=768):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm = nn.GroupNorm(32, dim)
        self.attn1, self.attn2 = Attention(dim, dim, heads), Attention(dim, ctx, heads)

    def forward(self, x, context):
        x = x + self.conv(F.silu(self.norm(x)))
        b, c, h, w = x.shape
        t = x.flatten(2).transpose(1, 2)
        t = t + self.attn1(t)
        t = t + self.attn2(t, context)
        return t.transpose(1, 2).reshape(b, c, h, w)


class UNet(nn.Module):
    def __init__(self, dim=320, fixed=False):
        super().__init__()
        self.fixed = fixed
        self.inp, self.out = nn.Conv2d(4, dim, 3, padding=1), nn.Conv2d(dim, 4, 3, padding=1)
        self.s1, self.s2, self.s3 = Stage(dim), Stage(dim), Stage(dim)

    def attentions(self):
        return [m for m in self.modules() if isinstance(m, Attention)]

    def set_default_attn_processor(self):
        for m in self.attentions():
            m.processor = AttnProcessorSDPA() if self.fixed else AttnProcessor()

    def forward(self, x, context):
        x = self.s1(self.inp(x), context)
        y = F.interpolate(self.s2(F.avg_pool2d(x, 2), context), scale_factor=2)
        return self.out(self.s3(x + y, context))


class Pipeline:
    def __init__(self, fixed=False):
        self.unet = UNet(fixed=fixed).half().cuda().eval()
        self.image_tokens = None

    def load_ip_adapter(self, n_tokens=4):
        self.image_tokens = torch.randn(1, n_tokens, 768).half().cuda()

    def unload_ip_adapter(self):
        self.image_tokens = None
        self.unet.set_default_attn_processor()

    @torch.no_grad()
    def __call__(self, height, width, steps=4, images=2):
        context = torch.randn(1, 77, 768).half().cuda()
        if self.image_tokens is not None:
            context = torch.cat([context, self.image_tokens], 1)
        context = context.expand(2 * images, -1, -1)
        lat = torch.randn(images, 4, height // 8, width // 8).half().cuda()
        for _ in range(steps):
            uncond, cond = self.unet(torch.cat([lat, lat]), context).chunk(2)
            lat = lat - 0.1 * (uncond + 7.5 * (cond - uncond))
        return lat.cpu()


@expected("attention_scores", fix="scaled_dot_product_attention|SDPA", thread="huggingface/diffusers#7300", memory=11900)
def ip_adapter_unet(fixed=False):
    """`unload_ip_adapter` gives the attention layers the plain processor, which makes the whole matrix of scores, where they had
    `scaled_dot_product_attention` before. Cured by: Restore the processor with `F.scaled_dot_product_attention`.
    """
    pipe = Pipeline(fixed)
    pipe.load_ip_adapter()
    pipe(1024, 1024)
    pipe.unload_ip_adapter()
    return pipe(1024, 1024).shape
