"""Learns the embedding of one new token through a frozen UNet that checkpoints its blocks."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from expected import expected


class ConceptImages(Dataset):
    def __init__(self, length=64, vocab=1000, tokens=77):
        self.length, self.vocab, self.tokens = length, vocab, tokens

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        prompt = torch.randint(0, self.vocab - 1, (self.tokens,))
        prompt[5] = self.vocab - 1
        return torch.randn(4, 64, 64), prompt


class TextEncoder(nn.Module):
    def __init__(self, vocab=1000, dim=768):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, 12, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, ids):
        return self.encoder(self.embed(ids))


class CrossBlock(nn.Module):
    def __init__(self, ch, ctx_dim, heads=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = nn.GroupNorm(32, ch), nn.GroupNorm(32, ch), nn.LayerNorm(ch)
        self.conv1, self.conv2 = nn.Conv2d(ch, ch, 3, padding=1), nn.Conv2d(ch, ch, 3, padding=1)
        self.temb = nn.Linear(256, ch)
        self.q, self.kv, self.out = nn.Linear(ch, ch), nn.Linear(ctx_dim, 2 * ch), nn.Linear(ch, ch)

    def forward(self, x, temb, ctx):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.temb(F.silu(temb))[:, :, None, None]
        x = x + self.conv2(F.silu(self.norm2(h)))
        b, c, height, width = x.shape
        seq = x.flatten(2).transpose(1, 2)
        q = self.q(self.norm3(seq)).view(b, -1, self.heads, c // self.heads).transpose(1, 2)
        k, v = self.kv(ctx).view(b, -1, 2, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, c)
        return (seq + self.out(a)).transpose(1, 2).reshape(b, c, height, width)


class UNet(nn.Module):
    def __init__(self, ch=320, ctx_dim=768, depth=8):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, ch, 3, padding=1), nn.Conv2d(ch, 4, 3, padding=1)
        self.time = nn.Embedding(1000, 256)
        self.blocks = nn.ModuleList(CrossBlock(ch, ctx_dim) for _ in range(depth))
        self.gradient_checkpointing = False

    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing = True

    def forward(self, x, t, ctx):
        temb = self.time(t)
        x = self.conv_in(x)
        for block in self.blocks:
            if self.training and self.gradient_checkpointing:
                x = checkpoint(block, x, temb, ctx, use_reentrant=False)
            else:
                x = block(x, temb, ctx)
        return self.conv_out(x)


def add_noise(latents, noise, t):
    alpha = torch.linspace(0.999, 0.01, 1000, device=latents.device)[t].view(-1, 1, 1, 1)
    return alpha.sqrt() * latents + (1 - alpha).sqrt() * noise


@expected("checkpoints_without_effect", fix=r"model\.train\(\)", thread="victorchall/EveryDream2trainer#246", memory=2500)
def frozen_unet_in_eval(fixed=False):
    device = torch.device("cuda")
    text_encoder, unet = TextEncoder().to(device), UNet().to(device)
    unet.requires_grad_(False)
    text_encoder.encoder.requires_grad_(False)
    unet.enable_gradient_checkpointing()
    if fixed:
        unet.train()
    else:
        unet.eval()
    text_encoder.train()

    loader = DataLoader(ConceptImages(), batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(text_encoder.embed.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    for latents, ids in loader:
        latents, ids = latents.to(device), ids.to(device)
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (latents.shape[0],)).to(device)
        pred = unet(add_noise(latents, noise, t), t, text_encoder(ids))
        loss = F.mse_loss(pred, noise)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return text_encoder.embed.weight[-1].detach().cpu()
