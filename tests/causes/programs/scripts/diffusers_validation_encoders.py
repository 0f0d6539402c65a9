"""Trains a small diffusion transformer on one prompt, which is encoded before, and draws images for another one now and then."""
import gc

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from expected import expected

DEVICE, HALF = "cuda", torch.float16
INSTANCE_PROMPT, VALIDATION_PROMPT = "a photo of sks dog", "a photo of sks dog in a bucket"
BATCH, STEPS, VALIDATION_STEPS, VALIDATION_IMAGES = 2, 6, 3, 2


class Latents(Dataset):
    """Of images that the autoencoder has encoded."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.randn(256, 64)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, context):
        h = self.n1(x)
        x = x + self.self_attn(h, h, h, need_weights=False)[0]
        x = x + self.cross(self.n2(x), context, context, need_weights=False)[0]
        return x + self.mlp(self.n3(x))


class Denoiser(nn.Module):
    def __init__(self, dim=1024, depth=4, text_dim=2048, pooled_dim=768):
        super().__init__()
        self.inp, self.out = nn.Linear(64, dim), nn.Linear(dim, 64)
        self.text, self.pooled = nn.Linear(text_dim, dim), nn.Linear(pooled_dim, dim)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, 16) for _ in range(depth))

    def forward(self, x, t, text, pooled):
        h = self.inp(x) + (self.time(t[:, None]) + self.pooled(pooled))[:, None]
        context = self.text(text).expand(x.size(0), -1, -1)
        for block in self.blocks:
            h = block(h, context)
        return self.out(h)


def load_text_encoders():
    clip = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12))
    t5 = T5EncoderModel(T5Config(d_model=2048, d_kv=64, d_ff=5120, num_layers=8, num_heads=32))
    return clip.to(DEVICE, HALF).eval(), t5.to(DEVICE, HALF).eval()


@torch.no_grad()
def encode_prompt(prompt, encoders):
    clip, t5 = encoders
    ids = torch.tensor([[ord(c) % 1000 for c in prompt.ljust(64)]], device=DEVICE)
    return t5(input_ids=ids).last_hidden_state.float(), clip(input_ids=ids).pooler_output.float()


def log_validation(model, encoded=None):
    """Draws images for the prompt of the validation, or for what has been encoded."""
    if encoded is None:
        encoders = load_text_encoders()
        encoded = encode_prompt(VALIDATION_PROMPT, encoders)
    model.eval()
    with torch.no_grad():
        x = torch.randn(VALIDATION_IMAGES, 256, 64, device=DEVICE)
        for i in range(8):
            t = torch.full((len(x),), 1 - i / 8, device=DEVICE)
            x = x - model(x, t, *encoded) / 8
    model.train()
    return x.cpu()


@expected("several_models", fix="once, before|before training", thread="huggingface/diffusers#9358", memory=1750)
def diffusers_validation_encoders(fixed=False):
    torch.manual_seed(0)
    encoders = load_text_encoders()
    text, pooled = encode_prompt(INSTANCE_PROMPT, encoders)
    encoded = encode_prompt(VALIDATION_PROMPT, encoders) if fixed else None
    del encoders
    gc.collect()
    torch.cuda.empty_cache()

    model = Denoiser().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    images = []
    for step, clean in enumerate(DataLoader(Latents(STEPS * BATCH), batch_size=BATCH)):
        clean = clean.to(DEVICE)
        noise, t = torch.randn_like(clean), torch.rand(len(clean), device=DEVICE)
        noisy = (1 - t)[:, None, None] * clean + t[:, None, None] * noise
        loss = F.mse_loss(model(noisy, t, text, pooled), noise - clean)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % VALIDATION_STEPS == 0:
            images.append(log_validation(model, encoded))
            torch.cuda.empty_cache()
    return images
